"""``aligner generate``: see ``aligner/evaluation/generate.py``."""

from __future__ import annotations

from aligner.evaluation.generate import run

__all__ = ["run"]

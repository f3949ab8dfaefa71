"""``aligner evaluate``: see ``aligner/evaluation/evaluate.py``."""

from __future__ import annotations

from aligner.evaluation.evaluate import run

__all__ = ["run"]

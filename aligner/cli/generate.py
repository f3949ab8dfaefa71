"""``aligner generate``: see ``aligner/algorithms/generate.py``."""

from __future__ import annotations

from aligner.algorithms.generate import run

__all__ = ["run"]

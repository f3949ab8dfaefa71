"""``aligner evaluate``: see ``aligner/algorithms/evaluate.py``."""

from __future__ import annotations

from aligner.algorithms.evaluate import run

__all__ = ["run"]

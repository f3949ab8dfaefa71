"""``aligner rm``: see ``aligner/algorithms/rm.py``."""

from __future__ import annotations

from aligner.algorithms.rm import run

__all__ = ["run"]

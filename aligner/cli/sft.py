"""``aligner sft``: see ``aligner/algorithms/sft.py``."""

from __future__ import annotations

from aligner.algorithms.sft import run

__all__ = ["run"]

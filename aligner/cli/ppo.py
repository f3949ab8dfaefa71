"""``aligner ppo``: see ``aligner/algorithms/ppo.py``."""

from __future__ import annotations

from aligner.algorithms.ppo import run

__all__ = ["run"]

"""What a rank knows about the run it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aligner.distributed.platform import Platform


@dataclass(frozen=True)
class RunContext:
    """``run_dir`` is the same path on every rank; ``rank`` and ``world_size`` are global."""

    run_dir: Path
    rank: int
    world_size: int
    platform: Platform

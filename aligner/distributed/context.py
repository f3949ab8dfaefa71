"""What a rank knows about the run it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from aligner.distributed.platform import Platform
from aligner.distributed.stop import StopSignals
from aligner.distributed.watchdog import Watchdog


@dataclass(frozen=True)
class RunContext:
    """``run_dir`` is the same path on every rank; ``rank`` and ``world_size`` are global.

    ``resume_from`` is the sound checkpoint that this life continues, the same on every rank; None: a new run.
    ``holds_run``: whether the run directory is still this process's (rank 0 knows, the others say yes).
    ``deadline``: when this life must have ended, in seconds since the epoch; None: never. ``held`` ends with the life:
    the lease of the run directory, the watchdog.
    """

    run_dir: Path
    rank: int
    world_size: int
    platform: Platform
    resume_from: Path | None = None
    deadline: float | None = None
    stop: StopSignals = field(default_factory=StopSignals)
    watchdog: Watchdog = field(default_factory=Watchdog)
    holds_run: Callable[[], bool] = lambda: True
    held: ExitStack = field(default_factory=ExitStack)

    def poll(self) -> None:
        """Show a sign of life and raise Stopped on all ranks when one was asked to stop. Collective."""
        self.watchdog.beat()
        self.stop.check()

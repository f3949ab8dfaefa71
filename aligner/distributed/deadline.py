"""When a life of a run has to be over, and whether there is time for more before that."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import datetime

from aligner.config.duration import parse_duration

__all__ = ["Deadline", "parse_duration", "slurm_end_time"]

SQUEUE_TIMEOUT_S = 10.0


def slurm_end_time(environ: Mapping[str, str]) -> float | None:
    """When Slurm ends this job, in seconds since the epoch; None outside of a job, or for a limit nobody knows.

    From ``SLURM_JOB_END_TIME``, which older releases (22.05) do not set in a batch job, else from ``squeue``.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if not job.isdigit():
        return None
    given = environ.get("SLURM_JOB_END_TIME", "")
    if given.isdigit() and int(given) > 0:
        return float(given)
    try:
        done = subprocess.run(
            ["squeue", "-h", "-j", job, "-o", "%e"],
            env={**environ, "SLURM_TIME_FORMAT": "standard"},
            capture_output=True,
            text=True,
            timeout=SQUEUE_TIMEOUT_S,
        )
        ends = [datetime.fromisoformat(line.strip()).timestamp() for line in done.stdout.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError, ValueError):  # ValueError: NONE, N/A, Unknown
        return None
    return min(ends) if done.returncode == 0 and ends else None


class Deadline:
    """Decides when to stop so that the last save is through by ``end``. Local; one rank asks and tells the others.

    The forecast is the longest step and the longest save of this life, times ``margin``. Inside a step, the stretch to
    the next chance to stop counts instead of the step: the longest time between two looks that was seen. Before
    anything was seen, a tenth of the time there was at the start is kept, at most a minute; later too.

    Args:
        end: seconds since the epoch; None: there is no deadline.
        clock: seconds since the epoch.
    """

    def __init__(self, end: float | None, *, clock: Callable[[], float] = time.time, margin: float = 1.2) -> None:
        self.end = end
        self._clock = clock
        self._margin = margin
        self._floor = min(60.0, max(0.0, 0.1 * (end - clock()))) if end is not None else 0.0
        self._longest_step = 0.0
        self._longest_save = 0.0
        self._longest_stretch = 0.0
        self._looked_at: float | None = None

    def note_step(self, seconds: float) -> None:
        """A step has ended, and took this long without its save."""
        self._longest_step = max(self._longest_step, seconds)
        self._end_stretch(None)

    def note_save(self, seconds: float) -> None:
        """A save took this long, from its begin until it was published."""
        self._longest_save = max(self._longest_save, seconds)
        self._looked_at = None

    def reserve(self, *, between_steps: bool = True) -> float:
        """Seconds before the end at which to stop."""
        work = self._longest_step if between_steps else self._longest_stretch
        return max(self._floor, (work + self._longest_save) * self._margin)

    def is_near(self, *, between_steps: bool = True) -> bool:
        """Whether to stop now: there is no time for another step and a save (inside a step: to look again later)."""
        if self.end is None:
            return False
        now = self._clock()
        self._end_stretch(now)
        return now + self.reserve(between_steps=between_steps) >= self.end

    def _end_stretch(self, next_look: float | None) -> None:
        if self._looked_at is not None:
            now = self._clock() if next_look is None else next_look
            self._longest_stretch = max(self._longest_stretch, now - self._looked_at)
        self._looked_at = next_look

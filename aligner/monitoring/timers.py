"""Seconds per phase, and the process's peak memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager


class PhaseTimers:
    """Wall-clock seconds a phase: ``with timers("rollout"): ...``.

    Time is exclusive: inside a nested phase the outer one stands still, so the phases of a step never count a second
    twice and can be stacked. A phase entered several times adds up. ``on_enter`` is told each phase's name (the
    progress display shows it). ``synchronize`` waits for the device: it is called when a phase begins and when its
    block is through, so that work which a GPU still does counts where it was asked for.
    """

    def __init__(
        self,
        on_enter: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] | None = None,
    ):
        self._on_enter = on_enter
        self._clock = clock
        self._synchronize = synchronize or (lambda: None)
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time of the ``with`` block as ``phase``, also when it raises."""
        self._synchronize()
        self._credit()
        self._open.append(phase)
        if self._on_enter is not None:
            self._on_enter(phase)
        try:
            yield
            self._synchronize()
        finally:
            self._credit()
            self._open.pop()

    def _credit(self) -> None:
        """Give the time since the last change to the innermost open phase."""
        now = self._clock()
        if self._open:
            phase = self._open[-1]
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now

    def peek(self) -> dict[str, float]:
        """Seconds a phase since the last :meth:`take`; goes on counting."""
        self._credit()
        return dict(self._seconds)

    def take(self) -> dict[str, float]:
        """Seconds a phase since the last call, in the order of first entry; starts again from zero."""
        self._credit()
        taken, self._seconds = self._seconds, {}
        return taken


def slowest(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Per phase, the largest of several ranks' seconds (what the step waited for)."""
    result: dict[str, float] = {}
    for part in parts:
        for phase, seconds in part.items():
            result[phase] = max(seconds, result.get(phase, 0.0))
    return result


def peak_memory_gib() -> float:
    """Highest resident memory of this process since its start, in GiB (host memory, not a GPU's)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024**3 if sys.platform == "darwin" else 1024**2)  # bytes on macOS, KiB on Linux

"""Notices that this rank, or another, no longer goes on, and ends this process with its Python stacks on the disk.

A thread compares the time since the last sign of life with the time-out of the phase. It also looks for the tracebacks
that failing ranks leave in ``RUN/errors``: a rank that waits in a collective for one of them would wait for ever where
nobody breaks the connection. What an earlier life has left there is removed before the watchdog starts.

A thread needs Python's interpreter lock. For C code that never gives it back there is a second clock, in C: it writes
the stacks into ``RUN/errors/.stacks_rank_<r>.txt`` and ends the process with code 1. The other ranks, whose own time is
over by then, and the launcher know such a file and give it its usual name.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

HUNG = 72  # exit code: this rank showed no sign of life
RANK_FAILURE = 8  # exit code: another rank failed and this one could not leave by itself
FOLLOW_AFTER_S = 10.0  # from another rank's failure until this one ends
_LOOK_S = 1.0
_ARM_S = 5.0  # how often the clock in C is set back
_GIL_MARGIN_S = 7.0  # of that clock: more than it is late, less than others wait for this rank's stacks
_OTHER_STACKS_S = 15.0  # a hung rank gives the others to write their stacks before it ends
_LEAVE_S = 60.0  # to end; then the clock in C does it, for the file system may hang too


class Watchdog:
    """Watches over this process between :meth:`start` and :meth:`stop`; before, its methods do nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._phase = ""
        self._default, self._timeouts = math.inf, dict[str, float]()
        self._last = 0.0
        self._idle = 0
        self._failure_seen: float | None = None
        self._arming = threading.Lock()
        self._fallback: TextIO | None = None
        self._armed_at = -math.inf

    def start(
        self,
        run_dir: Path,
        rank: int,
        default_timeout: float,
        phase_timeouts: Mapping[str, float],
        *,
        world_size: int = 1,
        look_s: float = _LOOK_S,
        follow_after_s: float = FOLLOW_AFTER_S,
    ) -> None:
        """Watch from now on; ``default_timeout`` seconds, or those of ``phase_timeouts`` by phase."""
        self._errors = run_dir / "errors"
        self._world_size = world_size
        self._rank = rank
        self._default, self._timeouts = default_timeout, dict(phase_timeouts)
        self._look_s, self._follow_after_s = look_s, follow_after_s
        self._last = self._clock()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        self._thread = None
        faulthandler.cancel_dump_traceback_later()
        if self._fallback is None:
            return
        self._fallback.close()
        self._fallback = None
        with suppress(OSError):  # nothing is left of a life without a hang
            os.unlink(self._fallback_path(self._rank))
            os.rmdir(self._errors)

    def enter(self, phase: str) -> None:
        """A phase begins: its time-out counts from here."""
        before = self.timeout
        self._phase = phase
        self.beat()
        if self._thread is not None and self.timeout != before:
            self._armed_at = -math.inf
            self._arm_fallback()

    def beat(self) -> None:
        """A sign of life."""
        self._last = self._clock()

    @contextmanager
    def idle(self) -> Iterator[None]:
        """No time-out in this block: it may take as long as it needs."""
        with self._arming:
            self._idle += 1
            if self._fallback is not None:
                faulthandler.cancel_dump_traceback_later()
                self._armed_at = -math.inf
        try:
            yield
        finally:
            self.beat()
            self._idle -= 1

    # ------------------------------------------------------------------ the thread

    @property
    def timeout(self) -> float:
        """Seconds without a sign of life after which the current phase counts as hung."""
        return self._timeouts.get(self._phase, self._default)

    def _watch(self) -> None:
        while not self._ended.wait(min(self._look_s, self.timeout / 4)):
            self._arm_fallback()
            silent = self._clock() - self._last
            if not self._idle and silent > self.timeout:
                self._end(HUNG, f"no sign of life in phase '{self._phase}' for {silent:.0f} s")
            hung = self._other_rank("stacks_rank_")
            failed = self._other_rank("rank_")
            if hung is not None and failed is None:
                self._end(HUNG, f"rank {hung} hangs; this rank is in phase '{self._phase}'")
            if failed is None:
                continue
            if self._failure_seen is None:
                self._failure_seen = self._clock()
            elif self._clock() - self._failure_seen > self._follow_after_s:
                self._end(RANK_FAILURE, f"rank {failed} failed, so this rank ends in phase '{self._phase}'")

    def _arm_fallback(self) -> None:
        """Let C code end the process when even this thread no longer runs (the interpreter lock is held)."""
        with self._arming:
            now = self._clock()
            if self._idle or now - self._armed_at < min(_ARM_S, self.timeout / 2):
                return
            self._armed_at = now
            try:
                if self._fallback is None:
                    self._errors.mkdir(parents=True, exist_ok=True)
                    self._fallback = self._fallback_path(self._rank).open("w", encoding="utf-8")
            except OSError:
                return  # the disk is full: tried again, and this thread watches anyway
            faulthandler.dump_traceback_later(self.timeout + _GIL_MARGIN_S, exit=True, file=self._fallback)

    def _fallback_path(self, rank: int) -> Path:
        return self._errors / f".stacks_rank_{rank}.txt"

    def _other_rank(self, prefix: str) -> int | None:
        """The rank, not this one, that has left ``<prefix><rank>.txt``."""
        try:
            names = os.listdir(self._errors)
        except OSError:
            return None
        for name in names:
            number = name.removeprefix(prefix).removesuffix(".txt")
            if name == f"{prefix}{number}.txt" and number.isdigit() and int(number) != self._rank:
                with suppress(OSError), (self._errors / name).open():  # a network file system may list what is gone
                    return int(number)
        return None

    def _end(self, code: int, reason: str) -> None:
        """Write the stacks of all threads and leave the process."""
        path = self._errors / f"stacks_rank_{self._rank}.txt"
        faulthandler.dump_traceback_later(_LEAVE_S, exit=True, file=2)
        try:
            self._errors.mkdir(parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8") as stream:
                stream.write(f"rank {self._rank}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {reason}\n\n")
                stream.flush()
                faulthandler.dump_traceback(file=stream, all_threads=True)
            where = f"; its Python stacks are in {path}"
        except OSError as error:
            where = f"; its stacks cannot be written ({error.strerror})"
            faulthandler.dump_traceback(all_threads=True)
        os.write(2, f"error: rank {self._rank}: {reason}{where}\n".encode())  # the hung thread may hold sys.stderr
        flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
        flushing.start()
        if code == HUNG:
            self._wait_for_other_stacks()
        flushing.join(timeout=1)
        os._exit(code)

    def _wait_for_other_stacks(self) -> None:
        """A process that ends breaks its peers' collectives: wait until they have written where they stand."""
        until = self._clock() + _OTHER_STACKS_S
        missing = set(range(self._world_size)) - {self._rank}
        while missing and self._clock() < until:
            for rank in list(missing):
                keep_fallback(self._errors, rank)
                if (self._errors / f"stacks_rank_{rank}.txt").exists():
                    missing.discard(rank)
            time.sleep(0.05)


def keep_fallback(errors: Path, rank: int) -> None:
    """Give stacks that the clock in C has written for ``rank`` their usual name."""
    source = errors / f".stacks_rank_{rank}.txt"
    with suppress(OSError):
        if source.stat().st_size:
            source.rename(errors / f"stacks_rank_{rank}.txt")

"""Stop signals of the launcher go on to its ranks, which save and end; who does not end in time is killed.

A rank gets each signal once, and not before it has a handler for it: until then it would die of it. Ranks have
sessions of their own, so a Ctrl-C reaches the launcher alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

#: What each signal means to the ranks. A terminal that is closed is somebody who stops the run.
FORWARDED = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGTERM,
}
#: Two SIGINTs within this time are one key press that came both from the terminal and from a parent.
SAME_PRESS_S = 0.25
_LOOK_S = 0.1


class StopForwarding:
    """A context in which signals to this process go to the ranks given to :meth:`watch`; for the main thread.

    In another thread signals stay as they are, and only :meth:`end` does something.
    """

    def __init__(self, grace_s: float) -> None:
        self.killed: set[int] = set()  # ranks that this process has killed, so their exit code says nothing
        self.at_once = False  # a second Ctrl-C
        self._grace_s = grace_s
        self._ranks: dict[int, subprocess.Popen[Any]] = {}
        self._delivered: set[tuple[int, signal.Signals]] = set()  # process id, signal
        self._asked: list[signal.Signals] = []  # only appended to, by the handler
        self._asked_at = 0.0
        self._interrupted_at: float | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._forward, daemon=True, name="stop-forwarding")

    def __enter__(self) -> StopForwarding:
        if threading.current_thread() is threading.main_thread():
            for number in FORWARDED:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                    self._previous[number] = signal.signal(number, self._handle)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @property
    def asked(self) -> bool:
        """Whether a stop was asked for: then nothing is started again."""
        return bool(self._asked)

    def watch(self, ranks: Mapping[int, subprocess.Popen[Any]]) -> None:
        """``ranks`` have been started: signals, also those that came before, are for them."""
        self.killed = set()
        self._ranks = dict(ranks)

    def end(self, within_s: float) -> None:
        """One rank has ended: wait for the others, which notice it themselves, and kill those that have not in time."""
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            running = [process for process in self._ranks.values() if process.poll() is None]
            if not running:
                return
            for process in running:
                if not _handles(process.pid, signal.SIGTERM):
                    process.terminate()  # it is only starting, or has nothing more to save or say
            time.sleep(_LOOK_S)
        self._kill()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT:
            self.at_once |= self._interrupted_at is not None and now - self._interrupted_at > SAME_PRESS_S
            self._interrupted_at = self._interrupted_at or now
        self._asked_at = self._asked_at or now
        self._asked.append(FORWARDED[signal.Signals(number)])

    def _forward(self) -> None:
        while not self._over.wait(_LOOK_S):
            for number in list(self._asked):
                for process in self._ranks.values():
                    key = (process.pid, number)
                    if key not in self._delivered and process.poll() is None and _is_ready(process.pid, number):
                        process.send_signal(number)
                        self._delivered.add(key)
            late = self._asked and time.monotonic() - self._asked_at > self._grace_s
            if (late or self.at_once) and self._kill() and not self.at_once:
                print(f"error: the ranks did not end within {self._grace_s:.0f} s of the stop", file=sys.stderr)

    def _kill(self) -> bool:
        """SIGKILL to the ranks that still run, and to what they started; whether there were any."""
        running = {rank: process for rank, process in self._ranks.items() if process.poll() is None}
        for rank, process in running.items():
            if rank in self.killed:
                continue
            self.killed.add(rank)
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return bool(running)


def _is_ready(pid: int, number: signal.Signals) -> bool:
    """Whether the process takes the signal as a request. Python itself has a handler for SIGINT from the start."""
    return _handles(pid, signal.SIGTERM if number == signal.SIGINT else number)


def _handles(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for the signal; where that is not known, it counts as having one."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), None)
    return caught is None or bool(int(caught.split()[1], 16) >> (number - 1) & 1)

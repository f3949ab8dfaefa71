"""Requests to stop: a signal on any rank, the deadline, or the program itself; all ranks agree before one acts.

A handler only sets a flag. :meth:`StopSignals.poll` is the agreement: one small all-reduce, so it may be called only
where all ranks are in lockstep: between schedule calls, every few decode steps, between batches; never inside a
pipeline schedule. Once agreed, a request stays: a SIGTERM that follows while the run saves (Slurm sends one at the time
limit) does not change it. Among requests of the same poll, the ones that do not want a restart win.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from aligner.distributed import platform
from aligner.distributed.collectives import all_gather_objects
from aligner.errors import ConfigError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
DEADLINE = "deadline"
#: Two SIGINTs within this time are one key press that came both from the terminal and from a launcher.
SAME_PRESS_S = 0.25


@dataclass(frozen=True)
class StopRequest:
    """``reason``: ``SIGTERM``, ``SIGINT``, ``SIGUSR1``, ``deadline`` or a text; ``restart``: start the run again."""

    reason: str
    restart: bool


class Stopped(Exception):
    """All ranks stop for ``request``. ``step``: the last finished one; ``message``: what was saved and how to go on.

    Whoever saves fills in the last two.
    """

    def __init__(self, request: StopRequest) -> None:
        super().__init__(request.reason)
        self.request = request
        self.step: int | None = None
        self.message: str | None = None

    def __str__(self) -> str:
        return self.message or f"stopped by {self.request.reason}"


#: What a poll reduces is a place in this list, weakest first; 0: not asked. The text of a None has to be exchanged.
#: A stop for another reason that wants no restart (the run directory was taken over) beats all.
_LEVELS: tuple[StopRequest | None, ...] = (
    StopRequest(DEADLINE, restart=True),
    None,
    StopRequest("SIGUSR1", restart=True),
    StopRequest("SIGTERM", restart=False),
    StopRequest("SIGINT", restart=False),
    None,
)
_OTHER_RESTART, _OTHER = 2, 6


class StopSignals:
    """The stop requests of this process; one a process. ``install`` and ``uninstall`` are for the main thread."""

    def __init__(self) -> None:
        self._asked: list[StopRequest] = []  # only appended to: by handlers and by other threads
        self._agreed: StopRequest | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._interrupted_at: float | None = None
        self._speaks = False

    def install(self) -> None:
        """Handle SIGTERM, SIGINT and SIGUSR1 as stop requests. A second SIGINT raises KeyboardInterrupt."""
        if self._previous:
            return
        try:
            self._speaks = platform.rank_environment().rank == 0
        except ConfigError:
            self._speaks = True  # the start of this rank reports it
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)

    def uninstall(self) -> None:
        """Restore the handlers that were there before :meth:`install`."""
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def request(self, reason: str, restart: bool) -> None:
        """Ask for a stop from inside; any thread may, and one rank is enough."""
        self._asked.append(StopRequest(reason, restart))

    @property
    def asked(self) -> bool:
        """Whether this rank was asked; the others may not know yet. For waits that no other rank takes part in."""
        return bool(self._asked)

    def poll(self) -> StopRequest | None:
        """The request that all ranks agree on, the same on every rank; None: nobody was asked. Collective."""
        if self._agreed is not None:
            return self._agreed
        own = max(self._asked, key=_level, default=None)
        if platform.world_size() == 1:
            self._agreed = own
            return own
        highest = torch.tensor([_level(own)], dtype=torch.int32)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        level = int(highest.item())
        if level in (_OTHER, _OTHER_RESTART):
            self._agreed = next(one for one in all_gather_objects(own) if _level(one) == level)
        elif level:
            self._agreed = _LEVELS[level - 1]
        return self._agreed

    def check(self) -> None:
        """:meth:`poll`, and raise :class:`Stopped` when there is a request. Collective."""
        request = self.poll()
        if request is not None:
            raise Stopped(request)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is not None and now - self._interrupted_at > SAME_PRESS_S:
                raise KeyboardInterrupt
            self._interrupted_at = self._interrupted_at or now
        request = StopRequest(name, restart=number == signal.SIGUSR1)
        if request in self._asked:
            return
        self._asked.append(request)
        if self._speaks:
            again = "; again to end at once" if number == signal.SIGINT else ""
            os.write(2, f"\n{name}: stopping after saving{again}\n".encode())


def _level(request: StopRequest | None) -> int:
    if request is None:
        return 0
    if request in _LEVELS:
        return _LEVELS.index(request) + 1
    return _OTHER_RESTART if request.restart else _OTHER

"""Runs a function in a forked process that sees memory as it was at the fork: a snapshot without a copy.

The kernel shares the pages and copies those that this process changes later, so training goes on while the child
writes. The child keeps no socket of this process open, dies with it, runs only when a core is idle, and ends without
running anything of Python's or torch's shutdown. Its result comes back through a file in memory, which holds any size.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_WAIT_S = 0.005
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # the parent decides when to stop


class WriterDied(Exception):
    """The writing process ended without a result; the message says how."""


class Writer(Protocol):
    """Work whose result or error is fetched with :meth:`result`, once, when it is :meth:`done`."""

    def done(self) -> bool:
        """Whether the work has ended; never waits."""
        ...

    def wait(self) -> None:
        """Until the work has ended."""
        ...

    def result(self) -> Any:
        """What the work returned; raises what it raised, or :class:`WriterDied`."""
        ...


def start(work: Callable[[], Any], in_background: bool) -> Writer:
    """``work()`` in a process of its own, or here and now; also here when no process can be made."""
    if in_background:
        try:
            return ForkedWriter(work)
        except OSError as error:
            print(f"the checkpoint is written in the foreground: cannot start a process ({error})", flush=True)
    return DoneHere(work)


class DoneHere:
    """Work that this process has done itself."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._value, self._error = None, None
        try:
            self._value = work()
        except Exception as error:
            self._error = error

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class ForkedWriter:
    """``work()`` in a child process.

    ``work`` may read memory and write files; it must not use devices, threads, locks of other threads, or collectives.

    Raises:
        OSError: no process can be made now.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self._results = os.memfd_create("checkpoint-writer", os.MFD_CLOEXEC)
        self._status: int | None = None
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process has threads
                self.pid = os.fork()
        except OSError:
            os.close(self._results)
            raise
        if self.pid == 0:
            _child(work, self._results, parent)

    def done(self) -> bool:
        if self._status is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid == 0:
                    return False
                self._status = status
                return True
            self._status = 0  # somebody else has waited for it: its result tells
        return True

    def wait(self) -> None:
        while not self.done():
            time.sleep(_WAIT_S)

    def result(self) -> Any:
        assert self._status is not None, "the writer has not ended"
        os.lseek(self._results, 0, os.SEEK_SET)
        with os.fdopen(self._results, "rb") as stream:
            data = stream.read()
        if os.WIFSIGNALED(self._status):
            raise WriterDied(f"the writing process was killed by {signal.Signals(os.WTERMSIG(self._status)).name}")
        try:
            succeeded, value = pickle.loads(data)
        except (EOFError, pickle.UnpicklingError):
            raise WriterDied(f"the writing process ended with code {os.WEXITSTATUS(self._status)}") from None
        if not succeeded:
            raise value
        return value


def _child(work: Callable[[], Any], results: int, parent: int) -> NoReturn:
    code = 1
    try:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        torch.set_num_threads(1)  # the OpenMP threads of the parent do not exist here
        _close_inherited(results)
        _yield_cores()
        _send(results, _outcome(work))
        code = 0
    finally:
        os._exit(code)


def _outcome(work: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return True, work()
    except BaseException as error:
        if not isinstance(error, OSError):
            traceback.print_exc()
            sys.stderr.flush()
        return False, error


def _send(results: int, outcome: tuple[bool, Any]) -> None:
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)
    except Exception:  # an error that cannot travel
        data = pickle.dumps((False, WriterDied(f"{type(outcome[1]).__name__}: {outcome[1]}")))
    view = memoryview(data)
    while view:
        view = view[os.write(results, view) :]


def _close_inherited(kept: int) -> None:
    """Close the parent's sockets and files: peers must notice at once when the parent is gone."""
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number != kept:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(number)


def _yield_cores() -> None:
    """Take only what training leaves of the processor."""
    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

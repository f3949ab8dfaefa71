"""The life of one rank: start, run the command's body, end with the right exit code.

Errors: an :class:`~aligner.errors.AlignerError` becomes one ``error:`` line and its exit code; anything else is a bug,
whose traceback is printed and kept in ``run_dir/errors/rank_<r>.txt``. A rank that fails while others run leaves at
once (no clean-up that could wait for peers): the launcher, torchrun, or ``srun --kill-on-bad-exit=1`` then ends the
others, which may be inside a collective; where nobody does, their watchdogs see the marker.

A stop request that all ranks agreed on (:class:`~aligner.distributed.stop.Stopped`) ends with codes of its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed

from aligner.algorithms.lives import ask_for_restart
from aligner.cli import exit_codes
from aligner.cli.launch import release_stop_requests
from aligner.cli.start import start_rank, step_of, tidy_up
from aligner.distributed import platform
from aligner.distributed.collectives import barrier
from aligner.distributed.context import RunContext
from aligner.distributed.stop import Stopped, StopSignals
from aligner.errors import AlignerError, RankFailure
from aligner.monitoring import lives
from launchers.local import LAUNCHER_PID

# Seconds before a failing rank leaves, so that an error is told once: the first rank speaks at once, and the launcher
# then ends the others; ranks that only stop because of another's error wait for that rank to speak.
_OTHER_RANK_DELAY_S = 1.0
_FOLLOWER_DELAY_S = 3.0
_PARENT_POLL_S = 1.0
_ORPHANED = "the launcher is gone, so its ranks end"
_LONGEST_REASON = 1000  # characters

_launcher: int | None = None  # process id of the launcher, while this process is a rank of it


def run_rank(root: Any, body: Callable[[Any, RunContext], None]) -> int:
    """Start this rank, run ``body(root, context)``; returns the exit code.

    With several ranks a failing one does not return: it leaves the process.
    """
    context: RunContext | None = None
    given = Path(root.run.dir) if root.run.dir else None
    is_new = given is None or not given.exists()
    signals = StopSignals()
    signals.install()
    release_stop_requests()
    end_with_launcher(given)
    step, reason = None, "finished"
    failure: AlignerError | None = None
    try:
        context = start_rank(root, signals)
        context.poll()
        body(root, context)
    except Stopped as stopped:
        code = _end_stopped(root, context, stopped)
        step, reason = stopped.step, stopped.request.reason
    except KeyboardInterrupt:
        code, reason = exit_codes.INTERRUPTED, "interrupted"
    except AlignerError as error:
        code, reason, failure = error.exit_code, f"{type(error).__name__}: {error}", error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if _is_lost_peer(error):
            failure = RankFailure(f"lost its peers in a collective: {str(error).splitlines()[0]}")
            code = failure.exit_code
        else:
            code = _report_bug(context.run_dir if context else root.run.dir)
    else:
        code = 0
    agreed = code in (0, exit_codes.STOPPED, exit_codes.STOPPED_RESTART)
    if not agreed and _is_orphan():  # its other ranks are ending too, which may have been what failed here
        code, reason = exit_codes.INTERRUPTED, _ORPHANED
    _close(root, context, step, reason, code)
    if failure is not None:
        if is_new and platform.rank() == 0:
            tidy_up(context.run_dir if context else given)
        signals.uninstall()  # from here on the launcher's SIGTERM ends this rank: another has said why
        _report_error(failure)
    if platform.world_size() > 1 and not agreed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if agreed:
        barrier()  # who ends with a code other than 0 takes slower ranks along: all have said what they have to say
    platform.shutdown()
    signals.uninstall()
    return code


def _end_stopped(root: Any, context: RunContext | None, stopped: Stopped) -> int:
    """Say what was saved; returns the exit code. Collective."""
    restart = stopped.request.restart and hasattr(root, "checkpoint")
    if stopped.message is None and context is not None:  # before the first step, or a command that saves nothing
        step = step_of(context.resume_from)
        restart = restart and ask_for_restart(context, stopped.request, step)
        stopped.step = step
        stopped.message = f"stopped by {stopped.request.reason}; nothing had to be saved"
    if platform.rank() == 0:
        print(stopped.message, file=sys.stderr, flush=True)
    return exit_codes.STOPPED_RESTART if restart else exit_codes.STOPPED


def _close(root: Any, context: RunContext | None, step: int | None, reason: str, code: int) -> None:
    """End what this life holds: its record (rank 0), the lease, the watchdog. Local."""
    if context is None:
        return
    if context.rank == 0 and hasattr(root, "checkpoint"):
        if code == 0:
            step = root.trainer.max_steps
        try:
            lives.end_life(context.run_dir, step=step, reason=_in_one_line(reason), exit_code=code)
        except OSError as error:
            print(f"error: {context.run_dir}: {error.strerror}", file=sys.stderr, flush=True)
    context.held.close()


def _is_orphan() -> bool:
    return _launcher is not None and os.getppid() != _launcher


def _in_one_line(reason: str) -> str:
    return " ".join(line.strip() for line in reason.splitlines())[:_LONGEST_REASON]


def end_with_launcher(run_dir: Path | None) -> None:
    """Under ``aligner``'s own launcher: leave when it is gone, even by SIGKILL; no rank trains on as an orphan."""
    global _launcher
    launcher = os.environ.get(LAUNCHER_PID, "")
    if not launcher.isdigit() or os.getppid() != int(launcher):
        return
    _launcher = int(launcher)

    def watch() -> None:
        while not _is_orphan():
            time.sleep(_PARENT_POLL_S)
        print(f"error: {_ORPHANED}", file=sys.stderr, flush=True)
        if platform.rank() == 0 and run_dir is not None and run_dir.is_dir():
            with contextlib.suppress(OSError):
                lives.end_life(run_dir, step=None, reason=_ORPHANED, exit_code=exit_codes.INTERRUPTED)
        os._exit(exit_codes.INTERRUPTED)

    threading.Thread(target=watch, daemon=True, name="end-with-launcher").start()


def _report_error(error: AlignerError) -> None:
    """Print the error on a rank that found it; see the delays above for why it appears once."""
    rank, several = platform.rank(), platform.world_size() > 1
    if isinstance(error, RankFailure) and several:
        time.sleep(_FOLLOWER_DELAY_S)
    elif rank > 0:
        time.sleep(_OTHER_RANK_DELAY_S)
    place = f"[rank {rank}] " if rank > 0 else ""
    print(f"error: {place}{error}", file=sys.stderr, flush=True)


def _is_lost_peer(error: Exception) -> bool:
    """Whether a collective broke because another process ended: gloo raises a plain RuntimeError."""
    return isinstance(error, torch.distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _report_bug(run_dir: Path | str | None) -> int:
    """Print the running exception's traceback and keep it in the run directory, if there is one."""
    text = traceback.format_exc()
    rank = platform.rank()
    print(f"rank {rank} failed unexpectedly (a bug):\n{text}", file=sys.stderr, flush=True)
    if run_dir:
        marker = Path(run_dir) / lives.ERRORS_DIRECTORY / f"rank_{rank}.txt"
        try:
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"error: {marker} cannot be written ({error.strerror})", file=sys.stderr, flush=True)
    return exit_codes.BUG

"""The life of one rank: start, run the command's body, end with the right exit code.

Errors: an :class:`~aligner.errors.AlignerError` becomes one ``error:`` line and its exit code; anything else is a bug,
whose traceback is printed and kept in ``run_dir/errors/rank_<r>.txt``. A rank that fails while others run leaves at
once (no clean-up that could wait for peers): the launcher, torchrun, or ``srun --kill-on-bad-exit=1`` then ends the
others, which may be inside a collective.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed

from aligner.cli import exit_codes
from aligner.cli.launch import default_run_dir
from aligner.config.compose import to_yaml
from aligner.config.schema import ROOTS
from aligner.config.section import Section
from aligner.config.sources import MODEL_DIRECTORY
from aligner.distributed import platform
from aligner.distributed.collectives import agree, broadcast_object
from aligner.distributed.context import RunContext
from aligner.errors import AlignerError, ConfigError, RankFailure
from aligner.monitoring.logger import METRICS_FILE, TENSORBOARD_DIR
from aligner.phases.sources import SOURCES_FILE
from launchers.local import LAUNCHER_PID

CONFIG_FILE = "config.yaml"
ERRORS_DIRECTORY = "errors"
# Seconds before a failing rank leaves, so that an error is told once: the first rank speaks at once, and the launcher
# then ends the others; ranks that only stop because of another's error wait for that rank to speak.
_OTHER_RANK_DELAY_S = 1.0
_FOLLOWER_DELAY_S = 3.0
_PARENT_POLL_S = 1.0


def run_rank(root: Any, body: Callable[[Any, RunContext], None]) -> int:
    """Start this rank, run ``body(root, context)``; returns the exit code.

    With several ranks a failing one does not return: it leaves the process.
    """
    context: RunContext | None = None
    given = Path(root.run.dir) if root.run.dir else None
    is_new = given is None or not given.exists()
    end_with_launcher()
    try:
        context = start_rank(root)
        body(root, context)
    except KeyboardInterrupt:
        code = exit_codes.INTERRUPTED
    except AlignerError as error:
        if is_new and platform.rank() == 0:
            remove_unstarted(context.run_dir if context else given)
        code = _report_error(error)
    except Exception as error:
        if _is_lost_peer(error):
            code = _report_error(RankFailure(f"lost its peers in a collective: {str(error).splitlines()[0]}"))
        else:
            code = _report_bug(context.run_dir if context else root.run.dir)
    else:
        platform.shutdown()
        return 0
    if platform.world_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    platform.shutdown()
    return code


def start_rank(root: Any) -> RunContext:
    """Initialise this rank; agree on ``run.dir`` (rank 0 decides); write ``run_dir/config.yaml``. Collective.

    Tracebacks that an earlier life has left there are removed: those in ``errors/`` are of this life.

    Raises:
        ConfigError: the run directory cannot be written or belongs to another command.
    """
    found = platform.initialize(threads=root.trainer.threads)
    command = _command_of(root)
    run_dir = Path(broadcast_object(root.run.dir or default_run_dir(command)))
    error: Exception | None = None
    if platform.rank() == 0:
        try:
            write_config(run_dir, command, root)
            remove_old_tracebacks(run_dir)
        except ConfigError as raised:
            error = raised
        except OSError as raised:
            error = ConfigError(f"run.dir={run_dir}: cannot be written ({raised.strerror}); choose another directory")
    agree(error)
    return RunContext(run_dir, platform.rank(), platform.world_size(), found)


def write_config(run_dir: Path, command: str, root: Section) -> None:
    """Write ``run_dir/config.yaml`` (the latest life's), after checking that the run is of the same command."""
    path = run_dir / CONFIG_FILE
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            first = file.readline().strip()
        if first != f"command: {command}":
            owner = first.removeprefix("command: ") or "another program"
            raise ConfigError(
                f"run.dir={run_dir} holds a run of `{owner}`, not of `{command}`; choose another directory"
            )
    run_dir.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".yaml.tmp")
    partial.write_text(to_yaml(command, root), encoding="utf-8")
    partial.replace(path)


def remove_unstarted(run_dir: Path | None) -> None:
    """Remove a run directory that this process made and in which nothing was trained, sampled or kept."""
    if run_dir is None or not (run_dir / CONFIG_FILE).is_file():
        return
    metrics = run_dir / METRICS_FILE
    kept = {path.name for path in run_dir.iterdir()} - {CONFIG_FILE, SOURCES_FILE, MODEL_DIRECTORY}
    if not kept or (kept <= {METRICS_FILE, TENSORBOARD_DIR} and not metrics.stat().st_size):
        shutil.rmtree(run_dir, ignore_errors=True)


def end_with_launcher() -> None:
    """Under ``aligner``'s own launcher: leave when it is gone, even by SIGKILL; no rank trains on as an orphan."""
    launcher = os.environ.get(LAUNCHER_PID, "")
    if not launcher.isdigit() or os.getppid() != int(launcher):
        return

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(_PARENT_POLL_S)
        print("error: the launcher is gone, so its ranks end", file=sys.stderr, flush=True)
        os._exit(exit_codes.INTERRUPTED)

    threading.Thread(target=watch, daemon=True, name="end-with-launcher").start()


def remove_old_tracebacks(run_dir: Path) -> None:
    """Remove what ranks of an earlier life of the run have left in ``run_dir/errors``."""
    for marker in (run_dir / ERRORS_DIRECTORY).glob("rank_*.txt"):
        marker.unlink()


def _command_of(root: Section) -> str:
    return next(name for name, schema in ROOTS.items() if type(root) is schema)


def _report_error(error: AlignerError) -> int:
    """Print the error on a rank that found it; see the delays above for why it appears once."""
    rank, several = platform.rank(), platform.world_size() > 1
    if isinstance(error, RankFailure) and several:
        time.sleep(_FOLLOWER_DELAY_S)
    elif rank > 0:
        time.sleep(_OTHER_RANK_DELAY_S)
    place = f"[rank {rank}] " if rank > 0 else ""
    print(f"error: {place}{error}", file=sys.stderr, flush=True)
    return error.exit_code


def _is_lost_peer(error: Exception) -> bool:
    """Whether a collective broke because another process ended: gloo raises a plain RuntimeError."""
    return isinstance(error, torch.distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _report_bug(run_dir: Path | str | None) -> int:
    """Print the running exception's traceback and keep it in the run directory, if there is one."""
    text = traceback.format_exc()
    rank = platform.rank()
    print(f"rank {rank} failed unexpectedly (a bug):\n{text}", file=sys.stderr, flush=True)
    if run_dir:
        marker = Path(run_dir) / ERRORS_DIRECTORY / f"rank_{rank}.txt"
        try:
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"error: {marker} cannot be written ({error.strerror})", file=sys.stderr, flush=True)
    return exit_codes.BUG

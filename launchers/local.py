"""Ranks on this machine, under torch elastic's Python API: its own store on loopback, a free port, one process a rank.

Each rank is ``python -m <module> <arguments>``, the same process that torchrun starts. When one rank ends with an error
the agent ends the others; the rank has said why on stderr, so nothing more than a missing explanation is added here.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

SHUTDOWN_TIMEOUT_S = 10  # from SIGTERM to SIGKILL for the other ranks when one has failed
RANK_FAILURE = 8  # exit code of a rank that stops because of another's error
LAUNCHER_PID = "ALIGNER_LAUNCHER_PID"  # environment variable: ranks end when this process does
BUG = 70  # exit code of a rank that has left its traceback in the run directory


def launch(module: str, arguments: Sequence[str], ranks: int, threads: int | None, run_dir: Path) -> int:
    """Run ``python -m module *arguments`` as ``ranks`` ranks and wait; returns the exit code of the job.

    Args:
        threads: CPU threads a rank; None: cores // ranks, unless OMP_NUM_THREADS is set.
        run_dir: where ranks leave their tracebacks; messages name it.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
    )
    with _environment(rank_threads(ranks, threads)), _silent_logging():
        try:
            elastic_launch(config, sys.executable)("-m", module, *arguments)
        except ChildFailedError as error:
            return _explain({rank: failure.exitcode for rank, failure in error.failures.items()}, run_dir)
        except SignalException as error:
            print(f"error: stopped by {error.sigval.name}", file=sys.stderr)
            return 128 + int(error.sigval)
    return 0


def rank_threads(ranks: int, threads: int | None) -> int:
    """CPU threads a rank: as asked, else OMP_NUM_THREADS, else this process's cores divided by ``ranks``."""
    if threads is not None:
        return threads
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():
        return int(os.environ["OMP_NUM_THREADS"])
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _explain(exit_codes: Mapping[int, int], run_dir: Path) -> int:
    """The job's exit code from those of the failed ranks; says what a rank could not say itself."""
    stopped = -signal.SIGTERM  # by the agent, because another rank had failed
    rank, code = min(exit_codes.items(), key=lambda item: (item[1] == stopped, item[1] == RANK_FAILURE, item[0]))
    if code >= 0:
        marker = run_dir / "errors" / f"rank_{rank}.txt"
        if code == BUG and marker.is_file():
            print(f"error: rank {rank} failed; its traceback is in {marker}", file=sys.stderr)
        return code
    name = signal.Signals(-code).name
    hint = "; the machine may have run out of memory" if name == "SIGKILL" else ""
    print(f"error: rank {rank} was killed by {name}{hint}", file=sys.stderr)
    return 128 - code


@contextmanager
def _environment(threads: int) -> Iterator[None]:
    values = {"OMP_NUM_THREADS": str(threads), LAUNCHER_PID: str(os.getpid())}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _silent_logging() -> Iterator[None]:
    """Keep the agent's own report of a failed rank (logged with a traceback) off the terminal."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)

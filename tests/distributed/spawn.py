"""Runs one function on several ranks, in new processes on the CPU, for tests.

``run_ranks(2, case, "bf16")`` calls ``case("bf16")`` on every rank after ``platform.initialize``. ``case`` is a
function at module level and its arguments and results can be pickled. Children come from a fork server that has
imported Megatron once, so a start costs little; each is a process of its own with fresh module state. When one
rank fails or the time is over, all ranks end within seconds and the rank's traceback is raised here.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

GRACE_S = 2.0  # for other ranks to report their own error after the first

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["aligner.distributed.topology", "tests.distributed.preload"])


class RankError(AssertionError):
    """A rank raised, died or did not end in time; the message holds its traceback."""


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call ``fn(*args)`` on ``world_size`` ranks; returns their results in rank order.

    Args:
        timeout: seconds for all ranks to end, start included.

    Raises:
        RankError: with the traceback of the rank that failed first.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        processes = [
            _context.Process(
                target=_rank_main,
                args=(rank, world_size, store.port, scratch, fn, args),
                name=f"rank-{rank}",
            )
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, Path(scratch), timeout)
            return [pickle.loads((Path(scratch) / f"{rank}.result").read_bytes()) for rank in range(world_size)]
        finally:
            for process in processes:
                _end(process)


def _wait(processes: list[Any], scratch: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    running = set(range(len(processes)))
    while running:
        left = deadline - time.monotonic()
        if left <= 0:
            raise RankError(f"ranks {sorted(running)} did not end within {timeout:.0f} s\n{_errors(scratch)}")
        wait([processes[rank].sentinel for rank in running], timeout=left)
        for rank in list(running):
            code = processes[rank].exitcode
            if code is None:
                continue
            running.discard(rank)
            if code != 0:
                wait_until = time.monotonic() + GRACE_S
                while time.monotonic() < wait_until and any(p.exitcode is None for p in processes):
                    time.sleep(0.05)
                raise RankError(f"rank {rank} ended with exit code {code}\n{_errors(scratch)}")


def _errors(scratch: Path) -> str:
    """The tracebacks the ranks left, oldest first: the first is the cause, the others usually follow from it."""
    markers = sorted(scratch.glob("*.error"), key=lambda marker: marker.stat().st_mtime_ns)
    return "\n".join(f"--- rank {marker.stem}\n{marker.read_text()}" for marker in markers)


def _end(process: Any) -> None:
    """Kill a rank that still runs, with the processes it started."""
    if process.pid is None:
        return
    if process.exitcode is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
    process.join()


def _rank_main(
    rank: int,
    world_size: int,
    port: int,
    scratch: str,
    fn: Callable[..., Any],
    args: tuple,
) -> None:
    os.setsid()  # a process group of its own, to be ended as a whole
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store lives in the parent: no port is guessed
        OMP_NUM_THREADS="1",
    )
    try:
        from aligner.distributed import platform

        platform.initialize(threads=1, timeout_s=300)
        result = pickle.dumps(fn(*args))
        (Path(scratch) / f"{rank}.result").write_bytes(result)
        platform.shutdown()
    except BaseException:
        (Path(scratch) / f"{rank}.error").write_text(traceback.format_exc())
        sys.stderr.flush()
        os._exit(1)


def _end_with_parent() -> None:
    """End this rank when the test process is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

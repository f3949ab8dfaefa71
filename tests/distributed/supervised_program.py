"""One rank that hangs, fails, dies or waits: ``python -m tests.distributed.supervised_program CASE RUN_DIR``.

A life of a real command (configuration, ``run_rank``) with a body that ends as CASE says. Cases that end with ``_once``
do so in the first life of a run directory and finish in the next.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any

from aligner.cli.runtime import run_rank
from aligner.config.compose import compose
from aligner.distributed.collectives import barrier
from aligner.distributed.context import RunContext

HANG_TIMEOUT_S = 3


def body(case: str, context: RunContext) -> None:
    """``case``: wait | deaf | bug_while_others_sleep | kill | hang | hang_in_c | steady, most also with ``_once``."""
    (context.run_dir / f"pid_{context.rank}").write_text(str(os.getpid()))
    restarts = os.environ.get("ALIGNER_RESTART_COUNT")
    if case.endswith("_once") and restarts != "0":
        barrier()
        if context.rank == 0:
            (context.run_dir / "finished").write_text(str(restarts))
        return
    last = context.rank == context.world_size - 1
    context.watchdog.enter("body")
    if case == "wait":
        while True:
            context.poll()
            time.sleep(0.05)
    elif case == "deaf":
        with context.watchdog.idle():
            time.sleep(300)
    elif case == "steady":
        _live_for(context, 3 * HANG_TIMEOUT_S)
    elif not last:
        if case.startswith("bug_while_others_sleep"):
            with context.watchdog.idle():
                time.sleep(300)
        barrier()
    elif case.startswith("bug"):
        raise ValueError("something nobody thought of")
    elif case.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif case.startswith("hang_in_c"):
        ctypes.PyDLL(None).sleep(300)  # keeps the interpreter lock
    else:
        _sleep_where_nobody_looks()


def _sleep_where_nobody_looks() -> None:
    time.sleep(300)


def _live_for(context: RunContext, seconds: float) -> None:
    """Longer than the time-out, but never silent for as long, except where that is allowed."""
    until = time.monotonic() + seconds / 2
    while time.monotonic() < until:
        context.watchdog.beat()
        time.sleep(0.2)
    with context.watchdog.idle():
        time.sleep(seconds / 2)
    context.watchdog.enter("data")  # has a time-out of its own
    time.sleep(1.5 * HANG_TIMEOUT_S)
    barrier()


def main() -> int:
    case, run_dir = sys.argv[1:]
    overrides = [
        "model.path=m",
        "data.train=t.jsonl",
        "trainer.threads=1",
        f"trainer.hang_timeout={HANG_TIMEOUT_S}",
        f"trainer.phase_timeouts={{startup:60,data:{4 * HANG_TIMEOUT_S}}}",
        f"run.dir='{run_dir}'",
    ]
    root: Any = compose("sft", overrides)
    return run_rank(root, lambda _root, context: body(case, context))


if __name__ == "__main__":
    sys.exit(main())

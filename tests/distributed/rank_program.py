"""One rank of a small program for the launcher's tests: ``python -m tests.distributed.rank_program CASE RUN_DIR``.

It lives the life of a real command (configuration, ``run_rank``) with a body that ends as CASE says.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from aligner.cli.runtime import run_rank
from aligner.config.compose import compose
from aligner.distributed.collectives import agree, all_gather_objects, barrier
from aligner.distributed.context import RunContext
from aligner.errors import DataError


def body(case: str, context: RunContext) -> None:
    """``case``: ok | error_on_1 | error_everywhere | bug_on_1 | killed_1 | wait."""
    last = context.rank == context.world_size - 1
    if case == "ok":
        known = all_gather_objects((str(context.run_dir), os.environ.get("OMP_NUM_THREADS")))
        if context.rank == 0:
            (context.run_dir / "gathered.txt").write_text(repr(known))
    elif case == "error_on_1":
        agree(DataError("data.jsonl:3: field 'prompt' is missing; add it") if last else None)
    elif case == "error_everywhere":
        raise DataError("data.jsonl:3: field 'prompt' is missing; add it")
    elif case == "bug_on_1":
        if last:
            raise ValueError("something nobody thought of")
        barrier()  # the others wait in a collective that never completes
    elif case == "wait":
        (context.run_dir / f"pid_{context.rank}").write_text(str(os.getpid()))
        time.sleep(300)
    elif case == "killed_1":
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)


def main() -> int:
    case, run_dir = sys.argv[1:]
    overrides = ["model.path=m", "data.train=t.jsonl", "trainer.threads=1"]
    if run_dir:
        overrides.append(f"run.dir='{run_dir}'")
    root: Any = compose("sft", overrides)
    return run_rank(root, lambda _root, context: body(case, context))


if __name__ == "__main__":
    sys.exit(main())

"""A rank without torch, which starts at once: ``python -m tests.plain_rank RUN_DIR END,END;END,END``.

The words between commas are how each rank ends, those between semicolons are for one life after the other; the last
serve for all further lives. ``70``: exit code; ``-9``: this signal to itself; ``bug``: 70 with a traceback; ``stay``:
until somebody ends it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def main() -> int:
    run_dir, lives = Path(sys.argv[1]), sys.argv[2].split(";")
    rank, restarts = int(os.environ["RANK"]), int(os.environ["ALIGNER_RESTART_COUNT"])
    run_dir.mkdir(parents=True, exist_ok=True)
    port, run_id = os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_RUN_ID"]
    (run_dir / f"life_{restarts}_rank_{rank}").write_text(f"{port} {run_id}")
    how = lives[min(restarts, len(lives) - 1)].split(",")[rank]
    if how == "stay":
        time.sleep(300)
    if how == "bug":
        (run_dir / "errors").mkdir(exist_ok=True)
        (run_dir / "errors" / f"rank_{rank}.txt").write_text(f"traceback of life {restarts}")
        return 70
    if how.startswith("-"):
        os.kill(os.getpid(), -int(how))
        time.sleep(300)
    return int(how)


if __name__ == "__main__":
    sys.exit(main())

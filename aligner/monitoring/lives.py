"""The lives of a run: ``RUN/lives.jsonl``, one line when a process life begins and one when it ends.

``{"event": "start", "time", "host", "pid", "job", "restart_count", "start_step"}`` and ``{"event": "end", "time", "step",
"reason", "exit_code"}``; ``time`` in seconds since the epoch. A start without an end was killed. Imports without torch.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIVES_FILE = "lives.jsonl"
RESTART_FILE = "restart_requested"
ERRORS_DIRECTORY = "errors"
FILES = (LIVES_FILE, RESTART_FILE)
NO_PROGRESS_LIMIT = 3  # lives without a finished step, after which no further restart is asked for


@dataclass(frozen=True)
class Life:
    """One life; ``step``, ``reason`` and ``exit_code`` are None while it goes on, or when it was killed."""

    start_time: float
    host: str
    pid: int
    job: str | None
    restart_count: int
    start_step: int
    end_time: float | None = None
    step: int | None = None
    reason: str | None = None
    exit_code: int | None = None


def begin_life(run_dir: Path, *, start_step: int) -> None:
    """Record that a life of the run in ``run_dir`` begins after ``start_step`` finished steps. Rank 0 alone."""
    restarts = os.environ.get("SLURM_RESTART_COUNT") or os.environ.get("ALIGNER_RESTART_COUNT") or "0"
    _append(
        run_dir,
        {
            "event": "start",
            "time": round(time.time(), 3),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID"),
            "restart_count": int(restarts) if restarts.isdigit() else 0,
            "start_step": start_step,
        },
    )


def end_life(run_dir: Path, *, step: int | None, reason: str, exit_code: int) -> None:
    """Record how the life that began last has ended. Rank 0 alone. ``step``: the last finished one, where known."""
    row = {"event": "end", "time": round(time.time(), 3), "step": step, "reason": reason, "exit_code": exit_code}
    _append(run_dir, row)


def read_lives(run_dir: Path) -> list[Life]:
    """All lives, oldest first. Lines that are torn or not ours are left out."""
    lives: list[Life] = []
    try:
        lines = (run_dir / LIVES_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
            event, when = row.pop("event"), row.pop("time")
            if event == "start":
                lives.append(Life(start_time=when, **row))
            elif event == "end" and lives and lives[-1].end_time is None:
                lives[-1] = Life(**{**vars(lives[-1]), "end_time": when, **row})
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return lives


def restarts(lives: list[Life]) -> int:
    """How often the run was started again."""
    return max(0, len(lives) - 1)


def no_progress(lives: list[Life], *, step: int, limit: int = NO_PROGRESS_LIMIT) -> bool:
    """Whether the last ``limit`` lives, the running one included, all began at ``step``, where the run still is.

    A life that ended as it was meant to (finished, or stopped by a person) interrupts the series.
    """
    last = lives[-limit:]
    if len(last) < limit:
        return False
    meant = [life.exit_code in (0, 76) for life in last]
    return not any(meant) and all(life.start_step == step for life in last)


def request_restart(run_dir: Path, reason: str) -> None:
    """Leave the request to be started again, which the job's script reads. Rank 0 alone."""
    path = run_dir / RESTART_FILE
    temporary = path.with_name(RESTART_FILE + ".tmp")
    temporary.write_text(reason + "\n", encoding="utf-8")
    os.replace(temporary, path)


def clear_endings(run_dir: Path) -> None:
    """Remove what an earlier life has left for its end: the request, tracebacks and stacks. Rank 0 alone."""
    (run_dir / RESTART_FILE).unlink(missing_ok=True)
    for pattern in ("rank_*.txt", "stacks_rank_*.txt"):
        for path in (run_dir / ERRORS_DIRECTORY).glob(pattern):
            path.unlink(missing_ok=True)


def _append(run_dir: Path, row: dict[str, Any]) -> None:
    path = run_dir / LIVES_FILE
    torn = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as stream:
        stream.write(("\n" if torn else "") + json.dumps(row) + "\n")

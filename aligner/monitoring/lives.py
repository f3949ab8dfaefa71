"""The lives of a run: ``RUN/lives.jsonl``, one line when a process life begins and one when it ends.

``{"event": "start", "time", "host", "pid", "job", "restart_count", "start_step", "start_samples"}`` and ``{"event":
"end", "time", "host", "pid", "step", "reason", "exit_code"}``; ``time`` in seconds since the epoch. A start without an
end was killed, or still lives. What a launcher knows better than rank 0, whose end it may follow, is an event "cause"
with ``reason`` and ``exit_code``. Lines are only appended. Imports without torch.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

LIVES_FILE = "lives.jsonl"
RESTART_FILE = "restart_requested"
ERRORS_DIRECTORY = "errors"
FILES = (LIVES_FILE, RESTART_FILE)
NO_PROGRESS_LIMIT = 3  # lives that leave the run where it was, after which no further restart is asked for

#: Exit codes of lives that nobody starts again but a person: finished, an error of the user, in use, stopped by hand.
_DELIBERATE = frozenset({0, 2, 3, 4, 5, 6, 7, 9, 76, 130})


@dataclass(frozen=True)
class Life:
    """One life. ``start_step``: finished steps of the checkpoint it began from; ``start_samples``: finished samples of
    the step after it that it found. ``end_time`` and what follows are None while it goes on, or when it was killed;
    ``step``: its last finished step, where known.
    """

    start_time: float
    host: str
    pid: int
    job: str | None
    restart_count: int
    start_step: int
    start_samples: int = 0
    end_time: float | None = None
    step: int | None = None
    reason: str | None = None
    exit_code: int | None = None


def begin_life(run_dir: Path, *, start_step: int, start_samples: int = 0) -> None:
    """Record that a life of the run in ``run_dir`` begins; see :class:`Life`. Rank 0 alone."""
    restarts = os.environ.get("SLURM_RESTART_COUNT") or os.environ.get("ALIGNER_RESTART_COUNT") or "0"
    _append(
        run_dir,
        "start",
        job=os.environ.get("SLURM_JOB_ID"),
        restart_count=int(restarts) if restarts.isdigit() else 0,
        start_step=start_step,
        start_samples=start_samples,
    )


def end_life(run_dir: Path, *, step: int | None, reason: str, exit_code: int) -> None:
    """Record how this process's life has ended. Rank 0 alone. ``step``: the last finished one, where known."""
    _append(run_dir, "end", step=step, reason=reason, exit_code=exit_code)


def tell_cause(run_dir: Path, *, reason: str, exit_code: int, since: float) -> None:
    """Record why the newest life has ended: for its launcher, when another rank than rank 0 was the first to fail.

    Ranks that were started at ``since`` (seconds since the epoch) may have died before their life began; then there
    is nothing to record.
    """
    lives = read_lives(run_dir)
    if lives and lives[-1].start_time >= since:
        _append(run_dir, "cause", reason=reason, exit_code=exit_code)


def read_lives(run_dir: Path) -> list[Life]:
    """All lives, oldest first. Lines that are torn or not of this form are left out."""
    lives: list[Life] = []
    try:
        lines = (run_dir / LIVES_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
            event, when, where = row.pop("event"), row.pop("time"), (row["host"], row["pid"])
            if event == "start":
                lives.append(Life(start_time=when, **row))
            elif event == "end":  # of the process that wrote it: a life that was taken over may end late
                own = [i for i, life in enumerate(lives) if (life.host, life.pid) == where and life.end_time is None]
                if own:
                    lives[own[-1]] = replace(lives[own[-1]], end_time=when, **row)
            elif event == "cause" and lives and where[0] == lives[-1].host:
                known = {"reason": row["reason"], "exit_code": row["exit_code"]}
                lives[-1] = replace(lives[-1], end_time=lives[-1].end_time or when, **known)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return lives


def restarts(lives: Sequence[Life]) -> int:
    """How often the run was started again after a life that asked for it, crashed, hung or was killed."""
    return sum(before.exit_code not in _DELIBERATE for before in lives[:-1])


def no_progress(lives: Sequence[Life], *, step: int, samples: int = 0, limit: int = NO_PROGRESS_LIMIT) -> bool:
    """Whether the last ``limit`` lives, the one that is about to end included, left the run where it was.

    The run is after ``step`` finished and saved steps, with ``samples`` finished ones of the next; that all these lives
    began there shows that none got further. Steps that a crash has lost do not count. A life that ended as it was meant
    to (finished, refused, stopped by a person) interrupts the series: what follows it was started by a person.
    """
    last = lives[-limit:]
    if len(last) < limit or any(life.exit_code in _DELIBERATE for life in last):
        return False
    return all((life.start_step, life.start_samples) == (step, samples) for life in last)


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


def _append(run_dir: Path, event: str, **content: Any) -> None:
    row = {"event": event, "time": round(time.time(), 3), "host": socket.gethostname(), "pid": os.getpid(), **content}
    with (run_dir / LIVES_FILE).open("a+b") as stream:
        torn = False
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            torn = stream.read(1) != b"\n"
        stream.write(b"\n" * torn + json.dumps(row, ensure_ascii=False).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())

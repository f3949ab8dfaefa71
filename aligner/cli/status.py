"""``aligner status RUN``: where a run stands, read from its directory and, when it is a job's, from Slurm.

Reads files that are being written: what is torn or missing is left out. Imports without torch.
"""

from __future__ import annotations

import json
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from aligner.checkpoint import manifest
from aligner.checkpoint.lease import LEASE_FILE, STALE_AFTER_S, process_exists
from aligner.cli.options import OptionParser
from aligner.config.run_file import CONFIG_FILE
from aligner.errors import CheckpointError, ConfigError, DataError, ModelError
from aligner.monitoring import lives
from aligner.monitoring.lives import Life
from aligner.monitoring.logger import METRICS_FILE
from aligner.monitoring.metrics import STEP_TIME
from aligner.monitoring.numbers import decode_number, encode_tree
from launchers import slurm
from launchers.slurm_script import FOLDER, LOG_FILE

CRASHES_FILE = "slurm_crashes.txt"
CHECKPOINTS_DIRECTORY = "checkpoints"
_REFUSALS = (ConfigError.exit_code, DataError.exit_code, ModelError.exit_code, CheckpointError.exit_code)
_RECENT_STEPS = 10  # whose median duration the forecast is made of
_SHOWN_METRICS = 6
_QUIET = ("timers/", "memory/", "throughput/", "checkpoint/", "consumed_samples")


@dataclass(frozen=True)
class Status:
    """``state``: running | waiting | finished | stopped | failed | killed | new. Times: seconds since the epoch.

    ``last_end``: of the last life that trained; ``refused``: of an attempt after it that was refused.
    """

    run: str
    command: str | None
    state: str
    detail: str
    step: int
    max_steps: int | None
    step_seconds: float | None
    eta_seconds: float | None
    metrics: dict[str, float]
    metrics_time: float | None
    checkpoint: dict[str, Any] | None
    lives: int
    restarts: int
    crashes: int
    last_end: dict[str, Any] | None
    refused: dict[str, Any] | None
    job: dict[str, str] | None = field(default=None)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code. Raises AlignerError."""
    parser = OptionParser("status", "Say where a run stands: job, step, metrics, checkpoint, restarts, time left.")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(list(arguments))
    status = read_status(options.run)
    if options.json:
        print(json.dumps(encode_tree(asdict(status)), indent=2, allow_nan=False))
    else:
        print(to_text(status, time.time()))
    return 0


def read_status(run_dir: Path) -> Status:
    """Everything that is known. Raises CheckpointError when ``run_dir`` holds no run."""
    if not run_dir.is_dir():
        raise CheckpointError(f"{run_dir} is not a directory; give the run.dir of a run")
    command, max_steps = _read_config(run_dir)
    rows = _read_rows(run_dir)
    recorded = lives.read_lives(run_dir)
    all_lives, refused = _without_refused(recorded, rows)
    events = slurm.read_events(run_dir)
    if command is None and not rows and not all_lives and not events:
        raise CheckpointError(
            f"{run_dir} holds no run: neither {CONFIG_FILE} nor {METRICS_FILE} nor a job; give the run.dir of a run"
        )
    job = slurm.newest_job(run_dir) or (all_lives[-1].job if all_lives else None)
    facts = slurm.job_facts(job) if job else None
    step = rows[-1]["step"] if rows else 0
    state, detail = _state(run_dir, all_lives, job, facts)
    seconds = _step_seconds(rows)
    going = state == "running" and seconds is not None and max_steps is not None
    return Status(
        run=str(run_dir),
        command=command,
        state=state,
        detail=detail,
        step=step,
        max_steps=max_steps,
        step_seconds=seconds,
        eta_seconds=(max_steps - step) * seconds if going and max_steps is not None and seconds is not None else None,
        metrics={k: v for k, v in rows[-1].items() if k not in ("step", "time")} if rows else {},
        metrics_time=rows[-1].get("time") if rows else None,
        checkpoint=_checkpoint(run_dir),
        lives=len(recorded),
        restarts=lives.restarts(recorded),
        crashes=_count_lines(run_dir / CRASHES_FILE),
        last_end=_last_end(all_lives),
        refused=_last_end(refused),
        job=_job(job, facts),
    )


# --------------------------------------------------------------------------- reading


def _read_config(run_dir: Path) -> tuple[str | None, int | None]:
    """(command, trainer.max_steps) of the newest life."""
    try:
        config = yaml.safe_load((run_dir / CONFIG_FILE).read_text(encoding="utf-8", errors="replace"))
        steps = config.get("trainer", {}).get("max_steps")
        return str(config["command"]), steps if isinstance(steps, int) else None
    except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError):
        return None, None


def _read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of ``metrics.jsonl`` that can be read, non-finite numbers as floats."""
    rows = []
    try:
        lines = (run_dir / METRICS_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append({name: decode_number(value) for name, value in row.items()})
    return rows


def _checkpoint(run_dir: Path) -> dict[str, Any] | None:
    """The newest published checkpoint; whether it is sound, `aligner checkpoint verify` says."""
    try:
        found = manifest.published(run_dir / CHECKPOINTS_DIRECTORY)
        if not found:
            return None
        written = (found[-1] / manifest.FILE).stat().st_mtime
    except OSError:  # being deleted
        return None
    return {"step": manifest.step_of(found[-1]), "path": str(found[-1]), "time": written}


def _count_lines(path: Path) -> int:
    try:
        return len(path.read_text(encoding="utf-8", errors="replace").splitlines())
    except OSError:
        return 0


def _last_end(all_lives: Sequence[Life]) -> dict[str, Any] | None:
    """How the newest life that has ended did so."""
    for life in reversed(all_lives):
        if life.end_time is not None:
            return {"time": life.end_time, "reason": life.reason, "exit_code": life.exit_code, "step": life.step}
    return None


def _without_refused(
    recorded: Sequence[Life], rows: Sequence[Mapping[str, Any]]
) -> tuple[Sequence[Life], Sequence[Life]]:
    """The lives up to the last that trained, and the attempts after it that were refused; they changed nothing."""
    logged = max((row["time"] for row in rows if isinstance(row.get("time"), (int, float))), default=0.0)
    end = len(recorded)
    while end > 1 and recorded[end - 1].exit_code in _REFUSALS and recorded[end - 1].start_time > logged:
        end -= 1
    return recorded[:end], recorded[end:]


def _step_seconds(rows: Sequence[Mapping[str, Any]]) -> float | None:
    recent = [row[STEP_TIME] for row in rows[-_RECENT_STEPS:] if isinstance(row.get(STEP_TIME), (int, float))]
    return statistics.median(recent) if recent else None


def _job(job: str | None, facts: Mapping[str, str] | None) -> dict[str, str] | None:
    if job is None:
        return None
    names = ("JobState", "Reason", "NodeList", "RunTime", "TimeLimit", "Restarts", "EndTime")
    return {"id": job, **{name: facts[name] for name in names if facts and name in facts}}


# --------------------------------------------------------------------------- state


def _state(
    run_dir: Path, all_lives: Sequence[Life], job: str | None, facts: Mapping[str, str] | None
) -> tuple[str, str]:
    """(one word, the rest of the sentence)."""
    last = all_lives[-1] if all_lives else None
    if facts is not None and slurm.is_alive(facts):
        return _state_of_job(facts, last, str(job))
    if last is None:
        if facts is not None:
            return "failed", f"job {job} is {facts['JobState']}; its log is in {run_dir / FOLDER / LOG_FILE}"
        return "new", f"job {job} is not known to Slurm" if job else "no life has begun"
    if last.end_time is None:
        return _state_without_end(run_dir, last, facts)
    if last.reason == "finished" or last.exit_code == 0:
        return "finished", ""
    reason = f"by {last.reason}" if last.exit_code in (75, 76) else str(last.reason)
    if last.exit_code == 75:
        return "stopped", f"{reason}; asked to be started again"
    return "stopped" if last.exit_code == 76 else "failed", reason


def _state_of_job(facts: Mapping[str, str], last: Life | None, job: str) -> tuple[str, str]:
    name = facts["JobState"]
    if name in ("RUNNING", "SUSPENDED", "STOPPED", "COMPLETING"):
        place = f"on {facts.get('NodeList')}, {facts.get('RunTime')} of {facts.get('TimeLimit')}"
        begun = "" if last is not None and last.end_time is None else "; its ranks are starting or have ended"
        return "running", f"job {job} {name} {place}{begun}"
    return "waiting", f"job {job} {name} ({facts.get('Reason')})"


def _state_without_end(run_dir: Path, last: Life, facts: Mapping[str, str] | None) -> tuple[str, str]:
    where = f"process {last.pid} on {last.host}"
    if facts is not None:
        return "killed", f"{where}; job {last.job} is {facts['JobState']}"
    if last.host == socket.gethostname():
        return ("running", where) if process_exists(last.pid) else ("killed", f"{where} is gone")
    try:
        silent = time.time() - (run_dir / LEASE_FILE).stat().st_mtime
    except OSError:
        return "killed", f"{where} has given up the run without a word"
    if silent > STALE_AFTER_S:
        return "killed", f"{where} has given no sign of life for {_duration(silent)}"
    return "running", where


# --------------------------------------------------------------------------- text


def to_text(status: Status, now: float) -> str:
    """What people read."""
    lines = [
        ("run", f"{status.run}" + (f"  (aligner {status.command})" if status.command else "")),
        ("state", f"{status.state}  {status.detail}".rstrip()),
        ("step", _progress(status, now)),
    ]
    shown = [(k, v) for k, v in status.metrics.items() if not k.startswith(_QUIET)][:_SHOWN_METRICS]
    if shown:
        age = f"  ({_duration(now - status.metrics_time)} ago)" if status.metrics_time else ""
        lines.append(("metrics", "  ".join(f"{name} {_number(value)}" for name, value in shown) + age))
    if status.checkpoint:
        age = _duration(now - status.checkpoint["time"])
        lines.append(("checkpoint", f"step {status.checkpoint['step']}, {age} ago: {status.checkpoint['path']}"))
    else:
        lines.append(("checkpoint", "none yet"))
    crashes = f", {status.crashes} crashes under Slurm" if status.crashes else ""
    lines.append(("restarts", f"{status.restarts}{crashes}"))
    if status.last_end:
        end = status.last_end
        after = f" after step {end['step']}" if end["step"] is not None else ""
        code = f", exit code {end['exit_code']}" if end["exit_code"] is not None else ""
        lines.append(("last end", f"{end['reason']}{after}{code}, {_duration(now - end['time'])} ago"))
    if status.refused:
        lines.append(("refused", f"{status.refused['reason']}, {_duration(now - status.refused['time'])} ago"))
    return "\n".join(f"{name:<10}  {text}" for name, text in lines)


def _progress(status: Status, now: float) -> str:
    text = f"{status.step}" + (f" of {status.max_steps}" if status.max_steps else "")
    if status.step_seconds is not None:
        text += f", {status.step_seconds:.3g} s a step"
    if status.eta_seconds is not None:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(now + status.eta_seconds))
        text += f", {_duration(status.eta_seconds)} left (until {until})"
    return text


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    """``45 s``, ``3 min``, ``2 h 5 min``, ``3 d 4 h``."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    minutes = whole // 60
    if minutes < 120:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"

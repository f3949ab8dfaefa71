"""``aligner status``: what is read from a run directory and from Slurm, and how torn files are taken."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aligner.cli.main import main
from aligner.cli.status import read_status
from aligner.monitoring import lives
from tests.fake_slurm import FakeSlurm


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 10 steps after 4, with a checkpoint of step 3."""
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    run = tmp_path / "run"
    (run / "checkpoints" / "step_00000003").mkdir(parents=True)
    (run / "checkpoints" / "step_00000003" / "manifest.json").write_text("{}")
    (run / "checkpoints" / ".tmp-step_00000004").mkdir()
    (run / "config.yaml").write_text("command: ppo\ntrainer:\n  max_steps: 10\n")
    rows = [{"step": n, "time": time.time(), "train/loss": 1 / n, "timers/step": 2.0 * n} for n in range(1, 5)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def line(run: Path, event: str, **content: Any) -> None:
    row = {"event": event, "time": time.time() - 5, "host": socket.gethostname(), "pid": os.getpid(), **content}
    with (run / lives.LIVES_FILE).open("a") as file:
        file.write(json.dumps(row) + "\n")


def start(run: Path, **content: Any) -> None:
    line(run, "start", **{"job": None, "restart_count": 0, "start_step": 0, **content})


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_running_here(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(run)
    status = read_status(run)
    assert (status.state, status.step, status.max_steps, status.command) == ("running", 4, 10, "ppo")
    assert status.step_seconds == 5.0 and status.eta_seconds == 30.0
    assert status.checkpoint is not None and status.checkpoint["step"] == 3
    assert main(["status", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "running  process" in printed and "4 of 10, 5 s a step, 30 s left" in printed
    assert "train/loss 0.25" in printed and "timers" not in printed and "step 3, " in printed


def test_json_holds_all_metrics(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "time": 1.0, "train/loss": "NaN", "timers/step": 1.0}\n')
    assert main(["status", str(run), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["metrics"] == {"train/loss": "NaN", "timers/step": 1.0} and status["state"] == "running"


@pytest.mark.parametrize(
    ("end", "state", "detail"),
    [
        ({"reason": "finished", "exit_code": 0, "step": 10}, "finished", ""),
        ({"reason": "SIGUSR1", "exit_code": 75, "step": 4}, "stopped", "by SIGUSR1; asked to be started again"),
        ({"reason": "SIGTERM", "exit_code": 76, "step": 4}, "stopped", "by SIGTERM"),
        ({"reason": "disk full", "exit_code": 5, "step": None}, "failed", "disk full"),
    ],
)
def test_ended(run: Path, capsys: pytest.CaptureFixture[str], end: dict[str, Any], state: str, detail: str) -> None:
    start(run)
    line(run, "end", reason="SIGUSR1", exit_code=75, step=2)
    start(run, start_step=2)
    line(run, "end", **end)
    status = read_status(run)
    assert (status.state, status.detail) == (state, detail)
    assert (status.lives, status.restarts, status.eta_seconds) == (2, 1, None)
    assert main(["status", str(run)]) == 0
    assert f"last end    {end['reason']}" in capsys.readouterr().out


def test_killed(run: Path) -> None:
    start(run, pid=dead_pid())
    assert read_status(run).state == "killed"


def test_a_dead_process_that_nobody_has_waited_for_is_killed(run: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.read() == b""
        start(run, pid=process.pid)
        deadline = time.monotonic() + 30
        while read_status(run).state != "killed" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert read_status(run).state == "killed" and process.returncode is None


def test_a_refused_attempt_is_not_the_end_of_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(run, pid=1)
    line(run, "end", pid=1, reason="finished", exit_code=0, step=4)
    later = time.time() + 60
    for _ in range(2):
        start(run, time=later)
        line(run, "end", time=later, reason="ConfigError: no", exit_code=2, step=None)
    status = read_status(run)
    assert (status.state, status.lives, status.restarts) == ("finished", 3, 0)
    assert status.last_end is not None and status.last_end["reason"] == "finished"
    assert main(["status", str(run)]) == 0
    assert "refused     ConfigError: no, " in capsys.readouterr().out


def test_elsewhere_the_lease_tells(run: Path) -> None:
    start(run, host="elsewhere", pid=1)
    assert read_status(run).state == "killed"
    lease = run / "lease.json"
    lease.write_text("{")
    assert read_status(run).state == "running"
    os.utime(lease, (time.time() - 100, time.time() - 100))
    status = read_status(run)
    assert status.state == "killed" and "no sign of life for 100 s" in status.detail


def test_jobs(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.environment["PATH"])
    (run / "slurm").mkdir()
    events = run / "slurm" / "events.jsonl"
    events.write_text('{"time": 1, "event": "submitted", "job": "7", "restart": 0, "other": ""}\n')
    (run / "slurm_crashes.txt").write_text("1 exit_code=70\n")
    fake.set_facts("PENDING", "BeginTime", 1)
    status = read_status(run)
    assert (status.state, status.detail, status.crashes) == ("waiting", "job 7 PENDING (BeginTime)", 1)
    fake.set_facts("FAILED")
    assert read_status(run).state == "failed" and "job.log" in read_status(run).detail
    fake.set_facts("RUNNING")
    start(run, host="node1", job="7")
    status = read_status(run)
    assert status.state == "running" and status.detail == "job 7 RUNNING on node[1-2], 00:00:35 of 00:10:00"
    assert status.job is not None and status.job["id"] == "7"
    fake.set_facts("CANCELLED")
    status = read_status(run)
    assert status.state == "killed" and "job 7 is CANCELLED" in status.detail
    assert main(["status", str(run)]) == 0
    assert "0, 1 crashes under Slurm" in capsys.readouterr().out


def test_torn_and_missing_files(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('\n[1]\n{"step": 5, "ti')
    (run / lives.LIVES_FILE).write_text('{"event": "start"}\n{"eve')
    (run / "config.yaml").write_text("command: [")
    status = read_status(run)
    assert (status.step, status.state, status.command, status.max_steps) == (4, "new", None, None)
    (run / lives.LIVES_FILE).write_text('{"event": "start"}\n')
    start(run)
    for name in ("metrics.jsonl", "config.yaml"):
        (run / name).write_bytes(b"\xff\xfe")
    assert read_status(run).step == 0 and read_status(run).state == "running"


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 5
    assert "holds no run" in capsys.readouterr().err
    assert main(["status", str(tmp_path / "none")]) == 5
    assert "is not a directory" in capsys.readouterr().err

"""The launcher: stop signals that go on to the ranks, ranks that are started again, ranks that end with another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "tests.distributed.supervised_program"


def start(case: str, run_dir: Path, ranks: int = 2, **options: Any) -> subprocess.Popen[str]:
    call = f"launch({PROGRAM!r}, [{case!r}, {str(run_dir)!r}], {ranks}, 1, Path({str(run_dir)!r}), **{options!r})"
    program = f"import sys; from pathlib import Path; from launchers.local import launch; sys.exit({call})"
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True)


def run(case: str, run_dir: Path, **options: Any) -> tuple[int, str]:
    launcher = start(case, run_dir, **options)
    _, stderr = launcher.communicate(timeout=180)
    return launcher.returncode, stderr


def pids(run_dir: Path, ranks: int = 2) -> list[int]:
    markers = [run_dir / f"pid_{rank}" for rank in range(ranks)]
    wait_for(lambda: all(marker.is_file() and marker.read_text() for marker in markers), 120)
    return [int(marker.read_text()) for marker in markers]


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 76), ("SIGINT", 76), ("SIGUSR1", 75), ("SIGHUP", 76)])
def test_a_stop_signal_goes_on_to_the_ranks(name: str, code: int, tmp_path: Path) -> None:
    launcher = start("wait", tmp_path / "run", max_restarts=3)
    pids(tmp_path / "run")
    launcher.send_signal(getattr(signal, name))
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == code, stderr
    received = "SIGTERM" if name == "SIGHUP" else name
    assert stderr.count(f"stopped by {received}; nothing had to be saved") == 1
    assert "restart 1" not in stderr and "killed" not in stderr
    assert (tmp_path / "run" / "restart_requested").exists() == (code == 75)


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 76), ("SIGUSR1", 75)])
def test_a_signal_while_the_ranks_start_does_not_kill_them(name: str, code: int, tmp_path: Path) -> None:
    launcher = start("wait", tmp_path / "run")
    wait_for(lambda: len(children(launcher.pid)) == 2, 60)
    launcher.send_signal(getattr(signal, name))
    _, stderr = launcher.communicate(timeout=120)
    assert launcher.returncode == code, stderr
    assert "Traceback" not in stderr


def test_ranks_that_do_not_end_are_killed_after_the_grace(tmp_path: Path) -> None:
    launcher = start("deaf", tmp_path / "run", stop_grace=2.0, max_restarts=3)
    ranks = pids(tmp_path / "run")
    launcher.terminate()
    _, stderr = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + 9, stderr
    assert "the ranks did not end within 2 s of the stop" in stderr and "restart 1" not in stderr
    assert not any(is_alive(pid) for pid in ranks)


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    launcher = start("deaf", tmp_path / "run")
    ranks = pids(tmp_path / "run")
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    _, stderr = launcher.communicate(timeout=20)
    assert launcher.returncode == 130, stderr
    assert not any(is_alive(pid) for pid in ranks)


@pytest.mark.parametrize("case", ["bug_while_others_wait", "bug_while_others_sleep"])
def test_a_failing_rank_ends_the_others(case: str, tmp_path: Path) -> None:
    launcher = start(case, tmp_path / "run", stop_grace=600.0)
    pids(tmp_path / "run")
    began = time.monotonic()
    _, stderr = launcher.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert launcher.returncode == 70, stderr
    assert "something nobody thought of" in (tmp_path / "run" / "errors" / "rank_1.txt").read_text()
    assert f"error: rank 1 failed; its traceback is in {tmp_path}/run/errors/rank_1.txt" in stderr


def test_a_killed_rank_is_started_again(tmp_path: Path) -> None:
    code, stderr = run("kill_once", tmp_path / "run", max_restarts=3)
    assert code == 0, stderr
    assert stderr.count("rank 1 was killed by SIGKILL; restart 1 of 3 from the last checkpoint") == 1
    assert (tmp_path / "run" / "finished").read_text() == "1"


def test_a_hang_leaves_the_stacks_of_all_ranks_and_is_started_again(tmp_path: Path) -> None:
    code, stderr = run("hang_once", tmp_path / "run", max_restarts=1)
    assert code == 0, stderr
    assert "hung; restart 1 of 1 from the last checkpoint" in stderr
    stacks = [(tmp_path / "run" / "errors" / "restart_1" / f"stacks_rank_{rank}.txt").read_text() for rank in (0, 1)]
    assert "barrier" in stacks[0] and "_sleep_where_nobody_looks" in stacks[1]
    assert (tmp_path / "run" / "finished").is_file()


def children(pid: int) -> list[int]:
    """The ranks that this launcher has started."""
    found = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in found.splitlines() if PROGRAM in line]


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

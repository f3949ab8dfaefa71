"""The lease of a run directory, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aligner.checkpoint import lease as module
from aligner.checkpoint.lease import LEASE_FILE, Holder, Lease
from aligner.errors import ConfigError, RunInUseError

# Waits for the start file, then takes the lease; says so and keeps it until its input ends. The machine may be another.
TAKER = """
import sys, time
from pathlib import Path
from aligner.checkpoint import lease as module
assert "torch" not in sys.modules
run_dir, machine, stale_after_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
if machine:
    module._machine = lambda: machine
print("ready", flush=True)
sys.stdin.readline()
try:
    lease = module.Lease.acquire(run_dir, beat_s=0.2, stale_after_s=stale_after_s)
except Exception as error:
    print(type(error).__name__, error, flush=True)
    sys.exit()
print("holds", lease.holder.token, flush=True)
until = time.monotonic() + (20 if "wait" in sys.stdin.readline() else 0)
while not lease.lost and time.monotonic() < until:
    time.sleep(0.05)
print("lost" if lease.lost else "kept", flush=True)
lease.release()
"""


class Taker:
    def __init__(self, run_dir: Path, machine: str = "", stale_after_s: float = 1.0) -> None:
        command = [sys.executable, "-c", TAKER, str(run_dir), machine, str(stale_after_s)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def __enter__(self) -> Taker:
        assert self.says() == "ready"
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def go(self, word: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def take(self) -> str:
        self.go()
        return self.says()


def content(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / LEASE_FILE).read_text())


def write_lease(run_dir: Path, **changes: Any) -> Holder:
    holder = replace(Holder.this_process(), **changes)
    (run_dir / LEASE_FILE).write_text(json.dumps({**vars(holder), "beat": 3}))
    return holder


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    lease = Lease.acquire(run_dir)
    assert content(run_dir)["pid"] == os.getpid()
    with pytest.raises(RunInUseError, match=rf"process {os.getpid()} on .*, since .*; one process .*choose another"):
        Lease.acquire(run_dir)
    with Taker(run_dir) as other:
        assert other.take().startswith("RunInUseError")
    lease.release()
    lease.release()
    assert list(run_dir.iterdir()) == []
    again = Lease.acquire(run_dir)
    assert not again.lost
    again.release()


def test_the_heart_beats_in_place(tmp_path: Path) -> None:
    lease = Lease.acquire(tmp_path, beat_s=0.05)
    path = tmp_path / LEASE_FILE
    before, size = path.stat().st_ino, path.stat().st_size
    deadline = time.monotonic() + 20
    while content(tmp_path)["beat"] < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (path.stat().st_ino, path.stat().st_size) == (before, size)
    lease.release()


def test_the_message_names_the_slurm_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    lease = Lease.acquire(tmp_path)
    with pytest.raises(RunInUseError, match="Slurm job 4711"):
        Lease.acquire(tmp_path)
    lease.release()


def test_a_dead_process_is_replaced_at_once(tmp_path: Path) -> None:
    with Taker(tmp_path) as other:
        assert other.take().startswith("holds")
        other.process.kill()
        other.process.wait()
        began = time.monotonic()
        lease = Lease.acquire(tmp_path, stale_after_s=60)
        assert time.monotonic() - began < 10
        lease.release()


def test_a_zombie_and_another_process_with_the_same_number_do_not_count(tmp_path: Path) -> None:
    with Taker(tmp_path) as other:
        assert other.take().startswith("holds")
        os.kill(other.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while module._process_started(other.process.pid) is not None:  # a zombie: nobody has waited for it
            assert time.monotonic() < deadline
            time.sleep(0.05)
        Lease.acquire(tmp_path, stale_after_s=60).release()
    write_lease(tmp_path, started="17")
    Lease.acquire(tmp_path, stale_after_s=60).release()


def test_an_earlier_life_of_the_same_job_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "one")
    write_lease(tmp_path, machine="elsewhere")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    Lease.acquire(tmp_path, stale_after_s=60).release()
    for changes in ({"job_restarts": 1}, {"job": "two/17"}, {"job": "one/18"}):  # another step, cluster or job
        write_lease(tmp_path, **{"machine": "elsewhere", "job_restarts": 0, **changes})
        with pytest.raises(RunInUseError):
            Lease.acquire(tmp_path, stale_after_s=60, give_up=lambda: True)


def test_another_machine_is_watched_until_it_is_silent_long_enough(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_lease(tmp_path, machine="elsewhere", host="far", pid=12)
    began = time.monotonic()
    lease = Lease.acquire(tmp_path, beat_s=0.1, stale_after_s=0.8)
    assert time.monotonic() - began >= 0.8
    said = capfd.readouterr().err
    assert "leased by process 12 on far" in said and "taken over" in said
    lease.release()


def test_a_beat_of_another_machine_is_noticed(tmp_path: Path) -> None:
    with Taker(tmp_path, machine="elsewhere") as other:
        assert other.take().startswith("holds")
        with pytest.raises(RunInUseError):
            Lease.acquire(tmp_path, beat_s=0.1, stale_after_s=60)
        assert other.take() == "kept"


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", b'{"token": "../x", "beat": 1}', b"\xff"])
def test_a_damaged_file_is_watched_too(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / LEASE_FILE).write_bytes(damaged)
    with pytest.raises(RunInUseError, match="an unknown process"):
        Lease.acquire(tmp_path, beat_s=0.1, stale_after_s=60, give_up=lambda: True)
    lease = Lease.acquire(tmp_path, beat_s=0.1, stale_after_s=0.3)
    assert content(tmp_path)["token"] == lease.holder.token
    lease.release()


def test_a_holder_that_was_paused_notices(tmp_path: Path) -> None:
    calls: list[int] = []
    with Taker(tmp_path, machine="elsewhere") as paused:
        assert paused.take().startswith("holds")
        os.kill(paused.process.pid, signal.SIGSTOP)
        lease = Lease.acquire(tmp_path, on_lost=lambda: calls.append(1), beat_s=0.1, stale_after_s=1.0)
        os.kill(paused.process.pid, signal.SIGCONT)
        paused.go("wait until it is lost")
        assert paused.says() == "lost"
        paused.process.wait(timeout=20)
    assert content(tmp_path)["token"] == lease.holder.token and not lease.lost  # it has not touched ours
    write_lease(tmp_path)
    deadline = time.monotonic() + 20
    while not lease.lost or not calls:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert calls == [1]
    lease.release()
    assert (tmp_path / LEASE_FILE).exists()


def test_a_lease_that_was_held_and_released_by_another_is_lost(tmp_path: Path) -> None:
    lease = Lease.acquire(tmp_path, beat_s=0.1)
    assert lease.holds()
    (tmp_path / LEASE_FILE).unlink()
    assert not lease.holds()  # at once, not at the next beat
    deadline = time.monotonic() + 20
    while not lease.lost:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    lease.release()


@pytest.mark.parametrize("before", ["nothing", "dead", "silent"])
def test_of_many_that_start_at_once_one_wins(tmp_path: Path, before: str) -> None:
    if before == "dead":
        write_lease(tmp_path, started="17")
    elif before == "silent":
        write_lease(tmp_path, machine="elsewhere")
    takers = [Taker(tmp_path) for _ in range(12)]
    try:
        for taker in takers:
            assert taker.says() == "ready"
        for taker in takers:
            taker.go()
        answers = [taker.says() for taker in takers]
        holders = [answer.split()[1] for answer in answers if answer.startswith("holds")]
        assert len(holders) == 1, answers
        assert all("RunInUseError" in answer for answer in answers if not answer.startswith("holds"))
        assert content(tmp_path)["token"] == holders[0]
        winner = next(taker for taker, answer in zip(takers, answers, strict=True) if answer.startswith("holds"))
        time.sleep(0.5)
        assert winner.take() == "kept"
        winner.process.wait(timeout=20)
        assert list(tmp_path.iterdir()) == []
    finally:
        for taker in takers:
            taker.__exit__()


def test_a_claim_of_a_process_that_died_is_removed_in_time(tmp_path: Path) -> None:
    holder = write_lease(tmp_path, started="17")
    (tmp_path / f".lease.{holder.token}.claim").touch()
    lease = Lease.acquire(tmp_path, stale_after_s=0.5)
    lease.release()
    assert list(tmp_path.iterdir()) == []


def test_file_systems_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    lease = Lease.acquire(tmp_path)
    with pytest.raises(RunInUseError):
        Lease.acquire(tmp_path)
    lease.release()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=r"run\.dir=.* cannot be written \((Not a directory|File exists)\); make"):
            Lease.acquire(path)

    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(ConfigError, match="No space left"):
        Lease.acquire(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []

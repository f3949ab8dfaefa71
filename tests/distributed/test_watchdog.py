"""The watchdog on real ranks under the launcher: it fires at a hang, with stacks of all ranks, and at nothing else."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from aligner.cli import exit_codes
from aligner.distributed import watchdog
from aligner.distributed.watchdog import Watchdog
from aligner.errors import RankFailure
from launchers.local import HUNG
from tests.distributed.test_supervision import run


def test_exit_codes_are_the_documented_ones() -> None:
    assert exit_codes.HUNG == watchdog.HUNG == HUNG
    assert RankFailure.exit_code == watchdog.RANK_FAILURE


def test_a_hang_of_one_rank_ends_all_with_their_stacks(tmp_path: Path) -> None:
    code, stderr = run("hang", tmp_path / "run")
    assert code == 72, stderr
    stacks = [(tmp_path / "run" / "errors" / f"stacks_rank_{rank}.txt").read_text() for rank in (0, 1)]
    assert "barrier" in stacks[0] and "_sleep_where_nobody_looks" in stacks[1]
    assert "phase 'body'" in stacks[0] and "no sign of life in phase 'body' for" in stacks[0] + stacks[1]
    assert stderr.count("its Python stacks are in") == 2
    assert not (tmp_path / "run" / "errors" / "rank_0.txt").exists()


def test_a_rank_whose_c_code_keeps_the_interpreter_leaves_its_stacks_too(tmp_path: Path) -> None:
    code, stderr = run("hang_in_c", tmp_path / "run")
    assert code == 72, stderr
    stacks = [(tmp_path / "run" / "errors" / f"stacks_rank_{rank}.txt").read_text() for rank in (0, 1)]
    assert "barrier" in stacks[0] and "supervised_program.py" in stacks[1]


def test_it_does_not_fire_in_a_healthy_run(tmp_path: Path) -> None:
    code, stderr = run("steady", tmp_path / "run")
    assert code == 0, stderr
    assert not (tmp_path / "run" / "errors").exists()


class Ended(Exception):
    """Instead of the end of the process."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise Ended

    monkeypatch.setattr(watchdog.os, "_exit", leave)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    return codes


def watched(run_dir: Path, timeout: float = 60.0, **options: float) -> Watchdog:
    dog = Watchdog()
    dog.start(run_dir, 0, timeout, {}, look_s=0.05, **options)
    dog.enter("rollout")
    return dog


def wait_for_exit(exits: list[int], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not exits and time.monotonic() < until:
        time.sleep(0.02)


def test_it_follows_a_rank_that_has_failed_but_not_at_once(tmp_path: Path, exits: list[int]) -> None:
    dog = watched(tmp_path, follow_after_s=1.0)
    (tmp_path / "errors").mkdir(exist_ok=True)
    (tmp_path / "errors" / "rank_0.txt").write_text("its own, on which it is just about to end")
    time.sleep(1.5)
    assert not exits
    (tmp_path / "errors" / "rank_3.txt").write_text("Traceback")
    time.sleep(0.5)
    assert not exits
    wait_for_exit(exits)
    dog.stop()
    assert exits == [8]
    assert "rank 3 failed, so this rank ends in phase 'rollout'" in (tmp_path / "errors/stacks_rank_0.txt").read_text()


def test_stacks_that_cannot_be_written_do_not_keep_it(tmp_path: Path, exits: list[int]) -> None:
    (tmp_path / "errors").write_text("a file where the directory should be")
    dog = watched(tmp_path, timeout=0.3)
    wait_for_exit(exits)
    dog.stop()
    assert exits == [72]


def test_a_stopped_watchdog_leaves_nothing(tmp_path: Path) -> None:
    dog = watched(tmp_path)
    time.sleep(0.3)
    assert (tmp_path / "errors" / ".stacks_rank_0.txt").is_file()
    dog.stop()
    assert not list(tmp_path.iterdir())

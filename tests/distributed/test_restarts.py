"""After which ends the launcher starts the ranks again, and how often. Ranks without torch: lives of a second."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from launchers.local import launch

PROGRAM = "tests.plain_rank"


def run(ends: str, run_dir: Path, **options: Any) -> int:
    return launch(PROGRAM, [str(run_dir), ends], ends.split(";")[0].count(",") + 1, 1, run_dir, **options)


def lives(run_dir: Path) -> int:
    return len(list(run_dir.glob("life_*_rank_0")))


@pytest.mark.parametrize(
    ("end", "what"),
    [
        ("-9", "rank 1 was killed by SIGKILL"),
        ("-11", "rank 1 was killed by SIGSEGV"),
        ("70", "rank 1 failed"),
        ("72", "rank 1 hung"),
        ("8", "rank 1 lost another rank"),
    ],
)
def test_what_may_pass_is_started_again(end: str, what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(f"0,{end};0,0", tmp_path / "run", max_restarts=3) == 0
    assert capfd.readouterr().err == f"{what}; restart 1 of 3 from the last checkpoint\n"
    assert lives(tmp_path / "run") == 2
    first, second = ((tmp_path / "run" / f"life_{life}_rank_1").read_text().split() for life in (0, 1))
    assert first[1] != second[1]  # a rendezvous of its own


@pytest.mark.parametrize("end", [1, 2, 3, 4, 5, 6, 7, 9, 75, 76, 130])
def test_what_would_happen_again_or_was_wished_is_not(
    end: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(f"{end}", tmp_path / "run", max_restarts=3) == end
    assert capfd.readouterr().err == ""
    assert lives(tmp_path / "run") == 1


def test_restarts_come_to_an_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("0,bug", tmp_path / "run", max_restarts=2) == 70
    errors = tmp_path / "run" / "errors"
    assert capfd.readouterr().err.splitlines() == [
        "rank 1 failed; restart 1 of 2 from the last checkpoint",
        "rank 1 failed; restart 2 of 2 from the last checkpoint",
        "error: 2 restarts in 3600 s were not enough",
        f"error: rank 1 failed; its traceback is in {errors}/rank_1.txt",
    ]
    kept = [errors / "restart_1", errors / "restart_2", errors]
    assert [(place / "rank_1.txt").read_text() for place in kept] == [f"traceback of life {n}" for n in range(3)]


def test_without_restarts_there_is_one_life(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("-9", tmp_path / "run") == 128 + 9
    assert capfd.readouterr().err == "error: rank 0 was killed by SIGKILL; the machine may have run out of memory\n"
    assert lives(tmp_path / "run") == 1


def test_restarts_outside_the_window_do_not_count(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("70;-9;70;0", tmp_path / "run", max_restarts=1, restart_window=0.01) == 0
    assert capfd.readouterr().err.count("restart 1 of 1") == 3


def test_others_that_do_not_notice_are_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert run("stay,-9", tmp_path / "run", stop_grace=600.0) == 128 + 9
    assert time.monotonic() - began < 30
    assert "error: rank 1 was killed by SIGKILL" in capfd.readouterr().err

"""Starting ranks: exit codes, one line an error, no rank left behind. Real processes, under elastic and torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aligner.cli import exit_codes
from aligner.errors import RankFailure
from launchers.local import BUG, RANK_FAILURE, _cause, _explain, launch

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "tests.distributed.rank_program"


def run_case(case: str, run_dir: Path, capfd: pytest.CaptureFixture[str]) -> tuple[int, str, float]:
    """Exit code, stderr and seconds of ``case`` on two ranks."""
    started = time.monotonic()
    code = launch(PROGRAM, [case, str(run_dir)], ranks=2, threads=1, run_dir=run_dir)
    return code, capfd.readouterr().err, time.monotonic() - started


def test_ranks_share_the_run_directory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, stderr, _ = run_case("ok", tmp_path / "run", capfd)
    assert code == 0, stderr
    known = (tmp_path / "run" / "gathered.txt").read_text()
    assert known == repr([(str(tmp_path / "run"), "1")] * 2)
    assert (tmp_path / "run" / "config.yaml").read_text().startswith("command: sft\n")


@pytest.mark.parametrize("case", ["error_on_1", "error_everywhere"])
def test_an_error_is_one_line_and_its_exit_code(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, stderr, seconds = run_case(case, tmp_path / "run", capfd)
    assert code == 3, stderr
    lines = [line for line in stderr.splitlines() if "field 'prompt' is missing" in line]
    assert len(lines) == 1 and lines[0].startswith("error: "), stderr
    assert "Traceback" not in stderr and "ChildFailedError" not in stderr
    assert seconds < 90
    assert not (tmp_path / "run" / "errors").exists()


def test_a_bug_leaves_its_traceback_and_ends_all_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, stderr, seconds = run_case("bug_on_1", tmp_path / "run", capfd)
    marker = tmp_path / "run" / "errors" / "rank_1.txt"
    assert code == 70, stderr
    assert "ValueError: something nobody thought of" in marker.read_text()
    assert f"error: rank 1 failed; its traceback is in {marker}" in stderr
    assert seconds < 90  # start-up of torch included; the waiting rank is ended by the launcher


def test_a_killed_rank_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, stderr, _ = run_case("killed_1", tmp_path / "run", capfd)
    assert code == 128 + 9
    assert "error: rank 1 was killed by SIGKILL; the machine may have run out of memory" in stderr


def test_a_traceback_of_an_earlier_life_is_not_shown_for_this_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    markers = [tmp_path / "run" / "errors" / f"rank_{rank}.txt" for rank in range(3)]
    markers[0].parent.mkdir(parents=True)
    for marker in markers:
        marker.write_text("old")
    assert _explain({0: 3, 1: 8}, tmp_path / "run") == 3
    assert "traceback" not in capfd.readouterr().err
    code, stderr, _ = run_case("bug_on_1", tmp_path / "run", capfd)
    assert code == 70, stderr
    assert [marker.is_file() for marker in markers] == [False, True, False]
    assert "something nobody thought of" in markers[1].read_text()


@pytest.mark.parametrize(
    ("codes", "cause"),
    [
        ({0: -11, 1: 75}, (1, 75)),  # all had saved when rank 0 died
        ({0: 75, 1: 76}, (1, 76)),
        ({0: 8, 1: -9}, (1, -9)),
        ({0: 8, 1: 3, 2: 70}, (1, 3)),
        ({0: 72, 1: 70, 2: -9}, (2, -9)),
        ({0: 72, 1: 70}, (1, 70)),
        ({0: 1, 1: 8, 2: 72}, (2, 72)),
        ({0: -15, 1: 8}, (1, 8)),
        ({0: 8, 1: 8}, (0, 8)),
    ],
)
def test_the_rank_that_says_best_why(codes: dict[int, int], cause: tuple[int, int]) -> None:
    assert _cause(codes) == cause


def test_exit_codes_are_those_of_the_ranks() -> None:
    assert (exit_codes.BUG, RankFailure.exit_code) == (BUG, RANK_FAILURE)


def test_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", PROGRAM]
    place: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    result = subprocess.run([*command, "ok", ""], **place, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    (run_dir,) = (tmp_path / "runs" / "sft").iterdir()  # rank 0 decided, the other followed
    assert (run_dir / "gathered.txt").read_text().count(str(run_dir.relative_to(tmp_path))) == 2
    result = subprocess.run([*command, "error_on_1", "run"], **place, capture_output=True, text=True, timeout=240)
    assert result.returncode != 0
    assert "error: [rank 1] data.jsonl:3: field 'prompt' is missing; add it" in result.stderr


def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    call = f"launch({PROGRAM!r}, ['wait', {str(run_dir)!r}], 2, 1, Path())"
    program = f"from pathlib import Path; from launchers.local import launch; {call}"
    launcher = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    markers = [run_dir / "pid_0", run_dir / "pid_1"]
    _wait_for(lambda: all(marker.is_file() and marker.read_text() for marker in markers), seconds=120)
    launcher.kill()
    launcher.wait()
    _wait_for(lambda: not any(_is_alive(int(marker.read_text())) for marker in markers), seconds=30)


def test_a_refused_run_leaves_no_run_directory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nor does it touch one that was there."""
    assert run_case("error_everywhere", tmp_path / "new", capfd)[0] == 3
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    assert run_case("error_everywhere", tmp_path / "old", capfd)[0] == 3
    assert (tmp_path / "old" / "config.yaml").is_file()


def _wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

"""The record of a run's lives, and when restarts stop being asked for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from aligner.monitoring import lives
from aligner.monitoring.lives import Life, begin_life, end_life, no_progress, read_lives


def test_begin_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert read_lives(tmp_path) == []
    begin_life(tmp_path, start_step=4, start_samples=8)
    (open_life,) = read_lives(tmp_path)
    assert (open_life.pid, open_life.job, open_life.restart_count) == (os.getpid(), "17", 2)
    assert (open_life.start_step, open_life.start_samples) == (4, 8)
    assert open_life.end_time is None and open_life.exit_code is None
    end_life(tmp_path, step=6, reason="SIGUSR1", exit_code=75)
    begin_life(tmp_path, start_step=6)
    first, second = read_lives(tmp_path)
    assert (first.step, first.reason, first.exit_code) == (6, "SIGUSR1", 75)
    assert first.end_time is not None and first.end_time >= first.start_time
    assert second.end_time is None
    assert lives.restarts([]) == 0 and lives.restarts([first, second]) == 1


def test_only_lives_that_were_to_go_on_are_restarted(tmp_path: Path) -> None:
    for code in (0, 2, 76, 75, 70):
        begin_life(tmp_path, start_step=0)
        end_life(tmp_path, step=0, reason="end", exit_code=code)
    begin_life(tmp_path, start_step=0)  # killed
    begin_life(tmp_path, start_step=0)
    assert lives.restarts(read_lives(tmp_path)) == 3  # after 75, 70 and the kill


def test_a_launcher_knows_the_cause(tmp_path: Path) -> None:
    began = time.time() - 1
    lives.tell_cause(tmp_path, reason="rank 1 was killed by SIGKILL", exit_code=137, since=began)
    assert not any(tmp_path.iterdir()), "a run that never began has no lives"
    begin_life(tmp_path, start_step=0)
    end_life(tmp_path, step=3, reason="RankFailure: lost its peers", exit_code=8)
    lives.tell_cause(tmp_path, reason="rank 1 was killed by SIGKILL", exit_code=137, since=began)
    lives.tell_cause(tmp_path, reason="of ranks whose life never began", exit_code=70, since=time.time() + 1)
    begin_life(tmp_path, start_step=3)
    lives.tell_cause(tmp_path, reason="rank 0 hung", exit_code=72, since=began)
    first, second = read_lives(tmp_path)
    assert (first.reason, first.exit_code, first.step) == ("rank 1 was killed by SIGKILL", 137, 3)
    assert (second.reason, second.exit_code, second.step) == ("rank 0 hung", 72, None)
    assert second.end_time is not None and second.end_time >= second.start_time


def test_torn_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    begin_life(tmp_path, start_step=0)
    path = tmp_path / lives.LIVES_FILE
    with path.open("ab") as stream:
        stream.write(b'{"event": "end", "ti')
    assert len(read_lives(tmp_path)) == 1
    begin_life(tmp_path, start_step=2)  # on a line of its own
    end_life(tmp_path, step=3, reason="é", exit_code=0)
    with path.open("ab") as stream:
        stream.write(b'[]\n17\n{"event": "start", "time": 1, "host": "a", "pid": 1}\n\xff\xfe\n{"event": "end", "tim')
    assert [(life.start_step, life.reason) for life in read_lives(tmp_path)] == [(0, None), (2, "é")]


def test_a_late_end_belongs_to_the_process_that_wrote_it(tmp_path: Path) -> None:
    begin_life(tmp_path, start_step=0)
    program = (
        "import sys, pathlib; from aligner.monitoring import lives\n"
        "lives.begin_life(pathlib.Path(sys.argv[1]), start_step=5); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    end_life(tmp_path, step=1, reason="taken over", exit_code=76)
    first, second = read_lives(tmp_path)
    assert first.reason == "taken over" and second.end_time is None and second.start_step == 5


LIFE = Life(start_time=0.0, host="a", pid=1, job=None, restart_count=0, start_step=4)
KILLED, CRASHED, RESTARTS = LIFE, replace(LIFE, exit_code=70), replace(LIFE, exit_code=75)


@pytest.mark.parametrize(
    ("past", "step", "expected"),
    [
        ([KILLED, CRASHED, RESTARTS], 4, True),
        ([RESTARTS, RESTARTS, KILLED], 4, True),
        ([RESTARTS, KILLED], 4, False),  # too few
        ([RESTARTS, RESTARTS, KILLED], 5, False),  # the last one got on
        ([replace(RESTARTS, start_step=3), RESTARTS, KILLED], 4, False),  # the first one did
        ([replace(RESTARTS, exit_code=76), RESTARTS, KILLED], 4, False),  # a person started the second
        ([replace(RESTARTS, exit_code=3), RESTARTS, KILLED], 4, False),
        ([replace(RESTARTS, start_step=3), RESTARTS, RESTARTS, KILLED], 4, True),
        ([], 0, False),
    ],
)
def test_no_progress(past: list[Life], step: int, expected: bool) -> None:
    assert no_progress(past, step=step) is expected


def test_samples_of_an_unfinished_step_are_progress() -> None:
    past = [replace(RESTARTS, start_samples=count) for count in (0, 64, 64)]
    assert not no_progress(past, step=4, samples=64)
    assert no_progress([*past, past[-1]], step=4, samples=64)
    assert not no_progress([*past, past[-1]], step=4, samples=128)


def test_request_and_clear(tmp_path: Path) -> None:
    lives.clear_endings(tmp_path)
    lives.request_restart(tmp_path, "deadline")
    errors = tmp_path / lives.ERRORS_DIRECTORY
    errors.mkdir()
    for name in ("rank_0.txt", "stacks_rank_3.txt", "keep.txt"):
        (errors / name).touch()
    assert (tmp_path / lives.RESTART_FILE).read_text() == "deadline\n"
    lives.clear_endings(tmp_path)
    assert not (tmp_path / lives.RESTART_FILE).exists()
    assert [path.name for path in errors.iterdir()] == ["keep.txt"]

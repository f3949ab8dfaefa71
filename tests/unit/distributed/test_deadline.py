"""Durations, Slurm's end time, and the forecast."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from aligner.distributed.deadline import Deadline, parse_duration, slurm_end_time
from aligner.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("5400", 5400),
        ("1:30", 90),
        ("90:00", 5400),
        ("1:30:00", 5400),
        ("100:00:00", 360000),
        ("2-12:00:00", 216000),
        ("2-12", 216000),
        ("0-00:30", 1800),
        (" 0:01 ", 1),
    ],
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "soon", "-5", "1.5", "1h", "1:", ":30", "1:2:3:4", "1-", "1-2:3:4:5", "0", "0:00:00", "1:60", "1:60:00"]
    + ["1:00:60", "1-24", "1-1:60", "٣"],
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.max_time='.*must.*for example trainer\.max_time=1:30:00"):
        parse_duration(text)


def test_the_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.time='x'"):
        parse_duration("x", key="cluster.time")


def squeue(directory: Path, body: str) -> dict[str, str]:
    """An environment whose ``squeue`` is a script; it leaves its arguments in a file."""
    script = directory / "squeue"
    script.write_text(f'#!/bin/sh\nprintf "%s|" "$@" > {directory}/arguments\n{body}\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {"SLURM_JOB_ID": "17", "PATH": f"{directory}:{os.environ['PATH']}"}


def test_end_time_from_the_environment() -> None:
    assert slurm_end_time({}) is None
    assert slurm_end_time({"SLURM_JOB_END_TIME": "1700000000"}) is None  # not in a job
    assert slurm_end_time({"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": "1700000000"}) == 1700000000.0


def test_end_time_from_squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = squeue(tmp_path, 'test "$SLURM_TIME_FORMAT" = standard && echo 2031-02-03T04:05:06')
    monkeypatch.setenv("PATH", environ["PATH"])
    expected = time.mktime((2031, 2, 3, 4, 5, 6, 0, 0, -1))
    assert slurm_end_time(environ) == expected
    assert (tmp_path / "arguments").read_text() == "-h|-j|17|-o|%e|"
    environ = squeue(tmp_path, "echo 2031-02-03T04:05:07; echo 2031-02-03T04:05:06")  # the parts of a het job
    assert slurm_end_time(environ) == expected


@pytest.mark.parametrize("body", ["echo NONE", "echo N/A", "exit 1", "echo 2031-02-03T04:05:06; exit 1", ""])
def test_end_time_that_nobody_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    environ = squeue(tmp_path, body)
    monkeypatch.setenv("PATH", environ["PATH"])
    assert slurm_end_time(environ) is None


def test_squeue_that_is_missing_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm_end_time({"SLURM_JOB_ID": "17", "PATH": str(tmp_path)}) is None
    environ = squeue(tmp_path, "exec sleep 60")
    monkeypatch.setenv("PATH", environ["PATH"])
    monkeypatch.setattr("aligner.distributed.deadline.SQUEUE_TIMEOUT_S", 0.2)
    began = time.monotonic()
    assert slurm_end_time(environ) is None
    assert time.monotonic() - began < 20


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_no_deadline_is_never_near() -> None:
    deadline = Deadline(None)
    deadline.note_step(1e9)
    assert not deadline.is_near() and not deadline.is_near(between_steps=False)


def test_a_tenth_is_kept_before_anything_was_seen_but_at_most_a_minute() -> None:
    clock = Clock()
    assert Deadline(1100.0, clock=clock).reserve() == pytest.approx(10.0)
    assert Deadline(1e6, clock=clock).reserve() == 60.0
    short = Deadline(1100.0, clock=clock)
    assert not short.is_near()
    clock.now = 1090.5
    assert short.is_near()
    assert Deadline(900.0, clock=clock).is_near()  # it is over


def test_the_longest_step_and_the_longest_save_count_between_steps() -> None:
    clock = Clock()
    deadline = Deadline(2000.0, clock=clock, margin=1.5)
    for step, save in ((80.0, 10.0), (100.0, 40.0), (20.0, 20.0)):
        deadline.note_step(step)
        deadline.note_save(save)
    assert deadline.reserve() == pytest.approx(1.5 * 140)
    clock.now = 2000.0 - 211
    assert not deadline.is_near()
    clock.now += 2
    assert deadline.is_near()


def test_inside_a_step_the_longest_stretch_between_looks_counts() -> None:
    clock = Clock()
    deadline = Deadline(10000.0, clock=clock, margin=1.0)
    deadline.is_near()
    for seconds in (5.0, 30.0, 10.0):
        clock.now += seconds
        deadline.is_near(between_steps=False)
    clock.now += 200  # training: nobody can stop it
    deadline.note_step(245.0)
    clock.now += 500  # a save is no part of it
    deadline.note_save(100.0)
    deadline.is_near()
    assert deadline.reserve(between_steps=False) == pytest.approx(300.0)
    assert deadline.reserve() == pytest.approx(345.0)
    deadline.end = clock.now + 320
    assert not deadline.is_near(between_steps=False)
    assert deadline.is_near()

"""A checkpoint that somebody needs stays; pins of what has ended hold no longer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aligner.checkpoint import pins
from aligner.checkpoint.pins import pin, pinned_steps
from aligner.errors import CheckpointError
from tests.checkpoint.fake import fake_checkpoint


def test_a_run_pins_while_its_directory_exists(tmp_path: Path) -> None:
    directory, run = tmp_path / "checkpoints", tmp_path / "run"
    run.mkdir()
    path = fake_checkpoint(directory, 7)
    assert pinned_steps(directory) == {}
    for _ in range(2):  # each life of the run pins
        pin(path, by=str(run))
    assert pinned_steps(directory) == {7: [str(run)]}
    assert len(list((directory / "pins").iterdir())) == 1
    run.rmdir()
    assert pinned_steps(directory) == {}


def test_an_evaluation_pins_while_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake_checkpoint(tmp_path, 7)
    monkeypatch.setattr(pins, "BEAT_S", 0.02)
    with pin(path, by="evaluation of x", heartbeat=True):
        assert pinned_steps(tmp_path) == {7: ["evaluation of x"]}
        (file,) = (tmp_path / "pins").iterdir()
        old = time.time() - 1000
        os.utime(file, (old, old))
        deadline = time.monotonic() + 10
        while not pinned_steps(tmp_path):
            assert time.monotonic() < deadline, "no beat"
            time.sleep(0.02)
    assert pinned_steps(tmp_path) == {} and not list((tmp_path / "pins").iterdir())


def test_a_pin_ends_with_its_process_or_its_beats(tmp_path: Path) -> None:
    path = fake_checkpoint(tmp_path, 7)
    program = "import sys, pathlib; from aligner.checkpoint.pins import pin; pin(pathlib.Path(sys.argv[1]), 'x', True)"
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=60)
    assert pinned_steps(tmp_path) == {}, "its process is gone"
    (file,) = (tmp_path / "pins").iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"host": "elsewhere"}))
    assert pinned_steps(tmp_path) == {7: ["x"]}, "a process elsewhere is believed while it beats"
    os.utime(file, (time.time() - 121, time.time() - 121))
    assert pinned_steps(tmp_path) == {}


def test_a_pin_that_cannot_be_read_holds(tmp_path: Path) -> None:
    (tmp_path / "pins").mkdir()
    (tmp_path / "pins" / "7.abc.json").write_text("{")
    (tmp_path / "pins" / "notes.json").write_text("{}")
    assert pinned_steps(tmp_path) == {7: ["unreadable pin 7.abc.json"]}


def test_what_is_gone_cannot_be_pinned(tmp_path: Path) -> None:
    path = fake_checkpoint(tmp_path, 7)
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="was deleted meanwhile"):
        pin(path, by=str(tmp_path))
    assert not list((tmp_path / "pins").iterdir())


def test_pins_that_have_no_place_are_none(tmp_path: Path) -> None:
    path = fake_checkpoint(tmp_path / "checkpoints", 7)
    (tmp_path / "checkpoints" / "pins").write_text("in the way, as a read-only file system would be")
    with pin(path, by="evaluation", heartbeat=True):
        assert pinned_steps(tmp_path / "checkpoints") == {}
    with pin(tmp_path, by=str(tmp_path)):  # a Hugging Face directory
        pass

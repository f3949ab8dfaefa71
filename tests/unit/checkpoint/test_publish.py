"""Whatever is killed and when, a checkpoint that existed exists, whole, and readers see whole ones only."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from aligner.checkpoint import manifest, snapshot
from aligner.checkpoint.checkpointer import newest_complete
from aligner.checkpoint.deletion import apply_retention
from aligner.checkpoint.retention import KEEP_ALL, Retention
from aligner.checkpoint.snapshot import Snapshot, clear_leftovers, restore_replaced, temporary_path

KILLED = 77
CHANGES = {"open", "write", "flush", "close", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir"}


def _snapshot(directory: Path, step: int, content: bytes) -> Snapshot:
    described = manifest.Manifest(step, 1, roles={}, files={}, metrics={"content": float(len(content))})
    temporary = temporary_path(directory, step, "abc")
    return Snapshot(directory, step, temporary, {}, {manifest.STATE_FILE: content, "rng_00000.pt": b"r"}, described)


def _save(directory: Path, step: int, content: bytes, retention: Retention = KEEP_ALL) -> None:
    plan = _snapshot(directory, step, content)
    plan.publish(plan.describe([plan.write()], None))
    apply_retention(directory, retention, {step})


def _killed_at(call: int, action: Any) -> bool:
    """Run ``action`` in a process that ends before its ``call``-th change of a file; whether it came that far."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def count_calls(frame: object, event: str, argument: Any) -> None:
            nonlocal count
            if event == "c_call" and argument.__name__ in CHANGES:
                count += 1
                if count == call:
                    os._exit(KILLED)

        try:
            sys.setprofile(count_calls)
            action()
            sys.setprofile(None)
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, KILLED), f"the save itself failed: {code}"
    return code == KILLED


def _content(path: Path) -> bytes:
    found = manifest.read(path)
    assert not any(manifest.file_problem(path, name, entry) for name, entry in found.files.items())
    return (path / manifest.STATE_FILE).read_bytes()


@pytest.mark.parametrize("can_exchange", [True, False])
def test_killed_while_replacing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool) -> None:
    """The old content or the new one, never none. Where two directories cannot be exchanged, the next life looks."""
    if not can_exchange:
        monkeypatch.setattr(snapshot, "_LIBC", _NoExchange())
    seen, call = set(), 0
    while True:
        call += 1
        directory = tmp_path / str(call)
        directory.mkdir()
        _save(directory, 5, b"old")
        was_killed = _killed_at(call, lambda directory=directory: _save(directory, 5, b"new"))
        if not can_exchange:
            restore_replaced(directory)
        newest = newest_complete(directory)
        assert newest is not None
        seen.add(_content(newest))
        clear_leftovers(directory)
        assert {path.name for path in directory.iterdir()} == {"step_00000005", "latest"}
        _save(directory, 5, b"again")
        assert _content(newest) == b"again"
        if not was_killed:
            break
    assert seen == {b"old", b"new"} and call > 15


class _NoExchange:
    def renameat2(self, *_: object) -> int:
        return -1


def test_killed_while_publishing_and_deleting(tmp_path: Path) -> None:
    """Of steps 1 and 2, retention deletes 1 once 2 is there."""
    newest_steps, call = [], 0
    while True:
        call += 1
        directory = tmp_path / str(call)
        directory.mkdir()
        _save(directory, 1, b"one")
        was_killed = _killed_at(call, lambda directory=directory: _save(directory, 2, b"two", Retention(keep_last=1)))
        steps = [manifest.read(path).step for path in manifest.published(directory)]
        assert steps in ([1], [1, 2], [2])
        newest_steps.append(steps[-1])
        for path in manifest.published(directory):
            assert _content(path) == {1: b"one", 2: b"two"}[manifest.read(path).step]
        if not was_killed:
            break
    assert steps == [2] and newest_steps == sorted(newest_steps) and set(newest_steps) == {1, 2}


def test_the_hint_names_the_newest(tmp_path: Path) -> None:
    for step in (1, 2):
        _save(tmp_path, step, b"x")
        assert (tmp_path / "latest").read_text() == f"step_0000000{step}\n"


def test_leftovers_go_and_nothing_else(tmp_path: Path) -> None:
    _save(tmp_path, 1, b"x")
    (tmp_path / "pins").mkdir()
    (tmp_path / "notes").write_text("mine")
    (tmp_path / ".tmp-step_00000002.def" / "actor").mkdir(parents=True)
    (tmp_path / ".tmp-latest").write_text("")
    clear_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000001", "latest", "pins", "notes"}

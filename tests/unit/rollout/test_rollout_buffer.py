"""Chunks kept between two lives: exact, tied to a checkpoint and a step, and never read when anything is wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from aligner.rollout import buffer
from aligner.rollout.batch import RolloutBatch
from aligner.rollout.buffer import drop_chunks, kept_samples, load_chunks, save_chunks
from tests.unit.rollout.test_rollout_batch import assert_equal, make

STEP = 13
DIGEST = "a" * 64


@pytest.fixture(autouse=True, scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process alone."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where three chunks of step 13 are kept."""
    assert save_chunks(tmp_path, STEP, chunks(), DIGEST) == ""
    return tmp_path / "rollouts" / "step_00000013"


def chunks() -> list[RolloutBatch]:
    odd = make(2, 5, full=False, seed=2)
    odd = odd.replace(metadata=({"half": "\ud83d", "nested": {"a": [1, None, 0.1]}}, {}))
    return [make(3, 6), make(1, 9, full=False, seed=1), odd]


def test_every_field_comes_back_exactly(directory: Path) -> None:
    run_dir = directory.parent.parent
    loaded = load_chunks(run_dir, STEP, DIGEST)
    assert len(loaded) == 3
    for before, after in zip(chunks(), loaded, strict=True):
        assert_equal(before, after)
        for field in dataclasses.fields(before):
            assert type(getattr(before, field.name)) is type(getattr(after, field.name)), field.name
    assert {path.suffix for path in directory.rglob("*") if path.is_file()} == {".json", ".safetensors"}
    assert [path.name for path in directory.parent.iterdir()] == ["step_00000013"]


def test_nothing_kept_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_chunks(tmp_path, STEP, DIGEST) == []
    drop_chunks(tmp_path)
    assert capsys.readouterr().out == ""


def test_another_checkpoint_or_step(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = directory.parent.parent
    assert load_chunks(run_dir, STEP, "b" * 64) == []
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "another checkpoint" in out and "step 13 is sampled anew" in out
    assert load_chunks(run_dir, STEP + 1, DIGEST) == []
    directory.rename(directory.with_name("step_00000014"))
    assert load_chunks(run_dir, STEP + 1, DIGEST) == []
    assert "of step 13, not 1 of step 14" in capsys.readouterr().out


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_damage_of_any_file(
    directory: Path, tmp_path: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    sound = tmp_path / "sound"
    shutil.copytree(directory, sound)
    files = [path.relative_to(directory) for path in sorted(directory.rglob("*")) if path.is_file()]
    assert len(files) == 7
    for file in files:
        if file.name == "manifest.json" and damage is not Path.unlink:
            continue
        damage(directory / file)
        assert load_chunks(tmp_path, STEP, DIGEST) == [], file
        out = capsys.readouterr().out
        assert out.count("\n") == 1 and str(file) in out, out
        shutil.rmtree(directory)
        shutil.copytree(sound, directory)
    assert len(load_chunks(tmp_path, STEP, DIGEST)) == 3


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "null", '{"format": 1}', '{"format": 2, "step": 13}', "\udce9"],
)
def test_a_broken_manifest(directory: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    assert load_chunks(directory.parent.parent, STEP, DIGEST) == []
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize(
    "key, value", [("chunks", 2), ("chunks", 10**12), ("chunks", 0), ("chunks", -1), ("files", {})]
)
def test_a_manifest_that_contradicts_itself(directory: Path, key: str, value: object) -> None:
    manifest = directory / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), key: value}))
    assert load_chunks(directory.parent.parent, STEP, DIGEST) == []


def test_a_later_save_replaces_all_and_drop_removes(directory: Path) -> None:
    run_dir = directory.parent.parent
    (directory.parent / ".tmp-step_00000009").mkdir()
    assert save_chunks(run_dir, STEP, chunks()[:1], DIGEST) == ""
    assert len(load_chunks(run_dir, STEP, DIGEST)) == 1
    assert save_chunks(run_dir, STEP + 1, chunks(), DIGEST) == ""
    assert [path.name for path in directory.parent.iterdir()] == ["step_00000014"]
    drop_chunks(run_dir)
    assert not directory.parent.exists()


def test_a_failed_write_is_told_and_leaves_what_was_there(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = directory.parent.parent

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(buffer, "write_file", full)
    assert save_chunks(run_dir, STEP, chunks()[:1], DIGEST) == "No space left on device"
    assert [path.name for path in directory.parent.iterdir()] == ["step_00000013"]
    assert len(load_chunks(run_dir, STEP, DIGEST)) == 3


def test_chunks_of_other_sampling_are_not_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampled_with = {"top_p": 0.1 + 0.2, "stop_token_ids": (2, 3), "seed": 1}
    assert save_chunks(tmp_path, STEP, chunks(), DIGEST, sampled_with) == ""
    assert len(load_chunks(tmp_path, STEP, DIGEST, dict(sampled_with))) == 3
    assert capsys.readouterr().out == ""
    assert load_chunks(tmp_path, STEP, DIGEST, {**sampled_with, "seed": 2}) == []
    assert "was sampled with {'seed': 1}, not with {'seed': 2}; step 13 is sampled anew" in capsys.readouterr().out
    assert load_chunks(tmp_path, STEP, DIGEST) == []


def test_kept_samples_are_counted_by_the_manifest(directory: Path) -> None:
    run_dir = directory.parent.parent
    assert kept_samples(run_dir, STEP) == 6
    assert kept_samples(run_dir, STEP + 1) == kept_samples(run_dir / "nowhere", STEP) == 0
    for broken in ("", "[]", '{"format": 1, "step": 13}', '{"format": 1, "step": 13, "samples": "x"}'):
        (directory / "manifest.json").write_text(broken)
        assert kept_samples(run_dir, STEP) == 0


def test_a_second_save_whose_renames_are_interrupted_leaves_a_directory_that_loads(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = directory.parent.parent
    rename, calls = os.rename, []

    def interrupted(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", interrupted)
    assert save_chunks(run_dir, STEP, chunks()[:1], DIGEST) == "Input/output error"
    monkeypatch.undo()
    assert load_chunks(run_dir, STEP, DIGEST) == []  # nothing is kept, and nothing hinders the next save
    assert save_chunks(run_dir, STEP, chunks(), DIGEST) == ""
    assert save_chunks(run_dir, STEP, chunks()[:2], DIGEST) == ""
    assert len(load_chunks(run_dir, STEP, DIGEST)) == 2
    assert [path.name for path in directory.parent.iterdir()] == ["step_00000013"]

"""What roles start from: decided once, compared on resume, found again where it was moved to, pinned in other runs."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aligner.checkpoint import manifest
from aligner.checkpoint.pins import pinned_steps
from aligner.distributed import platform
from aligner.distributed.context import RunContext
from aligner.errors import CheckpointError, ConfigError, ModelError
from aligner.phases.sources import SOURCES_FILE, digest_sources, find_source, pin_sources, read_sources
from tests.distributed.spawn import run_ranks

FROZEN = ("reference", "reward")


@pytest.fixture
def context(tmp_path: Path) -> Iterator[RunContext]:
    """Of a run that has not saved anything."""
    (tmp_path / "run").mkdir()
    yield RunContext(tmp_path / "run", 0, 1, platform.initialize())
    platform.shutdown()


def resumed(context: RunContext) -> RunContext:
    return dataclasses.replace(context, resume_from=context.run_dir / "checkpoints/step_00000001")


def write_model(directory: Path, *values: float) -> Path:
    """A Hugging Face directory with a weight file for each of ``values``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    names = {f"w{i}": f"model-{i}.safetensors" for i in range(len(values))}
    for (weight, file), value in zip(names.items(), values, strict=True):
        save_file({weight: torch.full((4,), value)}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return directory


def write_checkpoint(run: Path, step: int, text: str = "") -> Path:
    path = run / "checkpoints" / manifest.step_name(step)
    path.mkdir(parents=True)
    entry = manifest.write_file(path / "state.json", text.encode())
    manifest.write(path, manifest.Manifest(step, 1, {}, {"state.json": entry}, time=float(step)))
    return path


def test_a_run_directory_means_its_newest_checkpoint_for_the_whole_life(tmp_path: Path, context: RunContext) -> None:
    first = write_checkpoint(tmp_path / "rm", 3)
    given = {"reward": str(tmp_path / "rm")}
    assert pin_sources(context, given, FROZEN)["reward"].path == first
    assert pinned_steps(tmp_path / "rm/checkpoints") == {3: [str(context.run_dir)]}
    write_checkpoint(tmp_path / "rm", 5)
    assert pin_sources(context, given, FROZEN)["reward"].path == first  # started again before its first checkpoint
    shutil.rmtree(tmp_path / "rm/checkpoints/pins")
    assert pin_sources(resumed(context), given, FROZEN)["reward"].path == first
    assert list(pinned_steps(tmp_path / "rm/checkpoints")) == [3]
    assert read_sources(context)["reward"]["sha256"] == manifest.digest(first)


def test_a_run_that_saved_nothing_may_be_given_another_source(tmp_path: Path, context: RunContext) -> None:
    one, other = write_model(tmp_path / "one", 1.0), write_model(tmp_path / "other", 2.0)
    pin_sources(context, {"actor": str(one)})
    assert pin_sources(context, {"actor": str(other)})["actor"].path == other
    assert read_sources(context)["actor"]["given"] == str(other)
    write_model(other, 3.0)
    pin_sources(context, {"actor": str(other)})
    assert read_sources(context)["actor"]["sha256"] == digest_sources({"a": find_source(other)}, context)["a"]


def test_changed_weights_of_a_frozen_role_are_refused(tmp_path: Path, context: RunContext) -> None:
    model = write_model(tmp_path / "m", 1.0, 2.0)
    given = {"actor": str(model), "reference": str(model)}
    pin_sources(context, given, FROZEN)
    before = (context.run_dir / SOURCES_FILE).read_text()
    pin_sources(resumed(context), given, FROZEN)
    write_model(model, 1.0, 2.5)
    with pytest.raises(CheckpointError, match=f"reference: {model} holds other weights than when the run began"):
        pin_sources(resumed(context), given, FROZEN)
    pin_sources(resumed(context), {"actor": str(model)}, FROZEN)  # a trained role is in the checkpoint
    assert (context.run_dir / SOURCES_FILE).read_text() == before


def test_a_source_may_move_but_not_change(tmp_path: Path, context: RunContext) -> None:
    model, run = write_model(tmp_path / "m", 1.0), tmp_path / "rm"
    write_checkpoint(run, 3)
    given = {"actor": str(model), "reference": str(model), "reward": str(run)}
    pin_sources(context, given, FROZEN)
    write_checkpoint(run, 5)
    shutil.copytree(run, tmp_path / "there/rm")
    shutil.copytree(model, tmp_path / "there/m")
    shutil.rmtree(run)
    shutil.rmtree(model)
    with pytest.raises(CheckpointError, match=r"reference began from .*/m, which is gone; restore it"):
        pin_sources(resumed(context), given, FROZEN)
    moved = {role: path.replace(str(tmp_path), f"{tmp_path}/there") for role, path in given.items()}
    found = pin_sources(resumed(context), moved, FROZEN)
    assert found["reward"].path == tmp_path / "there/rm/checkpoints/step_00000003"
    assert read_sources(context)["reference"]["given"] == str(model)  # the file says what the run began with
    assert pin_sources(resumed(context), moved, FROZEN) == found
    write_model(tmp_path / "other", 9.0)
    for role in ("actor", "reference"):  # a trained role cannot start anew either
        with pytest.raises(ConfigError, match=rf"began with {role} from {model}, not from .*/other, which holds other"):
            pin_sources(resumed(context), {role: str(tmp_path / "other")}, FROZEN)


def test_what_cannot_be_read_is_one_line(tmp_path: Path, context: RunContext) -> None:
    model = write_model(tmp_path / "m", 1.0)
    (model / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match="holds neither model.safetensors"):
        pin_sources(context, {"actor": str(model)})
    write_model(model, 1.0)
    (model / "model-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-0.safetensors: cannot be read \(No such file"):
        pin_sources(context, {"actor": str(model)})
    (context.run_dir / SOURCES_FILE).write_text("{")
    with pytest.raises(CheckpointError, match=r"sources.json cannot be read .*; remove it"):
        pin_sources(context, {"actor": str(model)})


def digest_on_ranks(run_dir: str, model: str) -> tuple[str, int]:
    """The digest, and how many weight files this rank has read."""
    import aligner.phases.sources as sources

    reads: list[Path] = []
    original = sources._sha256

    def counted(path: Path) -> str:
        reads.append(path)
        return original(path)

    sources._sha256 = counted
    context = RunContext(Path(run_dir), platform.rank(), platform.world_size(), platform.current())
    source = find_source(model)
    return digest_sources({"reference": source, "actor": source}, context)["reference"], len(reads)


def test_ranks_share_the_files_and_each_is_read_once(tmp_path: Path, context: RunContext) -> None:
    model = write_model(tmp_path / "m", 1.0, 2.0, 3.0)
    alone = digest_sources({"a": find_source(model)}, context)["a"]
    found = run_ranks(2, digest_on_ranks, str(tmp_path), str(model))
    assert [digest for digest, _ in found] == [alone, alone]
    assert sorted(reads for _, reads in found) == [1, 2]

"""Saves in the background hold the values of the moment of the save, whatever training does meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from aligner.checkpoint import manifest
from aligner.checkpoint.checkpointer import Checkpointer
from aligner.checkpoint.pins import pin
from aligner.checkpoint.retention import Retention
from aligner.checkpoint.snapshot import Snapshot
from aligner.distributed import collectives, platform
from aligner.distributed.topology import Degrees
from aligner.models.role_model import RoleModel
from tests.checkpoint.fake import wait_for_deletions
from tests.checkpoint.small import (
    ONE,
    PP2,
    TP2,
    TP2PP2,
    Counter,
    all_bytes,
    fill,
    start,
    states,
    three_roles,
    train,
)
from tests.distributed.spawn import run_ranks


@contextmanager
def held_writers() -> Iterator[threading.Event]:
    """Writing does not begin before the event is set."""
    go, write = threading.Event(), Snapshot.write

    def write_later(plan: Snapshot) -> Any:
        assert go.wait(60)
        return write(plan)

    Snapshot.write = write_later  # type: ignore[method-assign]
    try:
        yield go
    finally:
        go.set()
        Snapshot.write = write  # type: ignore[method-assign]


def _change_everything(models: dict[str, RoleModel], counter: Counter) -> None:
    train(models, counter, range(2, 4))
    with get_cuda_rng_tracker().fork():
        torch.rand(7)
    fill(models["reference"], 77)


def _files(path: Path) -> dict[str, manifest.Entry]:
    return manifest.read(path).files


def _background(directory: str, actor: Degrees, critic: Degrees, dtype: torch.dtype, distributed: bool) -> None:
    start(actor)
    models, counter = three_roles(actor, critic, dtype, distributed), Counter()
    train(models, counter, range(2))
    expected = all_bytes(models)
    state = states({"counter": counter})
    here = Checkpointer(Path(directory) / "here")
    beside = Checkpointer(Path(directory) / "beside", async_save=True)
    now = here.save(2, models, state)
    assert now is not None and now.error is None
    with held_writers() as go:
        assert beside.save(2, models, state) is None and beside.in_flight
        _change_everything(models, counter)
        assert all_bytes(models) != expected
        for _ in range(3):
            assert beside.poll() is None and beside.newest() is None, "half a checkpoint is none"
        go.set()
        report = beside.finish()
    assert report is not None and report.error is None and report.bytes == now.bytes > 0
    assert not any(model.before_change for model in models.values()), "training is still held up"
    assert (report.step, report.path.name, beside.in_flight) == (2, "step_00000002", False)
    assert beside.finish() is None and beside.poll() is None, "a report is given once"
    assert _files(report.path) == _files(now.path), "not the same bits"

    random.seed(5)
    step = beside.load(report.path, models, {"counter": counter})
    found = all_bytes(models)
    assert step == counter.seen == 2 and [name for name in expected if found[name] != expected[name]] == []
    assert beside.resumed_from == report.path
    again = here.save(3, models, states({"counter": counter}))
    assert again is not None and again.error is None
    saved, resaved = _files(now.path), _files(again.path)
    differing = [name for name in saved if saved[name] != resaved[name]]
    assert all(name.endswith("/common.pt") for name in differing), differing  # equal settings in another order


@pytest.mark.parametrize(
    ("world", "actor", "critic", "dtype", "distributed"),
    [
        (1, ONE, ONE, torch.float32, True),
        (2, ONE, TP2, torch.bfloat16, True),
        (2, PP2, ONE, torch.float32, False),
        (4, TP2PP2, TP2, torch.bfloat16, True),
    ],
)
def test_background_saves_are_the_same_bits(
    tmp_path: Path, world: int, actor: Degrees, critic: Degrees, dtype: torch.dtype, distributed: bool
) -> None:
    run_ranks(world, _background, str(tmp_path), actor, critic, dtype, distributed)


def _several(directory: str) -> None:
    start(ONE)
    models, counter = three_roles(ONE, ONE, torch.float32, True), Counter()
    checkpointer = Checkpointer(Path(directory), async_save=True, retention=Retention(1, 0, "reward", "max"))
    rewards = {1: 0.5, 2: 2.0, 3: 1.0, 4: float("nan"), 5: 0.1}
    contents = {}
    checkpointer.prepare(models)
    for step, reward in rewards.items():
        train(models, counter, range(step, step + 1))
        contents[step] = all_bytes(models)
        metrics = {"reward": reward}
        assert checkpointer.save(step, models, states({"counter": counter}), metrics=metrics) is None
        assert checkpointer.in_flight
        if step == 1:
            _poll_until_published(checkpointer, 1)
            if platform.rank() == 0:
                pin(checkpointer.directory / "step_00000001", by=directory)
            collectives.barrier()
            checkpointer.load(checkpointer.directory / "step_00000001", models, {})
            contents[1] = all_bytes(models)
    for step in (2, 3, 4):  # each was finished by the save after it, and its report kept
        report = checkpointer.poll()
        assert report is not None and (report.step, report.error) == (step, None)
    _poll_until_published(checkpointer, 5)
    assert not checkpointer.in_flight

    kept = {path.name: manifest.read(path) for path in manifest.published(checkpointer.directory)}
    assert list(kept) == ["step_00000001", "step_00000002", "step_00000005"]  # resumed from and pinned, best, last
    assert kept["step_00000005"].best == {"metric": "reward", "mode": "max", "step": 2, "value": 2.0}
    assert kept["step_00000001"].best == {"metric": "reward", "mode": "max", "step": 1, "value": 0.5}
    for name in kept:
        step = checkpointer.load(checkpointer.directory / name, models, {"counter": counter})
        assert all_bytes(models) == contents[step], name
    wait_for_deletions()
    collectives.barrier()
    assert not list(checkpointer.directory.glob(".tmp-*"))
    _check_manifest(kept["step_00000005"])


def _poll_until_published(checkpointer: Checkpointer, step: int) -> None:
    for _ in range(10_000):
        report = checkpointer.poll()
        if report is not None:
            assert (report.step, report.error) == (step, None)
            assert report.stall_s > 0 and report.write_s > 0
            return
    raise AssertionError("never published")


def _check_manifest(found: manifest.Manifest) -> None:
    """What the checkpoint consists of is listed with shapes and sizes."""
    kinds = {name: component["kind"] for name, component in found.components.items()}
    assert kinds == {
        "actor": "model",
        "actor.optimizer": "optimizer",
        "actor.scheduler": "scheduler",
        "critic": "model",
        "critic.optimizer": "optimizer",
        "critic.scheduler": "scheduler",
        "reference": "model",
        "counter": "state",
        "rng": "rng",
    }
    actor, optimizer = found.components["actor"], found.components["actor.optimizer"]
    assert actor["tensors"]["embedding.word_embeddings.weight"] == ["float32", 128, 32]
    assert optimizer["bytes"] == 3 * actor["bytes"] and len(optimizer["tensors"]) == 3 * len(actor["tensors"])
    names = {"state.json", "rng_00000.pt", "rng_00001.pt"}
    names |= {f"{role}/{name}" for role in ("actor", "critic", "reference") for name in (".metadata", "common.pt")}
    assert names < found.files.keys() and all(len(digest) == 32 for _, digest in found.files.values())
    assert found.fingerprint == manifest.fingerprint() and found.world_size == 2


def test_several_saves_follow_each_other(tmp_path: Path) -> None:
    run_ranks(2, _several, str(tmp_path))

"""Checkpoints of real Megatron models on real ranks: exact, complete or absent, and free of the layout."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing

from aligner.checkpoint.checkpointer import Checkpointer, load_weights, read_extra
from aligner.distributed.topology import Degrees
from aligner.errors import CheckpointError, RankFailure
from aligner.models.role_model import RoleModel
from tests.checkpoint.small import (
    ONE,
    PP2,
    TP2,
    TP2PP2,
    Counter,
    all_bytes,
    fill,
    optimizer_tensors,
    small_model,
    start,
    states,
    take_step,
    three_roles,
    train,
)
from tests.distributed.spawn import run_ranks


def _straight_and_halfway(
    directory: str, actor: Degrees, critic: Degrees, dtype: torch.dtype, distributed: bool
) -> Any:
    start(actor)
    models, counter = three_roles(actor, critic, dtype, distributed), Counter()
    checkpointer = Checkpointer(Path(directory))
    assert checkpointer.newest() is None
    train(models, counter, range(2))  # so far the actor has never stepped
    before = all_bytes(models)
    checkpointer.save(2, models, states({"counter": counter}))
    assert not multiprocessing.active_children(), "a save starts no processes"
    after = all_bytes(models)
    assert {name: after[name] for name in before} == before, "saving changed something"
    noise = train(models, counter, range(2, 5))
    return all_bytes(models), noise, counter.state_dict()


def _resumed(directory: str, actor: Degrees, critic: Degrees, dtype: torch.dtype, distributed: bool) -> Any:
    start(actor)
    models, counter = three_roles(actor, critic, dtype, distributed), Counter()
    for model in models.values():
        fill(model, 99)
    checkpointer = Checkpointer(Path(directory))
    newest = checkpointer.newest()
    assert newest is not None and newest.name == "step_00000002"
    step = checkpointer.load(newest, models, {"counter": counter})
    assert step == counter.seen == 2
    noise = train(models, counter, range(2, 5))
    return all_bytes(models), noise, counter.state_dict()


@pytest.mark.parametrize(
    ("world", "actor", "critic", "dtype", "distributed"),
    [
        (1, ONE, ONE, torch.float32, True),
        (1, ONE, ONE, torch.bfloat16, False),
        (2, ONE, TP2, torch.bfloat16, True),  # DP2, and a critic with another layout
        (2, PP2, ONE, torch.float32, True),
        (2, TP2, PP2, torch.float32, False),
    ],
)
def test_resume_is_bit_equal(
    tmp_path: Path, world: int, actor: Degrees, critic: Degrees, dtype: torch.dtype, distributed: bool
) -> None:
    arguments = (str(tmp_path), actor, critic, dtype, distributed)
    straight = run_ranks(world, _straight_and_halfway, *arguments)
    resumed = run_ranks(world, _resumed, *arguments)
    for rank in range(world):
        assert resumed[rank][1:] == straight[rank][1:]
        assert resumed[rank][0] == straight[rank][0]


def _save_at(directory: str, degrees: Degrees) -> None:
    start(degrees)
    models = _two_policies(degrees)
    for seed, model in enumerate(models.values()):
        fill(model, seed)
    for step in range(3):
        take_step(models["trained"], step)
    Checkpointer(Path(directory)).save(2, models, {})


def _copy_at(source: str, target: str, degrees: Degrees) -> None:
    start(degrees)
    models = _two_policies(degrees)
    assert Checkpointer(Path(target)).load(Path(source), models, {}) == 2
    Checkpointer(Path(target)).save(2, models, {})


def _two_policies(degrees: Degrees) -> dict[str, RoleModel]:
    """One with bf16 and fp32 parameters that is trained, one that never makes a step."""
    return {
        "trained": small_model("trained", degrees, torch.bfloat16, head="scalar"),
        "fresh": small_model("fresh", degrees),
    }


def _tensors(path: Path, role: str) -> dict[str, torch.Tensor]:
    stored = dist_checkpointing.load_plain_tensors(str(path / role))
    return {name: value for name, value in stored.items() if isinstance(value, torch.Tensor)}


def _all_tensors(paths: list[str]) -> None:
    for role in ("trained", "fresh"):
        first, *others = [_tensors(Path(path), role) for path in paths]
        for name in [name for name in first if not name.startswith("optimizer.")]:
            master = first[f"optimizer.state.param.{name}"]
            assert torch.equal(master.to(first[name].dtype), first[name]), f"{name} has the state of another parameter"
            assert bool(first[f"optimizer.state.exp_avg_sq.{name}"].any()) == (role == "trained")
        for other in others:
            assert first.keys() == other.keys()
            for name, value in first.items():
                assert torch.equal(value, other[name]), name


def test_other_layouts_load_and_save_the_same_tensors(tmp_path: Path) -> None:
    """Along a chain of layouts; one of the optimizers has never stepped."""
    run_ranks(4, _save_at, str(tmp_path / "a"), TP2PP2)
    paths = [tmp_path / "a/checkpoints/step_00000002"]
    for world, degrees in ((2, TP2), (1, ONE), (2, PP2), (2, ONE)):
        target = tmp_path / f"{world}-{len(paths)}"
        run_ranks(world, _copy_at, str(paths[-1]), str(target), degrees)
        paths.append(target / "checkpoints/step_00000002")
    run_ranks(1, _all_tensors, [str(path) for path in paths])


def _weights_only(directory: str) -> None:
    start(ONE)
    actor = small_model("actor", ONE)
    fill(actor, 3)
    statistics = states({"statistics": Counter(4, [0.1, -2.5e-30])})
    report = Checkpointer(Path(directory)).save(1, {"policy": actor}, statistics)
    assert report is not None and report.error is None
    path = report.path
    assert read_extra(path, "statistics") == {"seen": 4, "history": [0.1, -2.5e-30]}
    with pytest.raises(CheckpointError, match="no 'other'"):
        read_extra(path, "other")

    reference = small_model("reference", TP2, frozen=True)
    assert load_weights(path, "policy", reference) == []
    again = Checkpointer(Path(directory) / "b").save(1, {"policy": reference}, {})
    assert again is not None
    stored = _tensors(path, "policy")
    for name, value in _tensors(again.path, "policy").items():
        assert torch.equal(value, stored[name]), name

    critic = small_model("critic", PP2, head="scalar")
    with pytest.raises((CheckpointError, RankFailure), match="no tensor 'head"):
        load_weights(path, "policy", critic)
    kept = load_weights(path, "policy", critic, strict=False)
    assert all(name.startswith("head") for name in kept)
    assert bool(kept) == critic.topology.is_last_stage
    masters = optimizer_tensors(critic)
    assert any(float(value.abs().max()) > 0 for (_, name), value in masters.items() if name.endswith("param"))

    with pytest.raises((CheckpointError, RankFailure), match="the roles \\['policy'\\], not 'critic'"):
        load_weights(path, "critic", critic)


def test_weights_of_another_role_and_layout(tmp_path: Path) -> None:
    run_ranks(2, _weights_only, str(tmp_path))

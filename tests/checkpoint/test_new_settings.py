"""A checkpoint continued with other optimizer settings: those of now take effect, the steps taken are counted on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aligner.checkpoint.checkpointer import Checkpointer
from aligner.config.schema import OptimizerConfig
from aligner.distributed.topology import build_topology
from aligner.models.build import build_model
from aligner.models.role_model import RoleModel
from tests.checkpoint.small import ARCH, ONE, TP2, fill, start, take_step
from tests.distributed.spawn import RankError, run_ranks

BEFORE = OptimizerConfig(lr=1e-2, min_lr=1e-3, warmup_steps=2, decay_steps=10, weight_decay=0.1)
STEPS = 4


def _model(settings: OptimizerConfig, degrees: Any, horizon: int | None = None) -> RoleModel:
    topology = build_topology(degrees)
    return build_model("actor", ARCH, topology, head="lm", dtype=torch.float32, optimizer=settings, horizon=horizon)


def _save(directory: str, degrees: Any, settings: OptimizerConfig, horizon: int | None) -> None:
    start(degrees)
    model = _model(settings, degrees, horizon)
    fill(model, 1)
    for step in range(STEPS):
        take_step(model, step)
    Checkpointer(Path(directory)).save(STEPS, {"actor": model}, {}, wait=True)


def _groups_after(
    directory: str, degrees: Any, settings: OptimizerConfig, horizon: int | None, load: bool
) -> list[dict[str, Any]]:
    """Settings of the parameter groups after the load, or, as it should be, after as many steps from the start."""
    start(degrees)
    model = _model(settings, degrees, horizon)
    if load:
        checkpointer = Checkpointer(Path(directory))
        path = checkpointer.newest()
        assert path is not None
        checkpointer.load(path, {"actor": model}, {})
    else:
        fill(model, 1)
        for step in range(STEPS):
            take_step(model, step)
    take_step(model, STEPS)
    assert model.optimizer is not None
    groups = [{k: v for k, v in group.items() if k != "params"} for group in model.optimizer.param_groups]
    return json.loads(json.dumps(groups))


@pytest.mark.parametrize(("distributed", "degrees"), [(True, TP2), (False, ONE)])
def test_changed_settings_take_effect(distributed: bool, degrees: Any, tmp_path: Path) -> None:
    before = dataclasses.replace(BEFORE, use_distributed_optimizer=distributed)
    after = dataclasses.replace(
        before, lr=3e-2, min_lr=2e-3, weight_decay=0.3, adam_beta1=0.8, adam_eps=1e-6, schedule="linear", decay_steps=9
    )
    run_ranks(2, _save, str(tmp_path), degrees, before, None)
    for settings in (before, after):
        found = run_ranks(2, _groups_after, str(tmp_path), degrees, settings, None, True)
        expected = run_ranks(2, _groups_after, str(tmp_path), degrees, settings, None, False)
        assert found == expected
        assert all(group["step"] == STEPS + 1 for group in found[0])
        assert {group["eps"] for group in found[0]} == {settings.adam_eps}


def test_a_schedule_without_length_keeps_that_of_the_first_life(tmp_path: Path) -> None:
    endless = dataclasses.replace(BEFORE, decay_steps=None)
    run_ranks(1, _save, str(tmp_path), ONE, endless, 8)
    found = run_ranks(1, _groups_after, str(tmp_path), ONE, endless, 40, True)
    assert found == run_ranks(1, _groups_after, str(tmp_path), ONE, endless, 8, False)
    longer = dataclasses.replace(endless, warmup_steps=9)
    with pytest.raises(RankError, match="actor.optimizer.warmup_steps is 9, but the schedule of this run ends after 8"):
        run_ranks(1, _groups_after, str(tmp_path), ONE, longer, 40, True)


def test_a_length_that_is_taken_away_becomes_the_run_s(tmp_path: Path) -> None:
    endless = dataclasses.replace(BEFORE, decay_steps=None)
    run_ranks(1, _save, str(tmp_path), ONE, BEFORE, None)
    found = run_ranks(1, _groups_after, str(tmp_path), ONE, endless, 40, True)
    assert found == run_ranks(1, _groups_after, str(tmp_path), ONE, endless, 40, False)

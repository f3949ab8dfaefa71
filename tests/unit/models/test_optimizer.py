"""The learning-rate schedule over the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aligner.config.hf_config import read_architecture
from aligner.config.schema import OptimizerConfig
from aligner.distributed import platform
from aligner.distributed.topology import Degrees, Topology, build_topology, seed_everything
from aligner.errors import ConfigError
from aligner.models.build import build_model
from aligner.models.role_model import RoleModel
from tests.distributed.families import write_model

SETTINGS = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=2, weight_decay=0.01)


@pytest.fixture
def topology() -> Iterator[Topology]:
    platform.initialize()
    built = build_topology(Degrees())
    seed_everything(0, built)
    yield built
    platform.shutdown()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, "llama2")
    return path


def build(directory: Path, topology: Topology, settings: OptimizerConfig, horizon: int | None) -> RoleModel:
    arch = read_architecture(directory)
    return build_model("a", arch, topology, head="lm", dtype=torch.float32, optimizer=settings, horizon=horizon)


def rates(model: RoleModel, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(model.optimizer.param_groups[0]["lr"])
        model.scheduler.step(increment=1)
    return seen


def test_shapes_of_the_schedule(directory: Path, topology: Topology) -> None:
    half = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2))
    expected = {
        "cosine": [1 / 3, 2 / 3, 1.0, 0.1 + 0.45 * (1 + math.cos(math.pi / 4)), half],
        "linear": [1 / 3, 2 / 3, 1.0, 0.775, 0.55],
        "constant": [1 / 3, 2 / 3, 1.0, 1.0, 1.0],
    }
    for schedule, wanted in expected.items():
        model = build(directory, topology, replace(SETTINGS, schedule=schedule), horizon=6)
        assert rates(model, 5) == pytest.approx(wanted)
    model = build(directory, topology, replace(SETTINGS, decay_steps=6), horizon=1000)
    assert rates(model, 9)[6:] == pytest.approx([0.1, 0.1, 0.1])  # the section's length comes first; then min_lr


def test_lengths_that_do_not_fit(directory: Path, topology: Topology) -> None:
    with pytest.raises(ConfigError, match="decay_steps is not set"):
        build(directory, topology, SETTINGS, None)
    with pytest.raises(ConfigError, match="warmup_steps is 2, but the schedule ends after 2 steps; use at most 1"):
        build(directory, topology, SETTINGS, 2)


def test_frozen_role_has_neither_gradients_nor_optimizer(directory: Path, topology: Topology) -> None:
    arch = read_architecture(directory)
    model = build_model("reference", arch, topology, head="lm", dtype=torch.bfloat16)
    assert not model.trainable and model.scheduler is None
    assert not any(parameter.requires_grad for _, parameter in model.parameters())
    with pytest.raises(ValueError, match="head is 'vocab'"):
        build_model("x", arch, topology, head="vocab", dtype=torch.float32)

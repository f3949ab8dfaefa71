"""Random states of a continued run: the checkpoint's, or new ones where it has none that are wanted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aligner.algorithms.resume import renew_random_states
from aligner.checkpoint import manifest
from aligner.distributed import platform
from aligner.distributed.context import RunContext
from aligner.distributed.topology import Degrees, build_topology, seed_everything

SEED = 7


@pytest.fixture
def context(tmp_path: Path) -> Iterator[RunContext]:
    yield RunContext(tmp_path, 0, 1, platform.initialize())
    platform.shutdown()


def renewed(context: RunContext, *, seed: int = SEED, world_size: int = 1, tp: int = 1, step: int = 3) -> list[float]:
    """Random numbers after continuing a run of seed 7 that was saved at ``step`` in this layout."""
    path = context.run_dir / manifest.step_name(step)
    path.mkdir(exist_ok=True)
    roles = {"actor": manifest.RoleEntry(tp=tp, pp=1, sequence_parallel=False, optimizer=True)}
    identity = {"config": {"trainer": {"seed": SEED}}}
    manifest.write(path, manifest.Manifest(step, world_size, roles, {}, identity=identity))
    topology = build_topology(Degrees(), make_global=True)
    model: Any = SimpleNamespace(topology=topology, optimizer=object())
    seed_everything(SEED, topology)  # as at the start; the checkpoint's states would be set now
    root = SimpleNamespace(trainer=SimpleNamespace(seed=seed))
    renew_random_states(replace(context, resume_from=path), root, {"actor": model})
    return torch.rand(4).tolist()


def test_states_are_kept_or_new(context: RunContext) -> None:
    kept = renewed(context)
    torch.manual_seed(SEED)
    assert kept == torch.rand(4).tolist()
    others = [
        renewed(context, seed=8),
        renewed(context, world_size=2),
        renewed(context, tp=2, world_size=2, step=4),
        kept,
    ]
    assert len({tuple(numbers) for numbers in others}) == 4
    assert renewed(context, world_size=2) == renewed(context, tp=2, world_size=2)  # a function of seed and step

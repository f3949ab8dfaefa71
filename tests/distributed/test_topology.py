"""Degrees, process groups and rank arithmetic, on real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from aligner.config.schema import ParallelConfig
from aligner.distributed import platform
from aligner.distributed.topology import Degrees, build_topology, seed_everything
from aligner.errors import TopologyError
from tests.distributed.spawn import run_ranks


def test_degrees_that_do_not_fit_are_named() -> None:
    Degrees(tp=2, pp=2).check(8)
    with pytest.raises(TopologyError, match=r"tp 2 x pp 3 x cp 1 = 6 does not divide the world size 4.*\[1, 2, 4\]"):
        Degrees(tp=2, pp=3).check(4)
    with pytest.raises(TopologyError, match="tp = 0"):
        Degrees(tp=0).check(4)
    for unbuilt in (Degrees(cp=2), Degrees(ep=2), Degrees(etp=2), Degrees(vp=2)):
        with pytest.raises(TopologyError, match="not built yet"):
            unbuilt.check(4)


def test_degrees_from_a_section() -> None:
    section = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=3, sequence_parallel=True)
    assert Degrees.from_config(section) == Degrees(tp=2, pp=3, sequence_parallel=True)
    section.tensor_model_parallel_size = 1
    assert not Degrees.from_config(section).sequence_parallel


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def _layouts() -> None:
    """Every layout of four ranks, as the global one and beside another global one, has the same groups."""
    for degrees in (Degrees(tp=2, pp=2), Degrees(tp=2), Degrees(pp=4), Degrees(tp=4), Degrees()):
        own = _describe(degrees, make_global=False)
        reference = _describe_global(degrees)
        assert own == reference, (degrees, own, reference)


def _describe(degrees: Degrees, make_global: bool) -> dict[str, object]:
    topology = build_topology(degrees, make_global=make_global)
    assert build_topology(degrees) is topology
    rank = dist.get_rank()
    assert rank == topology.rank_of(topology.tp_rank, topology.pp_rank, topology.dp_rank)
    assert topology.dp == 4 // (degrees.tp * degrees.pp)
    assert topology.is_first_stage == (topology.first_stage_rank == rank)
    assert topology.is_last_stage == (topology.last_stage_rank == rank)
    assert {topology.first_stage_rank, topology.last_stage_rank} <= set(_ranks(topology.pg.pp))
    names = ("tp", "pp", "dp", "dp_cp", "mp", "cp", "ep", "tp_cp", "tp_dp_cp", "expt_dp", "intra_dist_opt")
    groups: dict[str, object] = {name: _ranks(getattr(topology.pg, name)) for name in names}
    for name in ("embd", "pos_embd"):  # absent in the middle of a pipeline
        group = getattr(topology.pg, name)
        groups[name] = None if group is None else _ranks(group)
    ones = torch.ones(1)
    dist.all_reduce(ones, group=topology.pg.tp)
    assert ones.item() == degrees.tp
    return groups


def _describe_global(degrees: Degrees) -> dict[str, object]:
    parallel_state.initialize_model_parallel(degrees.tp, degrees.pp, create_gloo_process_groups=False)
    try:
        from megatron.core.process_groups_config import ProcessGroupCollection

        pg = ProcessGroupCollection.use_mpu_process_groups()
        names = ("tp", "pp", "dp", "dp_cp", "mp", "cp", "ep", "tp_cp", "tp_dp_cp", "expt_dp", "embd", "pos_embd")
        found = {name: None if getattr(pg, name) is None else _ranks(getattr(pg, name)) for name in names}
        return {**found, "intra_dist_opt": list(range(4))}
    finally:
        parallel_state.destroy_model_parallel()


def _global_and_others() -> None:
    _layouts()
    actor = build_topology(Degrees(tp=2), make_global=True)
    assert parallel_state.get_tensor_model_parallel_world_size() == 2
    assert actor.pg.tp is parallel_state.get_tensor_model_parallel_group()
    assert build_topology(Degrees(tp=2)) is actor
    critic = build_topology(Degrees(pp=2))
    assert critic.pp == 2 and actor.pp == 1
    assert parallel_state.get_pipeline_model_parallel_world_size() == 1
    with pytest.raises(TopologyError, match="already Megatron's global one"):
        build_topology(Degrees(pp=2), make_global=True)
    _seeds(actor.tp_rank, actor.dp_rank)


def _seeds(tp_rank: int, dp_rank: int) -> None:
    topology = build_topology(Degrees(tp=2))
    seed_everything(5, topology)
    plain = torch.rand(1).item()
    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(1).item()
    gathered: list[tuple[int, int, float, float]] = [(0, 0, 0.0, 0.0)] * 4
    dist.all_gather_object(gathered, (tp_rank, dp_rank, plain, tracked))
    assert len({plain for _, dp, plain, _ in gathered if dp == 0}) == 1, "equal within a tensor-parallel group"
    assert len({plain for tp, _, plain, _ in gathered if tp == 0}) == 2, "different over data-parallel ranks"
    assert len({tracked for *_, tracked in gathered}) == 4
    seed_everything(5, topology)
    assert torch.rand(1).item() == plain


def test_four_ranks() -> None:
    run_ranks(4, _global_and_others)


def _once_more() -> None:
    build_topology(Degrees(), make_global=True)
    platform.shutdown()
    assert not parallel_state.is_initialized()
    assert not dist.is_initialized()


def test_shutdown_forgets_everything() -> None:
    run_ranks(1, _once_more)

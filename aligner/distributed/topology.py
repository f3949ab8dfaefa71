"""Parallel layout as a value: degrees, process groups and rank arithmetic.

Invariants:

- Ranks are laid out tensor-parallel fastest, then data, then pipeline:
  ``rank = tp_rank + tp * (dp_rank + dp * pp_rank)`` (Megatron's default order).
- Every rank holds a shard of every role, so the data-parallel degree is ``world_size / (tp * pp)``.
- Equal degrees give the same object: its groups are made once.
- Megatron's global ``parallel_state`` is set for one layout at most (the actor's). Roles with another layout pass
  their own ``pg``; nothing of this project reads the global state outside this module.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from aligner.distributed import platform
from aligner.errors import TopologyError


class ParallelSection(Protocol):
    """The degrees in a configuration section, under Megatron's names."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int
    context_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int
    sequence_parallel: bool


@dataclass(frozen=True)
class Degrees:
    """Parallel degrees of one role; data parallelism is what is left of the world size."""

    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False

    @staticmethod
    def from_config(section: ParallelSection) -> Degrees:
        """The degrees in ``section``. Sequence parallelism is off where there is no tensor parallelism to go with."""
        tp = section.tensor_model_parallel_size
        return Degrees(
            tp=tp,
            pp=section.pipeline_model_parallel_size,
            vp=section.virtual_pipeline_model_parallel_size,
            cp=section.context_parallel_size,
            ep=section.expert_model_parallel_size,
            etp=section.expert_tensor_parallel_size,
            sequence_parallel=section.sequence_parallel and tp > 1,
        )

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tp * self.pp * self.cp

    def check(self, world_size: int) -> None:
        """Raise :class:`TopologyError` unless these degrees are built and fit ``world_size`` ranks."""
        for name, value in (("tp", self.tp), ("pp", self.pp)):
            if value < 1:
                raise TopologyError(f"parallel degree {name} = {value}; it must be at least 1")
        for name, key in (
            ("vp", "virtual_pipeline_model_parallel_size"),
            ("cp", "context_parallel_size"),
            ("ep", "expert_model_parallel_size"),
            ("etp", "expert_tensor_parallel_size"),
        ):
            if getattr(self, name) != 1:
                raise TopologyError(f"{key} = {getattr(self, name)} is not built yet; set it to 1")
        if world_size % self.model_size:
            working = [n for n in range(1, world_size + 1) if world_size % n == 0]
            raise TopologyError(
                f"tp {self.tp} x pp {self.pp} x cp {self.cp} = {self.model_size} does not divide the world size "
                f"{world_size}; choose degrees whose product is one of {working}, "
                f"or start a multiple of {self.model_size} ranks"
            )


@dataclass(frozen=True, eq=False)
class Topology:
    """One layout of all ranks, and this rank's place in it.

    ``pg`` holds Megatron's process groups of this layout; pass it to model, DDP, optimizer, schedule and checkpoint.
    """

    degrees: Degrees
    world_size: int
    dp: int
    pg: ProcessGroupCollection
    tp_rank: int
    pp_rank: int
    dp_rank: int
    _communicators: dict[int, P2PCommunicator] = field(default_factory=dict, repr=False)

    @property
    def tp(self) -> int:
        return self.degrees.tp

    @property
    def pp(self) -> int:
        return self.degrees.pp

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.degrees.pp - 1

    @property
    def first_stage_rank(self) -> int:
        """Global rank of the first pipeline stage with this rank's tensor- and data-parallel rank."""
        return self.rank_of(self.tp_rank, 0, self.dp_rank)

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last pipeline stage with this rank's tensor- and data-parallel rank."""
        return self.rank_of(self.tp_rank, self.degrees.pp - 1, self.dp_rank)

    def rank_of(self, tp_rank: int, pp_rank: int, dp_rank: int) -> int:
        """The global rank at these coordinates."""
        return tp_rank + self.degrees.tp * (dp_rank + self.dp * pp_rank)

    def p2p_communicator(self, config: Any) -> P2PCommunicator:
        """The point-to-point communicator of this rank's pipeline for a model's ``config`` (made once a config)."""
        known = self._communicators.get(id(config))
        if known is None or known.config is not config:
            known = self._communicators[id(config)] = P2PCommunicator(pp_group=self.pg.pp, config=config)
        return known


_built: dict[Degrees, Topology] = {}


def build_topology(degrees: Degrees, *, make_global: bool = False) -> Topology:
    """The topology with ``degrees``: built once, then the same object. Collective over all ranks.

    Args:
        make_global: also make it Megatron's global ``parallel_state`` (one layout a process group: the actor's,
            built before other roles of equal degrees).

    Raises:
        TopologyError: the degrees do not fit the world size, or another layout is already global.
    """
    degrees.check(dist.get_world_size())
    if make_global and not parallel_state.is_initialized():
        _initialize_parallel_state(degrees)
        platform.at_shutdown(parallel_state.destroy_model_parallel)
        _built[degrees] = _describe(degrees, _global_groups())
    elif make_global and not _is_global(degrees):
        raise TopologyError(
            f"another layout is already Megatron's global one; {degrees} can only be the layout of another role"
        )
    if degrees not in _built:
        _built[degrees] = _describe(degrees, _own_groups(degrees))
    platform.at_shutdown(_built.clear)
    return _built[degrees]


def _is_global(degrees: Degrees) -> bool:
    return (
        parallel_state.get_tensor_model_parallel_world_size() == degrees.tp
        and parallel_state.get_pipeline_model_parallel_world_size() == degrees.pp
    )


def _initialize_parallel_state(degrees: Degrees) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=degrees.tp,
        pipeline_model_parallel_size=degrees.pp,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=math.ceil(platform.collective_timeout().total_seconds() / 60),
    )


def _global_groups() -> ProcessGroupCollection:
    pg = ProcessGroupCollection.use_mpu_process_groups()
    pg.intra_dist_opt = dist.group.WORLD
    return pg


def _own_groups(degrees: Degrees) -> ProcessGroupCollection:
    """Process groups of a layout that is not the global one. All ranks make all groups, in the same order."""
    generator = parallel_state.RankGenerator(
        tp=degrees.tp,
        ep=1,
        dp=dist.get_world_size() // degrees.model_size,
        pp=degrees.pp,
        cp=1,
        order="tp-cp-ep-dp-pp",
    )

    def make(lists: list[list[int]]) -> dist.ProcessGroup | None:
        own = None
        for ranks in lists:
            group = dist.new_group(ranks, timeout=platform.collective_timeout())
            if dist.get_rank() in ranks:
                own = group
        return own

    pipelines = generator.get_ranks("pp")
    tp, pp, dp = (
        make(generator.get_ranks("tp")),
        make(pipelines),
        make(generator.get_ranks("dp")),
    )
    model = make(generator.get_ranks("tp-pp"))
    alone = make([[rank] for rank in range(dist.get_world_size())])
    return ProcessGroupCollection(
        tp=tp,
        pp=pp,
        mp=model,
        embd=make([parallel_state.default_embedding_ranks(ranks) for ranks in pipelines]),
        pos_embd=make([parallel_state.default_position_embedding_ranks(ranks) for ranks in pipelines]),
        cp=alone,
        tp_cp=tp,
        hcp=None,
        ep=alone,
        expt_tp=tp,
        tp_ep=tp,
        tp_ep_pp=model,
        tp_dp_cp=make(generator.get_ranks("tp-dp")),
        dp=dp,
        dp_cp=dp,
        expt_dp=dp,
        intra_dp_cp=dp,
        intra_expt_dp=dp,
        inter_dist_opt=None,
        intra_dist_opt=dist.group.WORLD,
    )


def _describe(degrees: Degrees, pg: ProcessGroupCollection) -> Topology:
    return Topology(
        degrees=degrees,
        world_size=dist.get_world_size(),
        dp=pg.dp.size(),
        pg=pg,
        tp_rank=pg.tp.rank(),
        pp_rank=pg.pp.rank(),
        dp_rank=pg.dp.rank(),
    )


def seed_everything(seed: int, topology: Topology) -> None:
    """Seed Python, numpy, torch and Megatron's tracker of random states.

    The default generators differ between pipeline stages and data-parallel ranks (dropout), and are equal within a
    tensor-parallel group; the tracker's model-parallel state differs within it.
    """
    own = seed + 100 * topology.pp_rank + 10_000 * topology.dp_rank
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
    model_parallel_cuda_manual_seed(
        own,
        tp_rank=topology.tp_rank,
        ep_rank=0,
        etp_rank=topology.tp_rank,
        force_reset_rng=True,
    )

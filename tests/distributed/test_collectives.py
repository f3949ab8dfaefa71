"""Collectives: agreement on errors and gathering of rows, on real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from aligner.distributed import collectives, platform
from aligner.distributed.topology import Degrees, build_topology
from aligner.errors import DataError, RankFailure
from tests.distributed.spawn import run_ranks


def _cases() -> None:
    rank, world = platform.rank(), platform.world_size()
    _agreement(rank)
    _objects(rank, world)
    _rows(rank, world)


def _agreement(rank: int) -> None:
    collectives.agree(None)
    own = DataError("line 3: broken") if rank == 1 else None
    with pytest.raises(DataError if rank == 1 else RankFailure, match="line 3: broken") as caught:
        collectives.agree(own)
    assert rank == 1 or "rank 1" in str(caught.value)
    collectives.barrier()  # all are still together
    assert collectives.any_true(rank == 1)
    assert not collectives.any_true(False)


def _objects(rank: int, world: int) -> None:
    assert collectives.broadcast_object({"from": rank}, src=1) == {"from": 1}
    assert collectives.all_gather_objects("x" * (rank + 1)) == ["x" * (r + 1) for r in range(world)]
    sums = collectives.all_reduce_sums({"a": 0.5 + rank, f"only{rank}": 1.0})
    assert sums == {
        "a": 0.5 * world + sum(range(world)),
        **{f"only{r}": 1.0 for r in range(world)},
    }


def _rows(rank: int, world: int) -> None:
    expected = torch.arange(15, dtype=torch.float32).reshape(5, 3)
    expected[2, 1] = float("nan")
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        table = expected.nan_to_num(7.0).to(dtype) if dtype != torch.float32 else expected
        mine = list(range(rank, 5, world))
        got = collectives.all_gather_rows(mine, table[mine], 5)
        assert got.dtype == dtype
        assert torch.equal(got.view(torch.uint8), table.view(torch.uint8))
    none_here = collectives.all_gather_rows([0] if rank == 0 else [], torch.full((int(rank == 0),), 4.0), 1)
    assert none_here.tolist() == [4.0]
    with pytest.raises(ValueError, match="exactly once"):
        collectives.all_gather_rows([0], torch.zeros(1, 2), 2)
    with pytest.raises(ValueError, match="different shapes"):
        collectives.all_gather_rows([rank], torch.zeros(1, 2 + rank), world)
    group = build_topology(Degrees(tp=2)).pg.tp if world == 2 else dist.group.WORLD
    assert collectives.all_gather_rows([rank], torch.tensor([[rank]]), world, group).flatten().tolist() == [0, 1]


def test_collectives_on_two_ranks() -> None:
    run_ranks(2, _cases)

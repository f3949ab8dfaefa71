"""The test ranks themselves: results, tracebacks, and a quick end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.distributed.spawn import RankError, run_ranks


def _sum_of_ranks(factor: int) -> tuple[int, int]:
    total = torch.tensor([dist.get_rank() * factor])
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def _one_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the reason")
    dist.barrier()


def _one_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    time.sleep(60)


def test_results_come_in_rank_order() -> None:
    assert run_ranks(2, _sum_of_ranks, 10) == [(0, 10), (1, 10)]


@pytest.mark.parametrize(
    ("case", "message"), [(_one_fails, "the reason"), (_one_dies, "rank 1 ended with exit code 3")]
)
def test_a_failing_rank_ends_all_within_seconds(case: Callable[[], None], message: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=message):
        run_ranks(2, case)
    assert time.monotonic() - began < 30


def test_too_long_is_an_error() -> None:
    with pytest.raises(RankError, match="did not end within 3 s"):
        run_ranks(1, time.sleep, 60, timeout=3)

"""Stop requests on real ranks: a signal to one of them, the same answer on all within one poll."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist

from aligner.distributed.collectives import barrier
from aligner.distributed.stop import Stopped, StopRequest, StopSignals
from tests.distributed.spawn import run_ranks


def one_case(sent: dict[int, list[str]], asked: dict[int, list[tuple[str, bool]]]) -> tuple[object, ...]:
    """Answers of three polls: before, at once after ``sent`` and ``asked`` (by rank), and after a later SIGTERM."""
    signals = StopSignals()
    signals.install()
    try:
        before = signals.poll()
        rank = dist.get_rank()
        for name in sent.get(rank, []):
            os.kill(os.getpid(), getattr(signal, name))
        for reason, restart in asked.get(rank, []):
            signals.request(reason, restart)
        barrier()
        after = signals.poll()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        barrier()
        try:
            signals.check()
            raised = None
        except Stopped as stopped:
            raised = stopped.request
        return before, after, raised
    finally:
        signals.uninstall()


def on_a_rank() -> list[tuple[object, ...]]:
    last = dist.get_world_size() - 1
    return [
        one_case({last: ["SIGTERM"]}, {}),
        one_case({0: ["SIGUSR1"]}, {}),
        one_case({0: ["SIGUSR1"], last: ["SIGTERM"]}, {}),
        one_case({last: ["SIGINT"]}, {0: [("deadline", True)]}),
        one_case({}, {0: [("deadline", True)]}),
        one_case({0: ["SIGTERM"]}, {0: [("taken over", False)], last: [("taken over by another", False)]}),
        one_case({}, {last: [("a wish", True)]}),
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_agree_within_one_poll(world_size: int) -> None:
    expected = [
        StopRequest("SIGTERM", restart=False),
        StopRequest("SIGUSR1", restart=True),
        StopRequest("SIGTERM", restart=False),
        StopRequest("SIGINT", restart=False),
        StopRequest("deadline", restart=True),
        StopRequest("taken over", restart=False),
        StopRequest("a wish", restart=True),
    ]
    for result in run_ranks(world_size, on_a_rank, timeout=120):
        assert result == [(None, request, request) for request in expected]

"""The order of samples: a function of (seed, epoch, position) and nothing else."""

from __future__ import annotations

import time

import numpy as np
import pytest

from aligner.data.loader import ShardedOrder, epoch_order, rows_of_rank
from aligner.errors import DataError


def stream(order: ShardedOrder, batches: int) -> list[int]:
    return [index for _ in range(batches) for index in order.next_batch()]


@pytest.mark.parametrize("num_samples", [1, 2, 3, 7, 64, 1000])
def test_every_epoch_is_a_permutation(num_samples: int) -> None:
    for seed in (0, 1234, -5, 2**63):
        for epoch in range(3):
            assert sorted(epoch_order(num_samples, seed, epoch).tolist()) == list(range(num_samples))


def test_seeds_and_epochs_differ_and_versions_do_not() -> None:
    orders = [tuple(epoch_order(50, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == 25
    # From a separate implementation with Python integers. A change of these numbers breaks the resumption of every run.
    assert epoch_order(10, 1234, 0).tolist() == [3, 4, 6, 0, 1, 5, 8, 9, 2, 7]
    assert epoch_order(10, 1234, 1).tolist() == [2, 0, 8, 4, 3, 9, 5, 6, 7, 1]


def test_positions_are_uniform() -> None:
    """Each of 8 samples stands at each position about 4000 / 8 times (5 standard deviations are 105)."""
    counts = np.zeros((8, 8), dtype=int)
    for epoch in range(4000):
        counts[np.arange(8), epoch_order(8, 7, epoch)] += 1
    assert abs(counts - 500).max() < 105


def test_the_stream_does_not_depend_on_the_batch_size() -> None:
    expected = stream(ShardedOrder(7, 1, 3), 60)
    assert expected[:21] == [i for epoch in range(3) for i in epoch_order(7, 3, epoch).tolist()]
    for size in (2, 3, 5, 6, 10, 20):  # batches end inside epochs, and span up to four of them
        assert stream(ShardedOrder(7, size, 3), 60 // size) == expected


@pytest.mark.parametrize(("num_samples", "size"), [(10, 4), (10, 5), (3, 8), (1, 2)])
def test_resume_at_every_step(num_samples: int, size: int) -> None:
    straight = ShardedOrder(num_samples, size, 11)
    batches = [straight.next_batch() for _ in range(12)]
    for step in range(12):
        first = ShardedOrder(num_samples, size, 11)
        for _ in range(step):
            first.next_batch()
        resumed = ShardedOrder(num_samples, size, 11)
        resumed.load_state_dict(first.state_dict())
        assert resumed.cursor == step * size and resumed.epoch == pytest.approx(step * size / num_samples)
        assert [resumed.next_batch() for _ in range(12 - step)] == batches[step:]


@pytest.mark.parametrize("other", [(11, 1, "a"), (10, 2, "a"), (10, 1, "b")])
def test_another_order_is_read_from_its_beginning(other: tuple[int, int, str]) -> None:
    before = ShardedOrder(10, 4, 1, "a")
    for _ in range(3):
        before.next_batch()
    num_samples, seed, fingerprint = other
    now = ShardedOrder(num_samples, 4, seed, fingerprint)
    now.load_state_dict(before.state_dict())
    assert (now.cursor, now.origin, now.epoch) == (12, 12, 0.0)  # samples are counted on
    fresh = ShardedOrder(num_samples, 4, seed, fingerprint)
    assert [now.next_batch() for _ in range(5)] == [fresh.next_batch() for _ in range(5)]
    resumed = ShardedOrder(num_samples, 4, seed, fingerprint)  # and once more, inside the new order
    resumed.load_state_dict(now.state_dict())
    assert (resumed.cursor, resumed.origin) == (32, 12)
    assert resumed.next_batch() == fresh.next_batch()


def test_another_batch_size_goes_on_where_the_old_one_ended() -> None:
    expected = stream(ShardedOrder(10, 1, 1), 40)
    order = ShardedOrder(10, 4, 1)
    seen = stream(order, 3)
    larger = ShardedOrder(10, 7, 1)
    larger.load_state_dict(order.state_dict())
    assert seen + stream(larger, 4) == expected


def test_ranks_share_the_rows_of_a_batch() -> None:
    indices = ShardedOrder(100, 10, 1).next_batch()
    for dp in (1, 2, 3, 4):
        rows = [rows_of_rank(indices, rank, dp) for rank in range(dp)]
        assert sorted(row for part in rows for row in part) == list(range(10))
        assert all(row % dp == rank for rank, part in enumerate(rows) for row in part)


def test_empty_and_impossible() -> None:
    with pytest.raises(DataError, match="empty data set"):
        ShardedOrder(0, 1, 1)
    with pytest.raises(DataError, match="global batch size is 0"):
        ShardedOrder(1, 0, 1)


def test_ten_million_rows() -> None:
    order = ShardedOrder(10_000_000, 512, 1)
    order.next_batch()  # computes the epoch's permutation
    start = time.process_time()
    for _ in range(100):
        order.next_batch()
    assert time.process_time() - start < 1.0  # 10 ms a batch; measured 0.03 ms

"""Metric sums and timers: splitting work over parts never changes a mean, and no second is counted twice."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from aligner.monitoring import metrics as names
from aligner.monitoring.metrics import MetricSums, timer_metrics
from aligner.monitoring.timers import PhaseTimers, peak_memory_gib, slowest


def test_metric_names_are_unique() -> None:
    constants = [value for key, value in vars(names).items() if key.isupper() and isinstance(value, str)]
    assert len(constants) == len(set(constants)) > 40


def test_parts_added_equal_the_whole() -> None:
    values = torch.tensor([[3.0, -1.0, 99.0], [0.5, 4.0, 2.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    sums = MetricSums()
    for row in range(2):
        sums.add_values("advantage", values[row], mask[row])
        sums.add("loss", total=2.0 * (row + 1), count=4)
    kept = [3.0, -1.0, 0.5, 4.0, 2.0]
    assert sums.mean("advantage") == pytest.approx(statistics.fmean(kept))
    assert sums.std("advantage") == pytest.approx(statistics.pstdev(kept))
    assert (sums.low("advantage"), sums.high("advantage")) == (-1.0, 4.0)
    assert sums.mean("loss") == pytest.approx(6.0 / 8.0)
    assert set(sums.means()) == {"advantage", "loss"}


def test_a_part_without_rows_changes_nothing_and_nothing_counted_is_nan() -> None:
    sums, empty = MetricSums(), MetricSums()
    for some in (sums, empty):
        some.add_values("reward", torch.zeros(0))
    sums.add_values("reward", [1.0, 3.0], [True, True])
    assert (sums.mean("reward"), sums.low("reward"), sums.high("reward")) == (2.0, 1.0, 3.0)
    assert all(math.isnan(of("reward")) for of in (empty.mean, empty.std, empty.low, empty.high))


def test_timers_are_exclusive_and_add_up() -> None:
    now = [0.0]
    entered: list[str] = []
    timers = PhaseTimers(on_enter=entered.append, clock=lambda: now[0])
    now[0] = 5.0  # outside every phase
    with timers("rollout"):
        now[0] += 2.0
        with timers("score"):
            now[0] += 3.0
        now[0] += 1.0
    with pytest.raises(RuntimeError), timers("score"):
        now[0] += 0.5
        raise RuntimeError
    assert timers.take() == {"rollout": 3.0, "score": 3.5}
    assert timers.take() == {}
    assert entered == ["rollout", "score", "score"]


def test_take_inside_a_phase_splits_it() -> None:
    now = [0.0]
    timers = PhaseTimers(clock=lambda: now[0])
    with timers("train"):
        now[0] = 1.0
        assert timers.take() == {"train": 1.0}
        now[0] = 3.0
    assert timers.take() == {"train": 2.0}


def test_the_device_is_waited_for_where_a_phase_begins_and_where_its_block_is_through() -> None:
    now = [0.0]
    queued = [0.0]  # seconds of work that the device still has to do

    def synchronize() -> None:
        now[0] += queued[0]
        queued[0] = 0.0

    timers = PhaseTimers(clock=lambda: now[0], synchronize=synchronize)
    queued[0] = 9.0  # asked for outside every phase
    with timers("train"):
        now[0], queued[0] = now[0] + 1.0, 4.0
        with timers("score"):
            now[0], queued[0] = now[0] + 2.0, 5.0
    assert timers.take() == {"train": 5.0, "score": 7.0}


def test_slowest_rank_and_names() -> None:
    assert slowest([{"a": 1.0, "b": 5.0}, {"a": 2.0, "c": 1.0}]) == {"a": 2.0, "b": 5.0, "c": 1.0}
    assert timer_metrics({"a": 2.0}) == {"timers/a": 2.0}


def test_peak_memory_is_that_of_a_python_process_with_torch() -> None:
    assert 0.02 < peak_memory_gib() < 200

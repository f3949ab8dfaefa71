"""Score statistics: by hand, their way through a checkpoint, and what they refuse."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aligner.errors import CheckpointError, DataError
from aligner.rewards.standardize import ScoreStatistics


def test_by_hand() -> None:
    # 1, 2, 3, 6: mean 3, variance (4 + 1 + 0 + 9) / 4 = 3.5
    statistics = ScoreStatistics.of(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    assert statistics == ScoreStatistics(3.0, pytest.approx(math.sqrt(3.5)), 4)
    # (4.5 - 3) / sqrt(3.5) = 0.801784
    assert statistics.apply(torch.tensor([3.0, 4.5])).tolist() == [0.0, pytest.approx(0.801784, abs=1e-6)]


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=30))
def test_standardised_scores_have_mean_zero_and_deviation_one(values: list[float]) -> None:
    scores = torch.tensor(values, dtype=torch.float64)
    if scores.std(unbiased=False) < 1e-3:
        return
    standardised = ScoreStatistics.of(scores).apply(scores)
    assert standardised.mean().item() == pytest.approx(0, abs=1e-6)
    assert standardised.std(unbiased=False).item() == pytest.approx(1, abs=1e-6)


def test_the_default_changes_nothing() -> None:
    scores = torch.tensor([0.5, -2.0])
    assert torch.equal(ScoreStatistics().apply(scores), scores)


def test_round_trip_through_json() -> None:
    statistics = ScoreStatistics.of(torch.tensor([0.1, 0.7, -3.3]))
    assert ScoreStatistics.from_dict(json.loads(json.dumps(statistics.to_dict()))) == statistics


@pytest.mark.parametrize("values", [[], [1.0], [0.1, 0.1, 0.1], [1.0, math.nan], [1.0, math.inf]])
def test_unusable_scores(values: list[float]) -> None:
    with pytest.raises(DataError, match="cannot standardise"):
        ScoreStatistics.of(torch.tensor(values))


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"mean": 0.0, "std": "wide", "count": 3},
        {"mean": 0.0, "std": 0.0, "count": 3},
        {"mean": math.nan, "std": 1.0, "count": 3},
    ],
)
def test_unusable_statistics_in_a_checkpoint(content: dict) -> None:
    with pytest.raises(CheckpointError, match=r"reward\.standardize=false"):
        ScoreStatistics.from_dict(content)

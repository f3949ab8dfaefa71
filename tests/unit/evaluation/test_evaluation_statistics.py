"""Statistics: known values, exact repetition, and intervals that cover as often as they claim."""

from __future__ import annotations

import numpy as np
import pytest

from aligner.evaluation.statistics import bootstrap_mean, paired_difference, wilson_interval, win_rate


def test_bootstrap_agrees_with_the_normal_interval_on_many_values() -> None:
    values = np.random.default_rng(7).normal(3.0, 2.0, size=800)
    estimate = bootstrap_mean(values.tolist(), samples=4000, seed=1)
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert estimate.value == pytest.approx(values.mean())
    assert estimate.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert estimate.high == pytest.approx(values.mean() + half, abs=0.1 * half)
    assert estimate.count == 800 and estimate.interval == [estimate.low, estimate.high]


def test_bootstrap_repeats_with_its_seed_and_narrows_with_less_confidence() -> None:
    values = [0.1, 0.4, 0.35, 0.9, 0.2, 0.7]
    assert bootstrap_mean(values, seed=3) == bootstrap_mean(values, seed=3)
    assert bootstrap_mean(values, seed=3) != bootstrap_mean(values, seed=4)
    wide, narrow = bootstrap_mean(values, confidence=0.99), bootstrap_mean(values, confidence=0.5)
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high


def test_bootstrap_in_chunks_uses_every_resample(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [float(value) for value in range(10)]
    whole = bootstrap_mean(values, samples=501)
    monkeypatch.setattr("aligner.evaluation.statistics._CHUNK", 70)
    assert bootstrap_mean(values, samples=501) == whole


def test_bootstrap_of_equal_values_is_a_point() -> None:
    assert bootstrap_mean([0.25] * 9).interval == [0.25, 0.25]
    assert bootstrap_mean([0.25]).interval == [0.25, 0.25]


def test_paired_difference_cancels_what_prompts_have_in_common() -> None:
    theirs = np.random.default_rng(0).normal(0.0, 10.0, size=64)
    estimate = paired_difference((theirs + 0.5).tolist(), theirs.tolist())
    assert estimate.value == pytest.approx(0.5)
    assert estimate.high - estimate.low < 1e-9


def test_wilson_matches_published_values() -> None:
    assert wilson_interval(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998, table I
    assert wilson_interval(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)  # Newcombe 1998, table I
    assert wilson_interval(1.0, 20) == pytest.approx((0.8389, 1.0), abs=1e-4)


def test_win_rate_counts_ties_half() -> None:
    estimate = win_rate([1.0, 1.0, 0.5, 0.0])
    assert estimate.value == 0.625 and estimate.count == 4
    assert (estimate.low, estimate.high) == wilson_interval(0.625, 4)


def test_win_rate_interval_covers_as_often_as_it_claims() -> None:
    generator = np.random.default_rng(5)
    covered = 0
    for _ in range(1000):
        draws = generator.choice([1.0, 0.5, 0.0], size=64, p=[0.5, 0.2, 0.3])
        estimate = win_rate(draws.tolist())
        covered += estimate.low <= 0.6 <= estimate.high
    assert covered >= 940


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bootstrap_mean([]), "at least one value"),
        (lambda: bootstrap_mean([1.0, float("nan")]), "must be finite, found nan"),
        (lambda: bootstrap_mean([1.0], confidence=95), "between 0 and 1, not 95"),
        (lambda: bootstrap_mean([1.0], samples=0), "at least 1, not 0"),
        (lambda: paired_difference([1.0], [1.0, 2.0]), "found 1 and 2"),
        (lambda: win_rate([1.5]), r"lie in \[0, 1\]"),
    ],
)
def test_impossible_input_is_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()

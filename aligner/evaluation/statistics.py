"""Estimates with intervals. Pure functions of numbers; random ones are seeded and repeat exactly.

* Means and paired differences: percentile bootstrap (Efron 1979). One value is one independent unit: several samples
  of one prompt are averaged by the caller first. With a single value the interval is that value.
* Win rates and other shares: Wilson's score interval (1927), which stays sensible at 0 and 1 where the bootstrap
  collapses. Ties count half; treating them as half a win and half a loss makes the interval slightly too wide
  (conservative), never too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_CHUNK = 1_000_000  # resampled values held at once


@dataclass(frozen=True)
class Estimate:
    """A value, its interval ``[low, high]`` and the number of independent units behind it."""

    value: float
    low: float
    high: float
    count: int

    @property
    def interval(self) -> list[float]:
        """``[low, high]``, as results files hold it."""
        return [self.low, self.high]


def bootstrap_mean(
    values: Sequence[float], *, samples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> Estimate:
    """Mean of ``values`` with its percentile bootstrap interval from ``samples`` resamples.

    Raises ``ValueError`` for no values, non-finite values, ``samples`` < 1 or ``confidence`` outside (0, 1).
    """
    data = np.asarray(values, dtype=np.float64)
    _check(data, confidence)
    if samples < 1:
        raise ValueError(f"bootstrap samples must be at least 1, not {samples}")
    generator = np.random.default_rng(seed)
    rows = max(1, _CHUNK // len(data))
    means = np.concatenate(
        [
            data[generator.integers(0, len(data), size=(min(rows, samples - start), len(data)))].mean(axis=1)
            for start in range(0, samples, rows)
        ]
    )
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return Estimate(float(data.mean()), float(low), float(high), len(data))


def paired_difference(
    ours: Sequence[float], theirs: Sequence[float], *, samples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> Estimate:
    """Mean of ``ours[i] - theirs[i]`` with its interval; pairs are resampled together, so what a prompt adds to both
    sides cancels. Raises ``ValueError`` for unequal lengths and as :func:`bootstrap_mean` does."""
    if len(ours) != len(theirs):
        raise ValueError(f"paired values need equal lengths, found {len(ours)} and {len(theirs)}")
    difference = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    return bootstrap_mean(difference.tolist(), samples=samples, confidence=confidence, seed=seed)


def win_rate(preferences: Sequence[float], *, confidence: float = 0.95) -> Estimate:
    """Mean preference with Wilson's interval. A preference is 1 (win), 0.5 (tie), 0 (loss), or a value between when
    several judgements of one prompt were averaged. Raises ``ValueError`` for none or for values outside [0, 1]."""
    data = np.asarray(preferences, dtype=np.float64)
    _check(data, confidence)
    if data.min() < 0.0 or data.max() > 1.0:
        raise ValueError(f"preferences lie in [0, 1], found {data.min():g} to {data.max():g}")
    low, high = wilson_interval(float(data.mean()), len(data), confidence)
    return Estimate(float(data.mean()), low, high, len(data))


def wilson_interval(share: float, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a ``share`` observed on ``count`` units, without continuity correction."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2.0)
    denominator = 1.0 + z * z / count
    centre = (share + z * z / (2.0 * count)) / denominator
    half = z * math.sqrt(share * (1.0 - share) / count + z * z / (4.0 * count * count)) / denominator
    low = 0.0 if share == 0.0 else max(0.0, centre - half)
    high = 1.0 if share == 1.0 else min(1.0, centre + half)
    return low, high


def _check(data: np.ndarray, confidence: float) -> None:
    if data.ndim != 1 or len(data) == 0:
        raise ValueError("at least one value is needed")
    if not np.isfinite(data).all():
        raise ValueError(f"values must be finite, found {data[~np.isfinite(data)][0]}")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must lie between 0 and 1, not {confidence}")

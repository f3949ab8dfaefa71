"""Standardisation of reward-model scores: ``(score - mean) / std`` with statistics of held-out data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from aligner.errors import CheckpointError, DataError


@dataclass(frozen=True)
class ScoreStatistics:
    """Mean and (population) standard deviation of ``count`` scores. The default leaves scores as they are."""

    mean: float = 0.0
    std: float = 1.0
    count: int = 0

    @classmethod
    def of(cls, scores: torch.Tensor) -> ScoreStatistics:
        """Statistics of scores of any shape. DataError: fewer than two, not finite, or all equal."""
        scores = scores.detach().double().flatten()
        count = scores.numel()
        mean, std = (float(scores.mean()), float(scores.std(unbiased=False))) if count else (0.0, 0.0)
        if count < 2 or not math.isfinite(mean) or bool((scores == scores[0]).all()):
            raise DataError(
                f"{count} held-out scores with mean {mean} and standard deviation {std} cannot standardise rewards; "
                "at least two finite, different scores are needed: give more held-out pairs or train longer"
            )
        return cls(mean, std, count)

    def apply(self, scores: torch.Tensor) -> torch.Tensor:
        """``(scores - mean) / std``, same shape and dtype."""
        return (scores - self.mean) / self.std

    def to_dict(self) -> dict[str, Any]:
        """What goes into a checkpoint (JSON)."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ScoreStatistics:
        """The reverse of :meth:`to_dict`. CheckpointError: a field is missing or unusable."""
        try:
            statistics = cls(float(content["mean"]), float(content["std"]), int(content["count"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"reward statistics {dict(content)} are not usable ({type(error).__name__}: {error}); "
                "mean, std and count are needed: train the reward model again, or set reward.standardize=false"
            ) from error
        if not (math.isfinite(statistics.mean) and math.isfinite(statistics.std) and statistics.std > 0):
            raise CheckpointError(
                f"reward statistics have mean {statistics.mean} and standard deviation {statistics.std}; both must be "
                "finite and the latter above 0: train the reward model again, or set reward.standardize=false"
            )
        return statistics

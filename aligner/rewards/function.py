"""The plug point ``reward.function: path/to/file.py:name``: a user's Python function as the reward.

The signature is in ``aligner/rewards/protocol.py``. The function runs once, on the first rank; the other ranks receive
its scores, so it may be slow, use the network or be random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from aligner.data.plugin import load_function
from aligner.distributed.collectives import agree, broadcast_object
from aligner.distributed.platform import rank
from aligner.errors import AlignerError, DataError
from aligner.rewards.protocol import RewardOutput, RewardRequest


class FunctionReward:
    """Scores with ``path/to/file.py:name``, which is loaded (and any error in it found) at construction."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.function: Callable[[Sequence[RewardRequest]], Any] = load_function(spec, "reward.function", ["requests"])

    def score(self, requests: Sequence[RewardRequest]) -> RewardOutput:
        """Collective. DataError: the function raised, or returned anything but one finite number for each request."""
        scores: list[float] = []
        error: Exception | None = None
        if rank() == 0:
            try:
                scores = self._call(requests)
            except AlignerError as raised:
                error = raised
        agree(error)
        return RewardOutput(torch.tensor(broadcast_object(scores), dtype=torch.float32))

    def _call(self, requests: Sequence[RewardRequest]) -> list[float]:
        try:
            result = self.function(tuple(requests))
        except Exception as error:
            raise DataError(
                f"reward.function {self.spec} raised {type(error).__name__}: {error}; "
                "it must return one finite number for each request"
            ) from error
        return check_scores(self.spec, result, len(requests))


def check_scores(spec: str, result: Any, expected: int) -> list[float]:
    """``result`` as a list of ``expected`` floats. DataError says what was returned instead."""
    must = f"it must return a sequence of {expected} finite numbers, one for each request"
    if isinstance(result, torch.Tensor) or hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, Sequence) or isinstance(result, str):
        raise DataError(f"reward.function {spec} returned a {type(result).__name__}; {must}")
    if len(result) != expected:
        raise DataError(f"reward.function {spec} returned {len(result)} scores for {expected} requests; {must}")
    scores = []
    for i, value in enumerate(result):
        try:
            score = float(value)
        except (TypeError, ValueError):
            score = math.nan
        if isinstance(value, str) or not math.isfinite(score):
            raise DataError(f"reward.function {spec} returned {value!r} for request {i}; {must}")
        scores.append(score)
    return scores

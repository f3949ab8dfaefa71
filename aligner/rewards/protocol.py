"""What a reward is: something that scores whole responses.

A user's own reward (``reward.function: path/to/file.py:name``) is a function

    def name(requests: Sequence[RewardRequest]) -> Sequence[float]

that returns one finite number for each request, in order. It needs no import from this package: it reads the
attributes of :class:`RewardRequest`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class RewardRequest:
    """One response to score.

    messages: the conversation before the response, ``{"role": ..., "content": ...}`` each. response: its text without
    end-of-turn tokens. finish_reason: ``stop`` (ended by itself), ``length`` (cut off) or ``abort``. num_tokens:
    response tokens in the policy's vocabulary, the ending one included. token_ids: prompt and response in the policy's
    vocabulary. metadata: the prompt's, as it stands in the data file.
    """

    messages: tuple[Mapping[str, Any], ...]
    response: str
    finish_reason: str
    num_tokens: int
    token_ids: tuple[int, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardOutput:
    """scores_B: float32 [B]. metrics: named parts of the score, float32 [B] each, for reports."""

    scores_B: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


class Reward(Protocol):
    """Scores responses. Every rank calls ``score`` with the same requests and gets the same output."""

    def score(self, requests: Sequence[RewardRequest]) -> RewardOutput: ...

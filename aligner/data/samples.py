"""What data sets hand out: token ids of one sample, where it came from, and the rest of its row.

``source`` is ``file:line``. ``metadata`` holds the fields of the row that were not turned into tokens (domain,
language, reference answers, ...), so that rewards, metrics and reports can use them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

Message = dict[str, Any]  # {"role": "system" | "user" | "assistant" | "tool", "content": str}


@dataclass(frozen=True)
class TextSample:
    """A training text. token_ids: int64 [T]; loss_mask: bool [T], True on tokens the assistant wrote."""

    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    source: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PreferenceSample:
    """A preferred and a refused answer, prompt included. chosen_ids: int64 [T_c]; rejected_ids: int64 [T_r].

    The first ``prompt_length`` tokens are the same in both. Each side ends with the end-of-turn token, as a finished
    sampled response does, unless its row says that it was cut off.
    """

    chosen_ids: torch.Tensor
    rejected_ids: torch.Tensor
    prompt_length: int
    source: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptSample:
    """A prompt to answer. prompt_ids: int64 [T], ready for the first sampled token; ``messages`` behind them."""

    prompt_ids: torch.Tensor
    messages: tuple[Message, ...]
    source: str
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Content of the last message: what is asked."""
        return str(self.messages[-1]["content"])

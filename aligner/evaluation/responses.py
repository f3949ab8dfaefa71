"""What evaluation knows about one response."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.generation.engine import FINISH_STOP


@dataclass(frozen=True)
class EvaluatedResponse:
    """One response of one checkpoint with everything measured on it; ``None``: not measured.

    ``prompt_index`` tells prompts apart (samples of one prompt share it): two conversations may end with the same
    question. ``prompt`` (the last message) and ``response`` are texts. ``num_tokens`` counts sampled tokens, the
    end-of-sequence token included. ``finish_reason`` is one of ``aligner.generation.engine``. ``reward`` is the reward
    model's score, ``rule_score`` the rule's. ``kl`` is the response's estimate of KL from the reference checkpoint in
    nats: the sum over its tokens of log p - log p_reference (k1), on tokens that the checkpoint itself sampled.
    """

    prompt_index: int
    prompt: str
    response: str
    num_tokens: int
    finish_reason: str
    reward: float | None = None
    rule_score: float | None = None
    kl: float | None = None

    @property
    def ended(self) -> bool:
        """Whether the response ended by itself (a stop id or stop string), not at the token limit."""
        return self.finish_reason == FINISH_STOP

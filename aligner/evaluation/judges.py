"""Judges: which of two responses to a prompt is better.

A judge returns the preference for response A: 1 (A is better), 0.5 (a tie), 0 (B is better), or a value between. A
judge may favour a position; :func:`judge_both_ways` asks with the positions swapped too and averages, so that such a
judge gives ties instead of wins to whoever stands first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from aligner.errors import DataError
from aligner.evaluation.responses import EvaluatedResponse


class Judge(Protocol):
    """See the module docstring."""

    def __call__(self, prompt: str, response_a: EvaluatedResponse, response_b: EvaluatedResponse) -> float: ...


class ScoreJudge:
    """Prefers the response with the higher score; scores within ``tie_margin`` are a tie.

    ``score`` maps a response to a number, e.g. a rule of ``aligner.rewards.rules``.
    """

    def __init__(self, score: Callable[[EvaluatedResponse], float], tie_margin: float = 0.0):
        self._score = score
        self._tie_margin = tie_margin

    def __call__(self, prompt: str, response_a: EvaluatedResponse, response_b: EvaluatedResponse) -> float:
        difference = self._score(response_a) - self._score(response_b)
        if math.isnan(difference):
            raise DataError(f"prompt {prompt[:60]!r}: a score is not a number; no preference can be formed")
        if abs(difference) <= self._tie_margin:
            return 0.5
        return 1.0 if difference > 0 else 0.0


def rule_judge(tie_margin: float = 0.0) -> Judge:
    """Judges by ``rule_score``."""
    return ScoreJudge(_measured("rule_score"), tie_margin)


def reward_model_judge(tie_margin: float = 0.0) -> Judge:
    """Judges by ``reward``, the reward model's score. Equal texts are equal scores only up to the rounding of the
    batch they were scored in; a small ``tie_margin`` makes those ties."""
    return ScoreJudge(_measured("reward"), tie_margin)


def judge_both_ways(judge: Judge, prompt: str, response_a: EvaluatedResponse, response_b: EvaluatedResponse) -> float:
    """Preference for A, averaged over both positions. Equal response texts are a tie without asking."""
    if response_a.response == response_b.response and response_a.finish_reason == response_b.finish_reason:
        return 0.5
    first, second = judge(prompt, response_a, response_b), judge(prompt, response_b, response_a)
    for preference in (first, second):
        if not 0.0 <= preference <= 1.0:
            raise DataError(f"prompt {prompt[:60]!r}: a judge returned {preference}; a preference lies in [0, 1]")
    return (first + 1.0 - second) / 2.0


def _measured(name: str) -> Callable[[EvaluatedResponse], float]:
    """Reads score ``name`` of a response; it must have been measured."""

    def score(response: EvaluatedResponse) -> float:
        value = getattr(response, name)
        if value is None:
            raise DataError(f"prompt {response.prompt[:60]!r}: the response has no {name}; score it before judging")
        return float(value)

    return score

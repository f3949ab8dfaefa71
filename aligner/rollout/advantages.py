"""KL estimators, token rewards, truncation rules, GAE and whitening. Pure functions on token-aligned tensors.

Shapes: B rows, T padded width; index t belongs to token t and was predicted from position t-1, so ``values_BT[:, t]``
is the value of the state in which token t is chosen. Masks select; what they do not select is never read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from aligner.rollout.batch import RolloutBatch

TRUNCATION_BOOTSTRAP = "bootstrap"
TRUNCATION_PENALIZE = "penalize"
TRUNCATION_MASK = "mask"
TRUNCATION_RULES = (TRUNCATION_BOOTSTRAP, TRUNCATION_PENALIZE, TRUNCATION_MASK)


def kl_k1(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """log p - log q of tokens sampled from p: unbiased for KL(p || q), may be negative. Same shape as the inputs.

    "k1" of Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html.
    """
    return logprobs - other_logprobs


def kl_k3(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """(r - 1) - log r with r = q/p, of tokens sampled from p: unbiased for KL(p || q), never negative.

    "k3" of Schulman, "Approximating KL Divergence" (2020).
    """
    log_ratio = other_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio


def last_token_one_hot(lengths_B: torch.Tensor, width: int) -> torch.Tensor:
    """bool [B, T]: True on the last real token of each row."""
    return torch.arange(width) == (lengths_B[:, None] - 1)


def token_rewards(
    policy_logprobs_BT: torch.Tensor,
    reference_logprobs_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    lengths_B: torch.Tensor,
    scores_B: torch.Tensor,
    kl_coef: float,
) -> torch.Tensor:
    """Rewards [B, T]: ``-kl_coef * (log policy - log reference)`` on the policy's own tokens, plus the row's score on
    its last real token (Ziegler et al. 2019, arXiv:1909.08593, eq. 2, a token at a time)."""
    kl_BT = kl_k1(policy_logprobs_BT, reference_logprobs_BT)
    rewards_BT = torch.where(loss_mask_BT, -kl_coef * kl_BT, torch.zeros_like(kl_BT))
    return rewards_BT + last_token_one_hot(lengths_B, rewards_BT.shape[1]) * scores_B[:, None]


@dataclass(frozen=True)
class TruncationEffect:
    """What a truncation rule changes: the scores that are given [B], the values that stand for the rest of a cut
    response [B] (0: nothing follows), and the tokens that are trained on [B, T]."""

    scores_B: torch.Tensor
    bootstrap_values_B: torch.Tensor
    train_mask_BT: torch.Tensor


def apply_truncation(
    rule: str,
    scores_B: torch.Tensor,
    truncated_B: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    bootstrap_values_B: torch.Tensor | None,
    penalty: float,
) -> TruncationEffect:
    """Treat responses that were cut off (``truncated_B``) by ``rule``:

    * ``bootstrap``: the episode did not end, so its score is not given; the critic's value after the last token
      (``bootstrap_values_B``, required if a row is truncated) stands for what would have followed. Giving both would
      count the score twice and reward being cut off;
    * ``penalize``: the response ends there, and its score is lowered by ``penalty``;
    * ``mask``: the row is not trained on.
    """
    nothing_B = torch.zeros_like(scores_B)
    if rule == TRUNCATION_BOOTSTRAP:
        if bootstrap_values_B is None:
            if truncated_B.any():
                raise ValueError("truncated rows are bootstrapped, but bootstrap_values_B is None")
            bootstrap_values_B = nothing_B
        return TruncationEffect(
            scores_B=torch.where(truncated_B, nothing_B, scores_B),
            bootstrap_values_B=torch.where(truncated_B, bootstrap_values_B, nothing_B),
            train_mask_BT=loss_mask_BT,
        )
    if rule == TRUNCATION_PENALIZE:
        return TruncationEffect(scores_B - penalty * truncated_B, nothing_B, loss_mask_BT)
    if rule == TRUNCATION_MASK:
        return TruncationEffect(scores_B, nothing_B, loss_mask_BT & ~truncated_B[:, None])
    raise ValueError(f"truncation rule {rule!r} is not among {TRUNCATION_RULES}")


def generalized_advantages(
    token_rewards_BT: torch.Tensor,
    values_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    discount: float,
    gae_lambda: float,
    bootstrap_values_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE (Schulman et al. 2016, arXiv:1506.02438, eq. 16): (advantages, returns), both [B, T], 0 outside the mask.

    A step is a token the policy wrote; tokens between two steps (tool output, other turns) are the environment's
    answer to the first of them. So a reward on such a token belongs to the step before it, and the next state's value
    is the one at the next step:

        delta_k = (rewards from step k up to step k+1) + discount * V_{k+1} - V_k
        A_k     = delta_k + discount * lambda * A_{k+1},    return_k = A_k + V_k

    After the last step V is ``bootstrap_values_B`` (None: 0). Rewards before the first step are not used.
    """
    advantages_BT = torch.zeros_like(values_BT)
    next_value_B = torch.zeros_like(values_BT[:, 0]) if bootstrap_values_B is None else bootstrap_values_B
    next_advantage_B = torch.zeros_like(next_value_B)
    reward_B = torch.zeros_like(next_value_B)
    for t in range(values_BT.shape[1] - 1, -1, -1):
        step_B = loss_mask_BT[:, t]
        reward_B = reward_B + token_rewards_BT[:, t]
        delta_B = reward_B + discount * next_value_B - values_BT[:, t]
        advantage_B = delta_B + discount * gae_lambda * next_advantage_B
        advantages_BT[:, t] = torch.where(step_B, advantage_B, advantages_BT[:, t])
        next_advantage_B = torch.where(step_B, advantage_B, next_advantage_B)
        next_value_B = torch.where(step_B, values_BT[:, t], next_value_B)
        reward_B = torch.where(step_B, torch.zeros_like(reward_B), reward_B)
    returns_BT = torch.where(loss_mask_BT, advantages_BT + values_BT, torch.zeros_like(values_BT))
    return advantages_BT, returns_BT


def moment_sums(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> dict[str, float]:
    """``count``, ``sum`` and ``sum_of_squares`` of the masked values, in float64. Sums of parts of a batch add up."""
    selected = values_BT[mask_BT].double()
    return {
        "count": float(selected.numel()),
        "sum": float(selected.sum()),
        "sum_of_squares": float(selected.square().sum()),
    }


@dataclass(frozen=True)
class Moments:
    """Mean and (population) standard deviation of a global batch."""

    mean: float
    std: float

    @classmethod
    def from_sums(cls, sums: Mapping[str, float]) -> Moments:
        """From (reduced) :func:`moment_sums`. Nothing counted: mean 0, standard deviation 0."""
        if sums["count"] == 0:
            return cls(0.0, 0.0)
        mean = sums["sum"] / sums["count"]
        return cls(mean, math.sqrt(max(sums["sum_of_squares"] / sums["count"] - mean * mean, 0.0)))


def whiten(values_BT: torch.Tensor, mask_BT: torch.Tensor, moments: Moments, epsilon: float = 1e-8) -> torch.Tensor:
    """``(value - mean) / sqrt(std^2 + epsilon)`` on the mask, 0 elsewhere. ``moments`` are the global batch's."""
    scale = 1.0 / math.sqrt(moments.std**2 + epsilon)
    return torch.where(mask_BT, (values_BT - moments.mean) * scale, torch.zeros_like(values_BT))


def with_advantages(
    batch: RolloutBatch,
    *,
    kl_coef: float,
    discount: float,
    gae_lambda: float,
    truncation: str,
    truncation_penalty: float,
    whiten_advantages: bool,
) -> RolloutBatch:
    """Fill ``token_rewards_BT``, ``rewards_B``, ``train_mask_BT``, ``advantages_BT`` and ``returns_BT``.

    ``batch`` is the whole global batch with log-probs, values and scores in place, so the whitening moments need no
    reduction. Returns come from the advantages before whitening.
    """
    needed = {
        "policy_logprobs_BT": batch.policy_logprobs_BT,
        "reference_logprobs_BT": batch.reference_logprobs_BT,
        "values_BT": batch.values_BT,
        "scores_B": batch.scores_B,
    }
    given = {name: value for name, value in needed.items() if value is not None}
    if len(given) < len(needed):
        raise ValueError(f"advantages need {sorted(set(needed) - set(given))}, which are not computed yet")
    effect = apply_truncation(
        truncation,
        given["scores_B"],
        batch.truncated_B,
        batch.loss_mask_BT,
        bootstrap_values_B=batch.bootstrap_values_B,
        penalty=truncation_penalty,
    )
    rewards_BT = token_rewards(
        given["policy_logprobs_BT"],
        given["reference_logprobs_BT"],
        batch.loss_mask_BT,
        batch.lengths_B,
        effect.scores_B,
        kl_coef,
    )
    advantages_BT, returns_BT = generalized_advantages(
        rewards_BT,
        given["values_BT"],
        batch.loss_mask_BT,
        discount=discount,
        gae_lambda=gae_lambda,
        bootstrap_values_B=effect.bootstrap_values_B,
    )
    if whiten_advantages:
        moments = Moments.from_sums(moment_sums(advantages_BT, effect.train_mask_BT))
        advantages_BT = whiten(advantages_BT, effect.train_mask_BT, moments)
    return batch.replace(
        token_rewards_BT=rewards_BT,
        rewards_B=rewards_BT.sum(dim=1),
        train_mask_BT=effect.train_mask_BT,
        advantages_BT=advantages_BT,
        returns_BT=returns_BT,
    )

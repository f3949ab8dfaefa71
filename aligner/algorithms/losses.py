"""Losses as sums with counts: pure functions of tensors, normalised later by the global count.

Shapes: T tokens of one pack (token-aligned, see ``aligner/rollout/batch.py``), P pairs. Every function returns
:class:`LossTerms`: the summed loss (carries the gradient), how many tokens or pairs it counts, and detached float64
sums of what is reported. A reported mean is its sum over the global count. What a mask does not select is never read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from aligner.models.forward import LossTerms


def sft_loss(logprobs_T: torch.Tensor, mask_T: torch.Tensor) -> LossTerms:
    """Negative log-likelihood of the masked tokens. count: tokens. sums: none besides the loss."""
    return LossTerms(-_masked_sum(logprobs_T, mask_T), int(mask_T.sum()))


def bradley_terry_loss(chosen_scores_P: torch.Tensor, rejected_scores_P: torch.Tensor) -> LossTerms:
    """``-log sigmoid(chosen - rejected)`` (Bradley & Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, eq. 1).

    count: pairs. sums: ``accuracy`` (pairs with chosen > rejected; a tie is wrong), ``margin`` (chosen - rejected),
    ``chosen_score``, ``rejected_score``.
    """
    margin_P = chosen_scores_P - rejected_scores_P
    sums = {
        "accuracy": _total(margin_P > 0),
        "margin": _total(margin_P),
        "chosen_score": _total(chosen_scores_P),
        "rejected_score": _total(rejected_scores_P),
    }
    return LossTerms(-F.logsigmoid(margin_P).sum(), margin_P.numel(), sums)


def ppo_policy_loss(
    logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    mask_T: torch.Tensor,
    *,
    clip_ratio: float,
    entropy_T: torch.Tensor | None = None,
    entropy_coef: float = 0.0,
) -> LossTerms:
    """The clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7) minus an entropy bonus.

    ``max(-A r, -A clip(r, 1 - clip_ratio, 1 + clip_ratio)) - entropy_coef * H`` with ``r = exp(new - old log-prob)``.

    count: tokens. sums: ``policy_loss`` (without the bonus), ``ratio``, ``clip_fraction`` (tokens on which the clip
    binds, so they have no gradient), ``approx_kl_k3`` (KL(old || new), Schulman 2020), ``entropy`` (where given).
    """
    if entropy_coef != 0.0 and entropy_T is None:
        raise ValueError(f"entropy_coef is {entropy_coef}, but no entropy was given")
    log_ratio_T = torch.where(mask_T, logprobs_T - old_logprobs_T, torch.zeros_like(logprobs_T))
    ratio_T = torch.exp(log_ratio_T)
    free_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * torch.clamp(ratio_T, 1.0 - clip_ratio, 1.0 + clip_ratio)
    policy_loss = _masked_sum(torch.maximum(free_T, clipped_T), mask_T)
    loss = policy_loss
    sums = {
        "policy_loss": _total(policy_loss),
        "ratio": _total(ratio_T, mask_T),
        "clip_fraction": _total(clipped_T > free_T, mask_T),
        "approx_kl_k3": _total(torch.expm1(log_ratio_T) - log_ratio_T, mask_T),
    }
    if entropy_T is not None:
        sums["entropy"] = _total(entropy_T, mask_T)
        if entropy_coef != 0.0:
            loss = policy_loss - entropy_coef * _masked_sum(entropy_T, mask_T)
    return LossTerms(loss, int(mask_T.sum()), sums)


def ppo_value_loss(
    values_T: torch.Tensor,
    old_values_T: torch.Tensor,
    returns_T: torch.Tensor,
    mask_T: torch.Tensor,
    *,
    value_clip: float,
) -> LossTerms:
    """``0.5 * max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2)``; ``value_clip`` 0: no clip.

    The clipped form is that of OpenAI baselines' PPO2 (Engstrom et al. 2020, arXiv:2005.12729, section 3).

    count: tokens. sums: ``value_clip_fraction`` (tokens on which the clip binds).
    """
    error_T = torch.where(mask_T, returns_T - values_T, torch.zeros_like(values_T))
    squared_T = error_T.square()
    binds_T = torch.zeros_like(mask_T)
    worst_T = squared_T
    if value_clip > 0:
        clipped_T = torch.clamp(values_T, old_values_T - value_clip, old_values_T + value_clip)
        clipped_squared_T = (returns_T - clipped_T).square()
        binds_T = clipped_squared_T > squared_T
        worst_T = torch.maximum(squared_T, clipped_squared_T)
    sums = {"value_clip_fraction": _total(binds_T, mask_T)}
    return LossTerms(0.5 * _masked_sum(worst_T, mask_T), int(mask_T.sum()), sums)


def explained_variance(values_N: torch.Tensor, returns_N: torch.Tensor) -> float:
    """``1 - Var(R - V) / Var(R)`` of N tokens. Returns that do not vary beyond rounding, or none: 0."""
    if not returns_N.numel():
        return 0.0
    returns_N = returns_N.double()
    variance = float(returns_N.var(correction=0))
    if variance <= 1e-12 * float(returns_N.square().mean()):
        return 0.0
    return 1.0 - float((returns_N - values_N.double()).var(correction=0)) / variance


def _masked_sum(values_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    return torch.where(mask_T, values_T, torch.zeros_like(values_T)).sum()


def _total(values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    selected = values.detach() if mask is None else values.detach()[mask]
    return selected.double().sum()

"""What a PPO step reports of its rollout. Means are over valid tokens or responses of the global batch."""

from __future__ import annotations

import torch

from aligner.algorithms.losses import explained_variance
from aligner.monitoring import metrics as names
from aligner.monitoring.metrics import MetricSums
from aligner.rewards.protocol import RewardOutput
from aligner.rollout.advantages import kl_k1, kl_k3
from aligner.rollout.batch import RolloutBatch


def rollout_metrics(
    batch: RolloutBatch, reward: RewardOutput, entropy_BT: torch.Tensor, kl_coef: float
) -> dict[str, float]:
    """Metrics of a batch with log-probs, values, scores, advantages and returns in place.

    ``entropy_BT``: nats, of the policy's distribution from which each token was sampled.
    """
    return {
        names.ENTROPY: float(entropy_BT[batch.loss_mask_BT].double().mean()),
        **_reward_metrics(batch, reward, kl_coef),
        **_length_metrics(batch),
        **_value_metrics(batch),
        **_engine_metrics(batch),
    }


def _reward_metrics(batch: RolloutBatch, reward: RewardOutput, kl_coef: float) -> dict[str, float]:
    policy_BT, reference_BT = batch.policy_logprobs_BT, batch.reference_logprobs_BT
    assert policy_BT is not None and reference_BT is not None
    none_BT = torch.zeros_like(policy_BT)
    sums = MetricSums()
    sums.add_values("score", batch.scores_B)
    sums.add_values(names.REWARDS_WITH_KL_MEAN, batch.rewards_B)
    for name, estimate_BT in (
        (names.INIT_POLICY_KL, kl_k1(policy_BT, reference_BT)),
        (names.INIT_POLICY_KL_K3, kl_k3(policy_BT, reference_BT)),
    ):
        sums.add_values(name, torch.where(batch.loss_mask_BT, estimate_BT, none_BT).sum(dim=1))
    for part, values_B in reward.metrics.items():
        sums.add_values(f"train_rollouts/reward_{part}", values_B)
    result = sums.means()
    del result["score"]
    return {
        names.REWARDS_MEAN: sums.mean("score"),
        names.REWARDS_STD: sums.std("score"),
        names.REWARDS_MIN: sums.low("score"),
        names.REWARDS_MAX: sums.high("score"),
        names.KL_COEF: kl_coef,
        **result,
    }


def _length_metrics(batch: RolloutBatch) -> dict[str, float]:
    lengths_B = batch.response_lengths_B
    truncated = float(batch.truncated_B.float().mean())
    return {
        names.RESPONSE_LENGTH_MEAN: float(lengths_B.float().mean()),
        names.RESPONSE_LENGTH_MIN: float(lengths_B.min()),
        names.RESPONSE_LENGTH_MAX: float(lengths_B.max()),
        names.PROMPT_LENGTH_MEAN: float(batch.prompt_lengths_B.float().mean()),
        names.TRUNCATION_RATE: truncated,
        names.EOS_RATE: 1.0 - truncated,
    }


def _value_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Advantages are those before whitening: returns minus values."""
    assert batch.values_BT is not None and batch.returns_BT is not None and batch.train_mask_BT is not None
    sums = MetricSums()
    errors_BT = batch.returns_BT - batch.values_BT
    for name, values_BT in (("advantage", errors_BT), ("return", batch.returns_BT), ("value", batch.values_BT)):
        sums.add_values(name, values_BT, batch.train_mask_BT)
    mask_BT = batch.train_mask_BT
    return {
        names.ADVANTAGES_MEAN: sums.mean("advantage"),
        names.ADVANTAGES_STD: sums.std("advantage"),
        names.RETURNS_MEAN: sums.mean("return"),
        names.RETURNS_STD: sums.std("return"),
        names.VALUES_MEAN: sums.mean("value"),
        names.VALUES_STD: sums.std("value"),
        names.EXPLAINED_VARIANCE: explained_variance(batch.values_BT[mask_BT], batch.returns_BT[mask_BT]),
    }


def _engine_metrics(batch: RolloutBatch) -> dict[str, float]:
    difference = engine_difference(batch)
    return {
        names.ENGINE_LOGPROB_DIFF_MEAN: float(difference.mean()),
        names.ENGINE_LOGPROB_DIFF_MAX: float(difference.max()),
    }


def engine_difference(batch: RolloutBatch) -> torch.Tensor:
    """|engine - trainer| log-prob of every sampled token, in nats: [number of sampled tokens]."""
    assert batch.engine_logprobs_BT is not None and batch.policy_logprobs_BT is not None
    return (batch.engine_logprobs_BT - batch.policy_logprobs_BT)[batch.loss_mask_BT].abs()

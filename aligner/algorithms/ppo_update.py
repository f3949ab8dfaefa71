"""The TRAIN part of a PPO step: critic and policy updates over shuffled mini-batches of one rollout."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from aligner.algorithms.losses import ppo_policy_loss, ppo_value_loss
from aligner.config.schema import PPOConfig
from aligner.models.forward import LossTerms, StepResult, TokenOutput, train_step
from aligner.models.role_model import RoleModel
from aligner.monitoring import metrics as names
from aligner.monitoring.metrics import MetricSums
from aligner.rollout.batch import RolloutBatch
from aligner.rollout.score import per_pack, rows_for_role


def mini_batches(num_samples: int, size: int, epochs: int, seed: int, step: int) -> Iterator[list[int]]:
    """Rows of each mini-batch: a fresh permutation an epoch, a function of (seed, step, epoch) alone."""
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(((seed * 1_000_003 + step) * 1_009 + epoch) % 2**63)
        order = torch.randperm(num_samples, generator=generator).tolist()
        for start in range(0, num_samples, size):
            yield order[start : start + size]


def update_policy(
    actor: RoleModel, batch: RolloutBatch, config: PPOConfig, *, temperature: float, pack_length: int
) -> StepResult:
    """One clipped policy step on the samples of ``batch``. Collective."""
    assert batch.policy_logprobs_BT is not None and batch.advantages_BT is not None and batch.train_mask_BT is not None
    share = rows_for_role(actor.topology, batch.sequences(), pack_length)
    old = per_pack(share, batch.policy_logprobs_BT)
    advantages = per_pack(share, batch.advantages_BT)
    masks = per_pack(share, batch.train_mask_BT)

    def loss(output: TokenOutput, i: int) -> LossTerms:
        assert output.logprobs_T is not None
        device = output.logprobs_T.device
        return ppo_policy_loss(
            output.logprobs_T,
            old[i].to(device),
            advantages[i].to(device),
            masks[i].to(device),
            clip_ratio=config.clip_ratio,
            entropy_T=output.entropy_T,
            entropy_coef=config.entropy_coef,
        )

    return train_step(actor, share.packs, loss, temperature=temperature, with_entropy=True, masks=masks)


def update_values(critic: RoleModel, batch: RolloutBatch, config: PPOConfig, *, pack_length: int) -> StepResult:
    """One clipped value step on the samples of ``batch``. Collective."""
    assert batch.values_BT is not None and batch.returns_BT is not None and batch.train_mask_BT is not None
    share = rows_for_role(critic.topology, batch.sequences(), pack_length)
    old = per_pack(share, batch.values_BT)
    returns = per_pack(share, batch.returns_BT)
    masks = per_pack(share, batch.train_mask_BT)

    def loss(output: TokenOutput, i: int) -> LossTerms:
        assert output.values_T is not None
        device = output.values_T.device
        return ppo_value_loss(
            output.values_T,
            old[i].to(device),
            returns[i].to(device),
            masks[i].to(device),
            value_clip=config.value_clip,
        )

    return train_step(critic, share.packs, loss)


class UpdateMetrics:
    """Adds up what the mini-batches of a step report; means are over the tokens of all of them."""

    def __init__(self) -> None:
        self._sums = MetricSums()

    def add_policy(self, result: StepResult) -> None:
        count = result.sums["count"]
        self._sums.add(names.ACTOR_LOSS, result.sums["policy_loss"], count)
        self._sums.add(names.PPO_RATIO, result.sums["ratio"], count)
        self._sums.add(names.CLIP_FRACTION, result.sums["clip_fraction"], count)
        self._sums.add(names.APPROX_KL, result.sums["approx_kl_k3"], count)
        self._sums.add(names.OPTIM_ENTROPY, result.sums["entropy"], count)
        self._sums.add(names.ACTOR_GRAD_NORM, result.grad_norm)
        self._sums.add(names.ACTOR_LR, result.lr)

    def add_critic(self, result: StepResult) -> None:
        count = result.sums["count"]
        self._sums.add(names.CRITIC_LOSS, result.sums["loss"], count)
        self._sums.add(names.VALUE_CLIP_FRACTION, result.sums["value_clip_fraction"], count)
        self._sums.add(names.CRITIC_GRAD_NORM, result.grad_norm)
        self._sums.add(names.CRITIC_LR, result.lr)

    def means(self) -> dict[str, float]:
        return self._sums.means()

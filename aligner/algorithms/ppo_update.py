"""The TRAIN part of a PPO step: critic and policy updates over shuffled mini-batches of one rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from aligner.algorithms.losses import LossTerms, explained_variance, ppo_policy_loss, ppo_value_loss
from aligner.config.schema import PPOConfig
from aligner.data.packing import Pack, pack_rows
from aligner.errors import TrainingError
from aligner.models.forward import StepResult, TokenOutput, train_step
from aligner.models.role_model import RoleModel
from aligner.monitoring import metrics as names
from aligner.monitoring.metrics import MetricSums
from aligner.rollout.batch import RolloutBatch
from aligner.rollout.score import RoleRows, rows_for_role

LossFunction = Callable[[TokenOutput, int], LossTerms]


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
    assert batch.policy_logprobs_BT is not None and batch.advantages_BT is not None
    share = rows_for_role(actor.topology, batch.sequences(), pack_length)
    old = _per_pack(share, batch.policy_logprobs_BT)
    advantages = _per_pack(share, batch.advantages_BT)
    masks = _per_pack(share, batch.train_mask_BT)

    def loss(output: TokenOutput, i: int) -> LossTerms:
        return ppo_policy_loss(
            output.logprobs_T,
            old[i].to(output.logprobs_T.device),
            advantages[i].to(output.logprobs_T.device),
            masks[i].to(output.logprobs_T.device),
            clip_ratio=config.clip_ratio,
            entropy_T=output.entropy_T,
            entropy_coef=config.entropy_coef,
        )

    return train_step(actor, share.packs, loss, temperature=temperature, with_entropy=True)


def update_values(critic: RoleModel, batch: RolloutBatch, config: PPOConfig, *, pack_length: int) -> StepResult:
    """One clipped value step on the samples of ``batch``. Collective."""
    assert batch.values_BT is not None and batch.returns_BT is not None
    share = rows_for_role(critic.topology, batch.sequences(), pack_length)
    old = _per_pack(share, batch.values_BT)
    returns = _per_pack(share, batch.returns_BT)
    masks = _per_pack(share, batch.train_mask_BT)

    def loss(output: TokenOutput, i: int) -> LossTerms:
        return ppo_value_loss(
            output.values_T,
            old[i].to(output.values_T.device),
            returns[i].to(output.values_T.device),
            masks[i].to(output.values_T.device),
            value_clip=config.value_clip,
        )

    return train_step(critic, share.packs, loss)


def _per_pack(share: RoleRows, values_BT: torch.Tensor | None) -> list[torch.Tensor]:
    """[T] values of each pack of ``share``, from the rows of the global batch."""
    assert values_BT is not None
    local = values_BT[torch.tensor(share.rows, dtype=torch.int64)]
    return [pack_rows(pack, local) for pack in share.packs]


class UpdateMetrics:
    """Adds up what the mini-batches of a step report; means are over the tokens of all of them."""

    def __init__(self) -> None:
        self.sums = MetricSums()
        self._critic: dict[str, float] = {}
        self._critic_count = 0.0

    def add_policy(self, result: StepResult) -> None:
        count = result.sums["count"]
        self.sums.add(names.ACTOR_LOSS, result.sums["policy_loss"], count)
        self.sums.add(names.PPO_RATIO, result.sums["ratio"], count)
        self.sums.add(names.CLIP_FRACTION, result.sums["clip_fraction"], count)
        self.sums.add(names.APPROX_KL, result.sums["approx_kl_k3"], count)
        self.sums.add(names.OPTIM_ENTROPY, result.sums["entropy"], count)
        self.sums.add(names.ACTOR_GRAD_NORM, result.grad_norm)
        self.sums.add(names.ACTOR_LR, result.lr)

    def add_critic(self, result: StepResult) -> None:
        count = result.sums["count"]
        self.sums.add(names.CRITIC_LOSS, result.sums["loss"], count)
        self.sums.add(names.VALUE_CLIP_FRACTION, result.sums["value_clip_fraction"], count)
        self.sums.add(names.CRITIC_GRAD_NORM, result.grad_norm)
        self.sums.add(names.CRITIC_LR, result.lr)
        for name, value in result.sums.items():
            self._critic[name] = self._critic.get(name, 0.0) + value
        self._critic_count += count

    def result(self) -> dict[str, float]:
        return self.sums.means()

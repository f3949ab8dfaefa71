"""Metric names, and sums that are added over the parts of a batch before they become means.

Names follow NeMo-Aligner's groups (``train_rollouts/``, ``train_optim/``, ``val_rollouts/``, ``timers/``) and
Megatron's words (``loss``, ``grad_norm``, ``lr``). Phase times are ``timers/<phase>`` in seconds.
Imports without torch; tensors are read through their own methods.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Every trainer (sft, rm) -------------------------------------------------------------------------
TRAIN_LOSS = "train/loss"  # nats a token (SFT) or a pair (reward model), mean over the global batch
TRAIN_GRAD_NORM = "train/grad_norm"  # global L2 norm before clipping
TRAIN_LR = "train/lr"
TRAIN_ACCURACY = "train/accuracy"  # reward model: share of pairs with chosen above rejected
TRAIN_MARGIN = "train/margin"  # reward model: mean of chosen minus rejected score
TRAIN_TOKENS = "train/tokens"  # tokens with loss in the global batch
CONSUMED_SAMPLES = "consumed_samples"  # since the first step, earlier lives included; PPO: responses
VAL_LOSS = "val/loss"
VAL_ACCURACY = "val/accuracy"
VAL_MARGIN = "val/margin"
VAL_REWARD_MEAN = "val/reward_mean"  # scores of the reward model on held-out responses
VAL_REWARD_STD = "val/reward_std"

# PPO rollouts: over valid tokens or samples of the global batch ----------------------------------
REWARDS_MEAN = "train_rollouts/rewards_mean"  # raw score a response, before the KL penalty
REWARDS_STD = "train_rollouts/rewards_std"
REWARDS_MIN = "train_rollouts/rewards_min"
REWARDS_MAX = "train_rollouts/rewards_max"
REWARDS_WITH_KL_MEAN = "train_rollouts/rewards_with_kl_mean"  # sum of token rewards a response
INIT_POLICY_KL = "train_rollouts/init_policy_kl"  # k1, nats a response: sum of log p - log p_ref
INIT_POLICY_KL_K3 = "train_rollouts/init_policy_kl_k3"  # k3, nats a response: sum of r - 1 - log r, r = p_ref/p
KL_COEF = "train_rollouts/kl_coef"
ENTROPY = "train_rollouts/entropy"  # nats a token, of the policy that sampled
RESPONSE_LENGTH_MEAN = "train_rollouts/response_length_mean"  # tokens
RESPONSE_LENGTH_MIN = "train_rollouts/response_length_min"
RESPONSE_LENGTH_MAX = "train_rollouts/response_length_max"
PROMPT_LENGTH_MEAN = "train_rollouts/prompt_length_mean"
TRUNCATION_RATE = "train_rollouts/truncation_rate"  # share of responses cut at max_new_tokens
EOS_RATE = "train_rollouts/eos_rate"  # share of responses that ended by themselves
ADVANTAGES_MEAN = "train_rollouts/advantages_mean"  # before whitening
ADVANTAGES_STD = "train_rollouts/advantages_std"
RETURNS_MEAN = "train_rollouts/returns_mean"
RETURNS_STD = "train_rollouts/returns_std"
VALUES_MEAN = "train_rollouts/values_mean"
VALUES_STD = "train_rollouts/values_std"
EXPLAINED_VARIANCE = "train_rollouts/explained_variance"  # 1 - Var(returns - values) / Var(returns)
ENGINE_LOGPROB_DIFF_MEAN = "train_rollouts/engine_logprob_diff_mean"  # |engine - trainer| a sampled token, nats
ENGINE_LOGPROB_DIFF_MAX = "train_rollouts/engine_logprob_diff_max"

# PPO optimisation: mean over the step's mini-batches and epochs ----------------------------------
ACTOR_LOSS = "train_optim/actor_loss"
ACTOR_GRAD_NORM = "train_optim/actor_grad_norm"
ACTOR_LR = "train_optim/actor_lr"
CRITIC_LOSS = "train_optim/critic_loss"  # clipped value loss
CRITIC_GRAD_NORM = "train_optim/critic_grad_norm"
CRITIC_LR = "train_optim/critic_lr"
PPO_RATIO = "train_optim/ppo_ratio"
CLIP_FRACTION = "train_optim/clip_fraction"  # share of tokens on which the clip binds
VALUE_CLIP_FRACTION = "train_optim/value_clip_fraction"
APPROX_KL = "train_optim/approx_kl"  # k3 between the sampling policy and the updated one, nats a token
OPTIM_ENTROPY = "train_optim/entropy"

# PPO validation on fixed prompts -----------------------------------------------------------------
VAL_ROLLOUT_REWARDS_MEAN = "val_rollouts/rewards_mean"
VAL_ROLLOUT_RESPONSE_LENGTH_MEAN = "val_rollouts/response_length_mean"
VAL_ROLLOUT_EOS_RATE = "val_rollouts/eos_rate"
VAL_ROLLOUT_KL = "val_rollouts/init_policy_kl"

# Speed and memory --------------------------------------------------------------------------------
# A step is logged before it is saved: its row covers the time since the row before it, and timers/checkpoint is the
# save of the step before. The last save of a run stands in no row (the progress display says how long it took).
TIMERS_PREFIX = "timers/"  # timers/<phase>: seconds, the slowest rank
STEP_TIME = "timers/step"  # the whole step
# Tokens of all ranks a second. SFT, RM: every token of the packs, with or without loss, over the seconds of the train
# phase. PPO: sampled tokens over the seconds of the whole step.
TOKENS_PER_SECOND = "throughput/tokens_per_second"
ROLLOUT_TOKENS_PER_SECOND = "throughput/rollout_tokens_per_second"  # sampled tokens a second of rollout
# Of the saves since the row before. A row that has none of them was not touched by a save.
CHECKPOINT_STALL = "checkpoint/stall_s"  # what a save took from training: blocked, and slower than the steps before
CHECKPOINT_WRITE = "checkpoint/write_s"  # from the start of the save until it was complete on the disk
CHECKPOINT_FAILED = "checkpoint/failed"  # 1: a save could not be written
PEAK_MEMORY = "memory/peak_gib"  # highest resident memory of a process since its start, GiB, the largest rank
DEVICE_PEAK_MEMORY = "memory/device_peak_gib"  # most memory of tensors on a GPU since the start, GiB, the largest rank


@dataclass
class _Cell:
    """Sum, count, sum of squares and extrema of one metric."""

    total: float = 0.0
    count: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf


@dataclass
class MetricSums:
    """Accumulates metrics as sums with counts, so how a batch is split into parts has no influence beyond rounding.

    Values are plain floats (float64).
    """

    cells: dict[str, _Cell] = field(default_factory=dict)

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """Add an already summed value over ``count`` items. :meth:`std`, :meth:`low` and :meth:`high` need
        :meth:`add_values` instead."""
        cell = self.cells.setdefault(name, _Cell())
        cell.total += float(total)
        cell.count += float(count)

    def add_values(self, name: str, values: Any, mask: Any = None) -> None:
        """Add every element of tensor or sequence ``values`` (any shape) where ``mask`` (same shape) is true."""
        cell = self.cells.setdefault(name, _Cell())
        if hasattr(values, "detach"):
            chosen = (values.detach() if mask is None else values.detach()[mask.bool()]).reshape(-1).double()
            if chosen.numel():
                self._count(cell, chosen.numel(), chosen.sum(), chosen.square().sum(), chosen.min(), chosen.max())
            return
        flags = [True] * len(values) if mask is None else mask
        items = [float(value) for value, keep in zip(values, flags, strict=True) if keep]
        if items:
            self._count(cell, len(items), math.fsum(items), math.fsum(x * x for x in items), min(items), max(items))

    @staticmethod
    def _count(cell: _Cell, count: int, total: Any, squares: Any, low: Any, high: Any) -> None:
        cell.count += count
        cell.total += float(total)
        cell.squares += float(squares)
        cell.low, cell.high = min(cell.low, float(low)), max(cell.high, float(high))

    def mean(self, name: str) -> float:
        """Sum over count; nan when nothing was counted (a step in which every response was masked)."""
        cell = self.cells[name]
        return cell.total / cell.count if cell.count else math.nan

    def std(self, name: str) -> float:
        """Population standard deviation; nan when nothing was counted."""
        cell = self.cells[name]
        if not cell.count:
            return math.nan
        return math.sqrt(max(0.0, cell.squares / cell.count - (cell.total / cell.count) ** 2))

    def low(self, name: str) -> float:
        """Smallest value; nan when nothing was counted."""
        cell = self.cells[name]
        return cell.low if cell.count else math.nan

    def high(self, name: str) -> float:
        """Largest value; nan when nothing was counted."""
        cell = self.cells[name]
        return cell.high if cell.count else math.nan

    def means(self) -> dict[str, float]:
        """``{name: mean}`` of everything added."""
        return {name: self.mean(name) for name in self.cells}


def timer_metrics(seconds: Mapping[str, float]) -> dict[str, float]:
    """Phase seconds under their metric names."""
    return {TIMERS_PREFIX + phase: value for phase, value in seconds.items()}

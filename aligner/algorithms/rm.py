"""Reward model: a scalar head trained on preference pairs with the Bradley-Terry loss.

A pair's chosen and rejected text stand in the same micro-batch; the score of a text is the head's output at its last
real token. The loss is a mean over the pairs of the *global* batch. Mean and standard deviation of the scores on
held-out data are saved with the checkpoint and standardise scores at PPO time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aligner.algorithms.losses import bradley_terry_loss
from aligner.algorithms.micro_batches import count_tokens, save_packs
from aligner.algorithms.run import TrainingRun
from aligner.checkpoint.stateful import Stateful
from aligner.config.schema import PairDataConfig, RMRoot
from aligner.data.datasets import PreferenceDataset
from aligner.data.loader import ShardedOrder, rows_of_rank
from aligner.data.packing import Pack, build_pack, plan_packs
from aligner.distributed.collectives import all_gather_objects
from aligner.distributed.context import RunContext
from aligner.models.forward import LossTerms, TokenOutput, score_rewards, train_step
from aligner.models.packs import pack_multiple
from aligner.models.role_model import RoleModel
from aligner.monitoring import metrics as names
from aligner.phases.datasets import open_pairs
from aligner.phases.identity import run_identity
from aligner.phases.roles import load_trained_reward
from aligner.rewards.standardize import ScoreStatistics

VALIDATION_BATCHES = 16  # global batches of a validation between two looks at stop requests


class HeldOutStatistics:
    """The newest :class:`ScoreStatistics`; saved with every checkpoint as ``reward_statistics``."""

    def __init__(self) -> None:
        self.scores = ScoreStatistics()

    def state_dict(self) -> dict[str, Any]:
        return self.scores.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scores = ScoreStatistics.from_dict(state)


@dataclass(frozen=True)
class PackedPairs:
    """This rank's pairs of one global batch. In every pack, segments 2i and 2i+1 are chosen and rejected of a pair."""

    packs: list[Pack]
    sources: list[str]  # ``file:line`` of each row of the packs: rows 2i and 2i+1 are the sides of one pair

    def save(self, directory: Path) -> None:
        """For :meth:`TrainingRun.dump_on_failure`."""
        save_packs(directory, self.packs, self.sources)

    def loss(self, output: TokenOutput, micro_batch: int) -> LossTerms:
        """The loss function of ``train_step``."""
        assert output.head_T is not None
        ends = torch.tensor([end - 1 for _, _, end in self.packs[micro_batch].segments])
        scores = output.head_T[ends.to(output.head_T.device)]
        return bradley_terry_loss(scores[0::2], scores[1::2])


def run(root: RMRoot, context: RunContext) -> None:
    """Train the reward model on ``data.train`` until ``trainer.max_steps``. Collective."""
    reward, tokenizer = load_trained_reward(root, context)
    train = open_pairs(root.data.train, tokenizer, root.data, context)
    given = open_pairs(root.data.validation, tokenizer, root.data, context) if root.data.validation else None
    held_out = given or train
    order = ShardedOrder(len(train), root.data.global_batch_size, root.trainer.seed, train.fingerprint)
    statistics = HeldOutStatistics()
    stateful: dict[str, Stateful] = {"order": order, "reward_statistics": statistics}

    def validate_model(step: int) -> dict[str, float]:
        return validate(reward, held_out, root.data, statistics, training.poll)

    with TrainingRun(
        "rm",
        root,
        context,
        {"reward": reward},
        stateful,
        identity=run_identity(root, context, {"data.train": train, "data.validation": given}),
        validate=validate_model,
        validates_saves=True,
        shown=(names.TRAIN_LOSS, names.TRAIN_ACCURACY, names.VAL_ACCURACY),
    ) as training:
        if held_out is train:
            training.progress.message("data.validation is not set: accuracy and score statistics are of data.train")
        for step in training.steps():
            indices = order.next_batch()
            with training.timers("data"):
                batch = pack_pairs(reward, train, indices, root.data.pack_length)
            with training.timers("train"), training.dump_on_failure(step, batch.save):
                result = train_step(reward, batch.packs, batch.loss)
            pairs = result.sums["count"]
            metrics = {
                names.TRAIN_LOSS: result.sums["loss"] / pairs,
                names.TRAIN_ACCURACY: result.sums["accuracy"] / pairs,
                names.TRAIN_MARGIN: result.sums["margin"] / pairs,
                names.TRAIN_GRAD_NORM: result.grad_norm,
                names.TRAIN_LR: result.lr,
            }
            tokens = count_tokens(batch.packs, reward.topology)
            training.finish_step(step, metrics, samples=len(indices), tokens=tokens, tokens_in="train")


def pack_pairs(model: RoleModel, dataset: PreferenceDataset, indices: Sequence[int], pack_length: int) -> PackedPairs:
    """Read and pack the pairs of ``indices`` that belong to this rank."""
    topology = model.topology
    pairs = [dataset[indices[row]] for row in rows_of_rank(indices, topology.dp_rank, topology.dp)]
    sequences = [ids for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
    plans = plan_packs([pair.chosen_ids.numel() + pair.rejected_ids.numel() for pair in pairs], pack_length)
    sides = [[side for pair in plan for side in (2 * pair, 2 * pair + 1)] for plan in plans]
    packs = [build_pack(sequences, rows, pack_multiple(topology)) for rows in sides]
    return PackedPairs(packs, [pair.source for pair in pairs for _ in range(2)])


def validate(
    model: RoleModel,
    dataset: PreferenceDataset,
    config: PairDataConfig,
    statistics: HeldOutStatistics,
    poll: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Loss, accuracy and margin on ``dataset``; the moments of its scores go to ``statistics``. Collective.

    ``poll`` is called between its batches.
    """
    collected = []
    for start in range(0, len(dataset), VALIDATION_BATCHES * config.global_batch_size):
        poll()
        rows = range(start, min(len(dataset), start + VALIDATION_BATCHES * config.global_batch_size))
        collected += score_rewards(model, pack_pairs(model, dataset, rows, config.pack_length).packs)
    mine = torch.cat(collected) if collected else torch.zeros(0)
    scores = torch.cat(all_gather_objects(mine, model.topology.pg.dp))
    statistics.scores = ScoreStatistics.of(scores)
    terms = bradley_terry_loss(scores[0::2], scores[1::2])
    return {
        names.VAL_LOSS: float(terms.loss_sum) / terms.count,
        names.VAL_ACCURACY: float(terms.sums["accuracy"]) / terms.count,
        names.VAL_MARGIN: float(terms.sums["margin"]) / terms.count,
        names.VAL_REWARD_MEAN: statistics.scores.mean,
        names.VAL_REWARD_STD: statistics.scores.std,
    }

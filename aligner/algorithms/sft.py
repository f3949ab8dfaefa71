"""Supervised fine-tuning: next-token loss on the assistant's tokens of conversations.

The loss is a sum over the loss tokens of the *global* batch divided by their number, so it does not depend on how the
batch is split over data-parallel ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from aligner.algorithms.losses import sft_loss
from aligner.algorithms.micro_batches import count_tokens, save_packs
from aligner.algorithms.run import TrainingRun
from aligner.config.schema import SFTRoot, TextDataConfig
from aligner.data.datasets import TextDataset
from aligner.data.loader import ShardedOrder, rows_of_rank
from aligner.data.packing import Pack
from aligner.distributed.collectives import all_reduce_sums
from aligner.distributed.context import RunContext
from aligner.models.forward import LossTerms, TokenOutput, score_logprobs, train_step
from aligner.models.packs import pack_for
from aligner.models.role_model import RoleModel
from aligner.monitoring import metrics as names
from aligner.phases.datasets import open_texts
from aligner.phases.identity import run_identity
from aligner.phases.roles import load_actor

VALIDATION_BATCHES = 16  # global batches of a validation between two looks at stop requests


@dataclass(frozen=True)
class PackedText:
    """This rank's samples of one global batch: micro-batches and, token for token, where the loss counts."""

    packs: list[Pack]
    loss_masks: list[torch.Tensor]  # bool [T] a pack
    sources: list[str]  # ``file:line`` of each row of the packs

    def save(self, directory: Path) -> None:
        """For :meth:`TrainingRun.dump_on_failure`."""
        save_packs(directory, self.packs, self.sources, self.loss_masks)


def run(root: SFTRoot, context: RunContext) -> None:
    """Train the actor on ``data.train`` until ``trainer.max_steps``. Collective."""
    actor, tokenizer = load_actor(root, context)
    train = open_texts(root.data.train, tokenizer, root.data, context)
    held_out = None
    if root.data.validation:
        held_out = open_texts(root.data.validation, tokenizer, root.data, context)
    order = ShardedOrder(len(train), root.data.global_batch_size, root.trainer.seed, train.fingerprint)

    def validate(step: int) -> dict[str, float]:
        assert held_out is not None
        return {names.VAL_LOSS: mean_loss(actor, held_out, root.data, training.poll)}

    with TrainingRun(
        "sft",
        root,
        context,
        {"actor": actor},
        {"order": order},
        identity=run_identity(root, context, {"data.train": train, "data.validation": held_out}),
        validate=validate if held_out is not None else None,
        shown=(names.TRAIN_LOSS, names.VAL_LOSS, names.TRAIN_GRAD_NORM),
    ) as training:
        for step in training.steps():
            indices = order.next_batch()
            with training.timers("data"):
                batch = pack_text(actor, train, indices, root.data.pack_length)
            with training.timers("train"), training.dump_on_failure(step, batch.save):
                result = train_step(actor, batch.packs, loss_over(batch.loss_masks), masks=batch.loss_masks)
            tokens = result.sums["count"]
            metrics = {
                names.TRAIN_LOSS: result.sums["loss"] / tokens,
                names.TRAIN_GRAD_NORM: result.grad_norm,
                names.TRAIN_LR: result.lr,
                names.TRAIN_TOKENS: tokens,
            }
            all_tokens = count_tokens(batch.packs, actor.topology)
            training.finish_step(step, metrics, samples=len(indices), tokens=all_tokens, tokens_in="train")


def pack_text(actor: RoleModel, dataset: TextDataset, indices: Sequence[int], pack_length: int) -> PackedText:
    """Read and pack the rows of ``indices`` that belong to this rank."""
    topology = actor.topology
    samples = [dataset[indices[row]] for row in rows_of_rank(indices, topology.dp_rank, topology.dp)]
    packs = pack_for(topology, [sample.token_ids for sample in samples], pack_length)
    masks = []
    for pack in packs:
        mask_T = torch.zeros(pack.tokens_T.numel(), dtype=torch.bool)
        for row, start, end in pack.segments:
            mask_T[start:end] = samples[row].loss_mask
        masks.append(mask_T)
    return PackedText(packs, masks, [sample.source for sample in samples])


def loss_over(loss_masks: Sequence[torch.Tensor]) -> Callable[[TokenOutput, int], LossTerms]:
    """The loss function of ``train_step`` for these micro-batches."""

    def loss(output: TokenOutput, micro_batch: int) -> LossTerms:
        assert output.logprobs_T is not None
        return sft_loss(output.logprobs_T, loss_masks[micro_batch].to(output.logprobs_T.device))

    return loss


def mean_loss(
    actor: RoleModel, dataset: TextDataset, config: TextDataConfig, poll: Callable[[], None] = lambda: None
) -> float:
    """Loss a token over all of ``dataset``, in nats. ``poll`` is called between its batches. Collective."""
    sums = {"loss": 0.0, "count": 0.0}
    for start in range(0, len(dataset), VALIDATION_BATCHES * config.global_batch_size):
        poll()
        rows = range(start, min(len(dataset), start + VALIDATION_BATCHES * config.global_batch_size))
        batch = pack_text(actor, dataset, rows, config.pack_length)
        scored = score_logprobs(actor, batch.packs, masks=batch.loss_masks)
        for logprobs_T, mask_T in zip(scored, batch.loss_masks, strict=True):
            terms = sft_loss(logprobs_T, mask_T)
            sums["loss"] += float(terms.loss_sum)
            sums["count"] += float(terms.count)
    total = all_reduce_sums(sums, actor.topology.pg.dp)
    return total["loss"] / total["count"]

"""Forward and training passes of a role over packs: the only caller of Megatron's schedules.

Conventions:

- Every rank of one model replica (its tensor- and pipeline-parallel ranks) calls with equal packs; one pack is one
  micro-batch. Data-parallel replicas bring their own packs, possibly unequal in number.
- Token-aligned: index t holds what belongs to token t and was predicted from position t - 1. The first token of a
  segment, and padding, hold 0.
- A loss is a sum and a count; the gradient is of (sum over all replicas) / (count over all replicas).
- Nothing moves a parameter before the loss and the gradient norm of all ranks are known to be finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from aligner.data.packing import PAD_ID, Pack
from aligner.distributed import faults
from aligner.errors import TrainingError
from aligner.models.attention import plan_segments
from aligner.models.role_model import RoleModel
from aligner.models.transformer import LM, SCALAR, StageInput, StageOutput


@dataclass(frozen=True)
class TokenOutput:
    """The last stage's output for one pack, fp32 [T], with gradient while training.

    ``lm``: ``logprobs_T`` (of the tokens, at the temperature asked for) and ``entropy_T`` if asked for.
    ``scalar``: ``values_T`` (token-aligned) and ``head_T``, the head at each position itself: a reward model's score is
    ``head_T`` at the last token of a segment.
    """

    logprobs_T: torch.Tensor | None = None
    entropy_T: torch.Tensor | None = None
    values_T: torch.Tensor | None = None
    head_T: torch.Tensor | None = None


@dataclass(frozen=True)
class LossTerms:
    """``loss_sum`` (scalar with gradient) over ``count`` tokens or pairs; ``sums`` are reported, without gradient."""

    loss_sum: torch.Tensor
    count: int
    sums: dict[str, torch.Tensor] = field(default_factory=dict)


LossFunction = Callable[[TokenOutput, int], LossTerms]  # (output of the pack, its index) -> terms


@dataclass(frozen=True)
class StepResult:
    """Equal on all ranks. ``sums``: "loss", "count" and the loss function's own, over packs and replicas.

    ``lr`` is what this step used. ``skipped``: nothing was counted anywhere, so nothing moved.
    """

    grad_norm: float
    lr: float
    skipped: bool
    sums: dict[str, float]


def score_logprobs(
    model: RoleModel,
    packs: Sequence[Pack],
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    masks: Sequence[torch.Tensor] | None = None,
) -> Any:
    """Log-probs of each pack's tokens: a list of fp32 CPU tensors [T], on every rank of the replica.

    Args:
        with_entropy: return ``(logprobs, entropies)``, two such lists.
        masks: bool [T] a pack, the tokens that are needed (others hold 0); None: all. Saves vocabulary work.
    """
    _require(model, LM)
    inputs = _stage_inputs(model, packs, masks, temperature, with_entropy)
    kinds = ("logprobs_T", "entropy_T") if with_entropy else ("logprobs_T",)
    columns = _score(model, packs, inputs, kinds)
    return (columns[0], columns[1]) if with_entropy else columns[0]


def training_logprobs(
    model: RoleModel,
    packs: Sequence[Pack],
    *,
    temperature: float = 1.0,
    masks: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """What :func:`train_step` computes log-probs with, without its backward pass; results as of :func:`score_logprobs`.

    Training mode, with gradients and entropy. No weight, gradient or optimizer state is touched.
    """
    _require(model, LM)
    if not model.trainable:
        raise ValueError(f"{model.name} is frozen: it has no training pass")
    return _score(model, packs, _stage_inputs(model, packs, masks, temperature, True), ("logprobs_T",), training=True)[
        0
    ]


def score_values(model: RoleModel, packs: Sequence[Pack]) -> list[torch.Tensor]:
    """A critic's token-aligned values: fp32 CPU tensors [T] a pack, on every rank of the replica."""
    _require(model, SCALAR)
    return _score(model, packs, _stage_inputs(model, packs), ("values_T",))[0]


def score_values_and_ends(model: RoleModel, packs: Sequence[Pack]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """:func:`score_values`, and the value *after* each segment's last token, [rows of the pack] in ``rows`` order."""
    _require(model, SCALAR)
    values, heads = _score(model, packs, _stage_inputs(model, packs), ("values_T", "head_T"))
    return values, _at_ends(packs, heads)


def score_rewards(model: RoleModel, packs: Sequence[Pack]) -> list[torch.Tensor]:
    """A reward model's scores at each segment's last token: fp32 CPU tensors [rows of the pack], in ``rows`` order."""
    _require(model, SCALAR)
    return _at_ends(packs, _score(model, packs, _stage_inputs(model, packs), ("head_T",))[0])


def _at_ends(packs: Sequence[Pack], heads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    ends = [torch.tensor([end - 1 for _, _, end in pack.segments]) for pack in packs]
    return [head_T[end] for head_T, end in zip(heads, ends, strict=True)]


def compute_gradients(
    model: RoleModel,
    packs: Sequence[Pack],
    loss_fn: LossFunction,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    masks: Sequence[torch.Tensor] | None = None,
) -> dict[str, float]:
    """Fill ``main_grad`` of all parameters with the mean loss's gradient, on every rank; return the global sums."""
    inputs = _stage_inputs(model, packs, masks, temperature, with_entropy)
    sums = _accumulate(model, inputs, loss_fn, whole=True)
    if sums["count"]:
        model.chunks[0].scale_gradients(1.0 / sums["count"])
    return sums


def _accumulate(model: RoleModel, inputs: list[StageInput], loss_fn: LossFunction, *, whole: bool) -> dict[str, float]:
    """Gradient of the *summed* loss over packs and replicas in ``main_grad``; the global sums.

    Under the distributed optimizer a data-parallel rank has only its shard of it, unless ``whole``.
    """
    chunk = model.chunks[0]
    chunk.train()
    chunk.zero_grad_buffer()
    model.optimizer.zero_grad()  # type: ignore[union-attr]
    collected = _run_schedule(
        model, inputs, partial(_loss, loss_fn), forward_only=False, collect_non_loss_data=False, force_all_reduce=whole
    )
    return _global_sums(model, collected)


def train_step(
    model: RoleModel,
    packs: Sequence[Pack],
    loss_fn: LossFunction,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    masks: Sequence[torch.Tensor] | None = None,
) -> StepResult:
    """One optimizer step on ``packs`` of all replicas (each at least one), with clipping and the schedule's next lr.

    ``masks`` as for :func:`score_logprobs`.

    Raises:
        TrainingError: loss or gradient norm is not finite; on all ranks, and no parameter has moved.
    """
    sums = _accumulate(model, _stage_inputs(model, packs, masks, temperature, with_entropy), loss_fn, whole=False)
    optimizer, scheduler = model.optimizer, model.scheduler
    assert optimizer is not None and scheduler is not None
    lr = float(optimizer.param_groups[0]["lr"])
    if not math.isfinite(sums["loss"]):
        raise TrainingError(
            f"{model.name}: the loss is {sums['loss']} after {scheduler.num_steps} steps; no parameter was changed. "
            "Look at the step's data, or lower the learning rate"
        )
    if sums["count"] == 0:
        return StepResult(0.0, lr, True, sums)
    optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm()) / sums["count"]
    if not math.isfinite(grad_norm):
        raise TrainingError(
            f"{model.name}: the gradient norm is {grad_norm} after {scheduler.num_steps} steps (loss "
            f"{sums['loss'] / sums['count']:.4g}); no parameter was changed. Look at the step's data, or lower the "
            "learning rate"
        )
    _scale_and_clip(optimizer, sums["count"], grad_norm)
    optimizer.step_with_ready_grads()
    scheduler.step(increment=1)
    return StepResult(grad_norm, lr, False, sums)


# --------------------------------------------------------------------------- packs to stage inputs


def _stage_inputs(
    model: RoleModel,
    packs: Sequence[Pack],
    masks: Sequence[torch.Tensor] | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> list[StageInput]:
    multiple = model.topology.tp if model.config.sequence_parallel else 1
    device = next(model.module.parameters()).device
    inputs = []
    for index, pack in enumerate(packs):
        tokens, positions = pack.tokens_T, pack.position_ids_T
        bounds = sorted(set(pack.cu_seqlens.tolist()))
        pad = -tokens.numel() % multiple
        if pad:
            tokens = torch.cat((tokens, tokens.new_full((pad,), PAD_ID)))
            positions = torch.cat((positions, torch.arange(pad)))
            bounds.append(bounds[-1] + pad)
        wanted = torch.zeros(tokens.numel(), dtype=torch.bool)
        wanted[: pack.num_tokens] = True
        if masks is not None:
            wanted[: pack.num_tokens] &= masks[index][: pack.num_tokens].to("cpu", torch.bool)
        wanted[bounds[:-1]] = False  # the first token of a segment is predicted by nothing
        inputs.append(
            StageInput(
                tokens_T=tokens.to(device),
                position_ids_T=positions.to(device),
                plan=plan_segments(bounds, device),
                wanted_N=(wanted.nonzero().squeeze(1) - 1).to(device),
                temperature=temperature,
                with_entropy=with_entropy,
            )
        )
    return inputs


def _align(output: StageOutput, batch: StageInput) -> TokenOutput:
    """From positions that predict to tokens that are predicted."""

    def scatter(values_N: torch.Tensor) -> torch.Tensor:
        zeros_T = values_N.new_zeros(batch.tokens_T.numel())
        return zeros_T.index_copy(0, batch.wanted_N + 1, values_N)

    if output.head_T is not None:
        return TokenOutput(values_T=scatter(output.head_T[batch.wanted_N]), head_T=output.head_T)
    assert output.logprobs_N is not None
    entropy = None if output.entropy_N is None else scatter(output.entropy_N)
    return TokenOutput(logprobs_T=scatter(output.logprobs_N), entropy_T=entropy)


# --------------------------------------------------------------------------- running a schedule


def _run_schedule(
    model: RoleModel,
    inputs: list[StageInput],
    finish: Callable[..., Any],
    **options: Any,
) -> list[Any]:
    """Megatron's schedule over the micro-batches; what ``finish`` reports for each, on the last stage only."""

    def forward_step(batches: Iterator[tuple[int, StageInput]], chunk: torch.nn.Module) -> tuple[Any, Any]:
        index, batch = next(batches)
        return chunk(batch), partial(finish, batch, index)

    topology = model.topology
    communicator = {"p2p_communicator": topology.p2p_communicator(model.config)} if topology.pp > 1 else {}
    return get_forward_backward_func(pp_size=topology.pp)(
        forward_step_func=forward_step,
        data_iterator=iter(list(enumerate(inputs))),
        model=model.chunks,
        num_microbatches=len(inputs),
        seq_length=max(batch.tokens_T.numel() for batch in inputs),
        micro_batch_size=1,
        pg_collection=topology.pg,
        **communicator,
        **options,
    )


def _loss(
    loss_fn: LossFunction, batch: StageInput, index: int, output: StageOutput
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    terms = loss_fn(_align(output, batch), index)
    loss_sum = terms.loss_sum * math.nan if faults.poisons_loss() else terms.loss_sum
    device = loss_sum.device
    reported = {name: value.detach() for name, value in terms.sums.items()}
    reported["loss"] = loss_sum.detach()
    reported["count"] = torch.tensor(float(terms.count), device=device)
    return loss_sum, torch.tensor(terms.count, dtype=torch.int, device=device), reported


def _global_sums(model: RoleModel, collected: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Sums over micro-batches and data-parallel ranks, on every rank of the role."""
    topology = model.topology
    sums: dict[str, float] = {}
    if topology.is_last_stage:
        names = sorted(collected[0])
        totals = torch.stack([sum(terms[name].double() for terms in collected) for name in names])  # type: ignore[misc]
        dist.all_reduce(totals, group=topology.pg.dp)
        if topology.tp > 1:  # equal, unless one rank computes wrongly: then all must find the same fault
            dist.broadcast(totals, group=topology.pg.tp, group_src=0)
        sums = dict(zip(names, totals.tolist(), strict=True))
    if topology.pp > 1:
        box = [sums]
        dist.broadcast_object_list(box, src=topology.last_stage_rank, group=topology.pg.pp)
        sums = box[0]
    return sums


@contextmanager
def _mode(model: RoleModel, training: bool) -> Iterator[None]:
    """Training mode with gradients, or evaluation mode without; the mode of before comes back."""
    chunk, before = model.chunks[0], model.chunks[0].training
    chunk.train(training)
    try:
        with torch.set_grad_enabled(training):
            yield
    finally:
        chunk.train(before)


def _score(
    model: RoleModel,
    packs: Sequence[Pack],
    inputs: list[StageInput],
    kinds: tuple[str, ...],
    *,
    training: bool = False,
) -> list[list[torch.Tensor]]:
    """For each of ``kinds`` (fields of :class:`TokenOutput`) one fp32 CPU tensor [T] a pack."""
    if not inputs:
        return [[] for _ in kinds]

    def finish(batch: StageInput, index: int, output: StageOutput, non_loss_data: bool) -> torch.Tensor:
        aligned = _align(output, batch)
        return torch.stack([getattr(aligned, kind).detach()[: packs[index].tokens_T.numel()] for kind in kinds])

    with _mode(model, training):
        collected = _run_schedule(model, inputs, finish, forward_only=True, collect_non_loss_data=True)
    topology, lengths = model.topology, [pack.tokens_T.numel() for pack in packs]
    if topology.is_last_stage:
        joined = torch.cat(collected, dim=1)
    else:
        joined = torch.empty(len(kinds), sum(lengths), device=inputs[0].tokens_T.device)
    if topology.pp > 1:
        dist.broadcast(joined, src=topology.last_stage_rank, group=topology.pg.pp)
    return [list(row.split(lengths)) for row in joined.cpu()]


@torch.no_grad()
def _scale_and_clip(optimizer: Any, count: float, grad_norm: float) -> None:
    """From the gradient of the sum to that of the mean, of norm ``grad_norm``, clipped: one pass over the gradients."""
    clip = optimizer.config.clip_grad
    factor = min(1.0, clip / (grad_norm + 1e-6)) / count if clip > 0 else 1.0 / count
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    parameters = (parameter for part in chained for parameter in part.get_parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def _require(model: RoleModel, head: str) -> None:
    if model.head != head:
        raise ValueError(f"{model.name} has a {model.head} head; this needs a {head} head")

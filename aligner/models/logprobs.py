"""Log-probabilities and entropy from hidden states, with the vocabulary split over tensor-parallel ranks.

Invariants:

- No tensor of full vocabulary width exists on a rank when the tensor-parallel degree is above 1.
- Logits are computed in the weights' dtype; softmax, log and sums are fp32.
- Work goes in chunks of rows: the forward pass keeps three numbers a row, the backward pass computes a chunk's logits
  again. No copy of all logits is kept.
- Padded vocabulary ids take no part: their rows of the weight are never read, their gradient is zero.
- A trained weight's gradient is added to ``main_grad``, Megatron's fp32 buffer, chunk by chunk.
- Only the given process group is used, so a role may have another layout than the global one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from aligner.models.data_parallel import gradient_buffer

CHUNK_ELEMENTS = 1 << 25  # logits of one chunk on this rank (128 MiB in fp32)
BLOCK_ROWS = 4096  # rows of the weight whose gradient is added at a time when it has to be cast


def _chunks(rows: int, width: int) -> list[slice]:
    """Row slices of nearly equal size with at most ``CHUNK_ELEMENTS`` logits each."""
    count = max(1, -(-rows * max(width, 1) // CHUNK_ELEMENTS))
    size = max(1, -(-rows // count))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _scaled_logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = torch.matmul(hidden, weight.t()).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _merge(stats: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Combine [4, N] rows (maximum, sum of exp, sum of exp * logit, target logit) of all ranks of ``group``.

    Sums and logits are relative to the row's maximum; the target logit is absolute, 0 where the target is elsewhere.
    """
    if group.size() == 1:
        return stats
    maximum = stats[0].clone()
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    shift = stats[0] - maximum  # -inf on a rank that holds only padded ids
    scale = shift.exp()
    weighted = torch.where(scale > 0, scale * (stats[2] + shift * stats[1]), torch.zeros_like(scale))
    sums = torch.stack((scale * stats[1], weighted, stats[3]))
    dist.all_reduce(sums, group=group)
    return torch.cat((maximum[None], sums))


class _LogProbs(torch.autograd.Function):
    """(hidden [N, h], parameter [V_local, h] of which ``real`` rows count) -> (log-probs [N], entropy [N] or empty)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        parameter: torch.Tensor,
        real: int,
        labels: torch.Tensor,
        temperature: float,
        with_entropy: bool,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``labels`` [N]: ids relative to this rank's first; outside of [0, real) they belong to another rank."""
        weight = parameter[:real]
        rows, width = hidden.size(0), real
        stats = hidden.new_zeros((4, rows), dtype=torch.float32)
        stats[0].fill_(float("-inf"))
        mine = (labels >= 0) & (labels < width)
        local = labels.clamp(0, max(width - 1, 0))
        for part in _chunks(rows, width) if width else ():
            logits = _scaled_logits(hidden[part], weight, temperature)
            target = logits.gather(1, local[part, None]).squeeze(1)
            maximum = logits.amax(-1)
            logits.sub_(maximum[:, None])
            if with_entropy:
                exp = logits.exp()
                stats[2, part] = torch.linalg.vecdot(exp, logits)
            else:
                exp = logits.exp_()
            stats[0, part], stats[1, part] = maximum, exp.sum(-1)
            stats[3, part] = torch.where(mine[part], target, torch.zeros_like(target))
        maximum, total, weighted, target = _merge(stats, group)
        logsumexp = maximum + total.log()
        entropy = total.log() - weighted / total if with_entropy else total.new_zeros(0)
        ctx.save_for_backward(hidden, weight, local, mine, logsumexp, entropy)
        ctx.temperature, ctx.parameter = temperature, parameter
        return target - logsumexp, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """d logp/d z = onehot - p, d H/d z = -p (log p + H). The gradient of hidden is this rank's part of a sum."""
        hidden, weight, local, mine, logsumexp, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        parts = _chunks(hidden.size(0), weight.size(0)) if weight.size(0) else []
        grad_weight = _weight_gradient(ctx.parameter) if ctx.needs_input_grad[1] else None
        at_target = torch.where(mine, grad_logprobs, torch.zeros_like(grad_logprobs))
        for part in parts:
            logits = _scaled_logits(hidden[part], weight, ctx.temperature)
            logits.sub_(logsumexp[part, None])
            if entropy.numel():
                factor = (logits + entropy[part, None]).mul_(grad_entropy[part, None]).add_(grad_logprobs[part, None])
                grad = logits.exp_().mul_(factor).neg_()
            else:
                grad = logits.exp_().mul_(-grad_logprobs[part, None])
            grad.scatter_add_(1, local[part, None], at_target[part, None])
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
            grad_logits = grad.to(weight.dtype)
            torch.matmul(grad_logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight[: weight.size(0)], grad_logits, hidden[part])
        if grad_weight is None or hasattr(ctx.parameter, "main_grad"):
            return grad_hidden, None, None, None, None, None, None
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _add_product(total_VH: torch.Tensor, grad_NV: torch.Tensor, hidden_NH: torch.Tensor) -> None:
    """``total += grad.T @ hidden``, without a temporary of the weight's size."""
    if total_VH.dtype == grad_NV.dtype:
        total_VH.addmm_(grad_NV.t(), hidden_NH)
        return
    for rows, columns in zip(total_VH.split(BLOCK_ROWS), grad_NV.split(BLOCK_ROWS, dim=1), strict=True):
        rows.add_(torch.mm(columns.t(), hidden_NH))


def _weight_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What the gradient is added to: the parameter's ``main_grad``, or a new fp32 tensor without Megatron's buffers."""
    if hasattr(parameter, "main_grad"):
        return gradient_buffer(parameter)
    return torch.zeros_like(parameter, dtype=torch.float32)


def vocab_parallel_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float,
    with_entropy: bool,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log softmax(hidden @ weight.T / temperature) at ``labels``, and the entropy of that distribution.

    Args:
        hidden_NH: [N, h], equal on all ranks of ``group``; its gradient is partial and must be summed over ``group``
            (``copy_to_tensor_model_parallel_region`` or the sequence-parallel gather in front of it do so).
        weight_VH: this rank's rows of the (padded) output matrix.
        labels_N: int64 global ids, each below ``vocab_size``.
        vocab_size: real ids; rows of the weight beyond it are padding.

    Returns:
        fp32 log-probs [N] and entropy [N] in nats (None unless asked for), equal on all ranks of ``group``.
    """
    start = group.rank() * weight_VH.size(0)
    real = min(max(vocab_size - start, 0), weight_VH.size(0))
    logprobs, entropy = _LogProbs.apply(hidden_NH, weight_VH, real, labels_N - start, temperature, with_entropy, group)
    return logprobs, entropy if with_entropy else None

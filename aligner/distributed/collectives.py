"""Collectives on CPU values: agreement before acting, and gathering what each rank computed.

All are collective over all ranks (or over ``group``): every rank calls them in the same order. They work on CPU
tensors and plain objects on every platform. Sums run in rank order in double precision, so every rank gets the
same bits.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from aligner.errors import RankFailure

T = TypeVar("T")


def agree(error: BaseException | None = None) -> None:
    """Go on only if no rank brings an error.

    Raises:
        The given error itself on a rank that brings one; :class:`RankFailure` with the first such rank's message on
        the others. So no rank is left alone in the next collective.
    """
    if not any_true(error is not None):
        return
    messages = all_gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed, message = next((rank, message) for rank, message in enumerate(messages) if message is not None)
    raise RankFailure(f"rank {failed} failed, so this rank stops too: {message}")


def on_all_ranks(action: Callable[[], T]) -> T:
    """``action()`` of each rank; when it fails on any rank, all ranks fail together (see :func:`agree`)."""
    error: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except Exception as found:
        error = found
    agree(error)
    return cast(T, result)


def any_true(flag: bool) -> bool:
    """Whether ``flag`` is true on any rank."""
    return any_of(flag)[0]


def any_of(*flags: bool) -> list[bool]:
    """For each of ``flags`` whether it is true on any rank; one all-reduce for all of them."""
    votes = torch.tensor([int(flag) for flag in flags], dtype=torch.int32)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return [bool(vote) for vote in votes.tolist()]


def barrier() -> None:
    """Wait until every rank is here (through CPU collectives: no device is touched)."""
    any_true(False)


def broadcast_object(obj: T, src: int = 0) -> T:
    """Rank ``src``'s object (pickled; ranks trust each other) on every rank."""
    box = [obj]
    dist.broadcast_object_list(box, src=src, device=torch.device("cpu"))
    return box[0]


def all_gather_objects(obj: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's object, in rank order of ``group``."""
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([data.numel()]), group=group)
    longest = int(max(length.item() for length in lengths))
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(parts, torch.nn.functional.pad(data, (0, longest - data.numel())), group=group)
    return [pickle.loads(part[: int(length)].numpy().tobytes()) for part, length in zip(parts, lengths, strict=True)]


def all_reduce_sums(sums: Mapping[str, float], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Sums over the ranks of ``group``, key by key; a key that some ranks lack counts 0 there.

    The result has every key that any rank has, sorted.
    """
    gathered = all_gather_objects({name: float(value) for name, value in sums.items()}, group)
    names = sorted({name for rank_sums in gathered for name in rank_sums})
    return {name: sum(rank_sums.get(name, 0.0) for rank_sums in gathered) for name in names}


def all_gather_rows(
    local_rows: Sequence[int],
    values: torch.Tensor,
    num_rows: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Put together the rows that each rank of ``group`` computed.

    Args:
        local_rows: which rows of the result this rank has; over the group each of ``range(num_rows)`` exactly once.
        values: [len(local_rows), ...] on the CPU, with equal trailing shape and type on all ranks.
        num_rows: rows of the result.

    Returns:
        [num_rows, ...] on every rank.

    Raises:
        ValueError: on every rank of the group, when rows are missing or doubled or shapes differ.
    """
    heads = all_gather_objects((list(local_rows), tuple(values.shape), values.dtype), group)
    rows = [row for rank_rows, _, _ in heads for row in rank_rows]
    if sorted(rows) != list(range(num_rows)):
        raise ValueError(f"ranks hold rows {sorted(rows)}, but each of 0..{num_rows - 1} is needed exactly once")
    if len({(shape[1:], dtype) for _, shape, dtype in heads}) != 1 or any(len(r) != s[0] for r, s, _ in heads):
        raise ValueError(f"rows of different shapes or types on different ranks: {[head[1:] for head in heads]}")
    longest = max(len(rank_rows) for rank_rows, _, _ in heads)
    flat = values.detach().contiguous().reshape(len(local_rows), math.prod(values.shape[1:])).view(torch.uint8)
    padded = torch.zeros((longest, flat.shape[1]), dtype=torch.uint8)
    padded[: len(local_rows)] = flat
    parts = [torch.empty_like(padded) for _ in heads]
    dist.all_gather(parts, padded, group=group)
    result = torch.empty((num_rows, *values.shape[1:]), dtype=values.dtype)
    for (rank_rows, shape, dtype), part in zip(heads, parts, strict=True):
        if rank_rows:
            result[rank_rows] = part[: len(rank_rows)].view(dtype).reshape(shape)
    return result

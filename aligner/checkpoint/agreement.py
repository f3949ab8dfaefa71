"""Actions that all ranks take together or not at all, with file errors as :class:`CheckpointError`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from aligner.distributed import collectives, platform
from aligner.errors import CheckpointError

T = TypeVar("T")


def together(action: Callable[[], T]) -> T:
    """``action()`` of each rank; when it fails on any, all ranks raise. OSErrors become :class:`CheckpointError`."""

    def run() -> T:
        try:
            return action()
        except OSError as error:
            raise CheckpointError(f"checkpoint: {error}") from error

    return collectives.on_all_ranks(run)


def on_first(action: Callable[[], T]) -> T:
    """``action()`` of rank 0, its result on every rank; when it fails, all ranks raise. Collective."""

    def run() -> T | None:
        return action() if platform.rank() == 0 else None

    return cast(T, collectives.broadcast_object(together(run)))


def failures(error: BaseException | str | None) -> str:
    """What went wrong on the ranks that bring an error, the same text on every rank; "" when none does. Collective."""
    text = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error or ""
    if not collectives.any_true(bool(text)):
        return ""
    found = [(rank, text) for rank, text in enumerate(collectives.all_gather_objects(text)) if text]
    first = f"rank {found[0][0]}: {found[0][1]}"
    return first if len(found) == 1 else f"{first} (and {len(found) - 1} more ranks)"


def gather_on_first(obj: T) -> list[T]:
    """Every rank's object, in rank order, on rank 0; an empty list on the others. Collective."""
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(platform.world_size())]
    dist.all_gather(lengths, torch.tensor([data.numel()]))
    longest = int(max(length.item() for length in lengths))
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in lengths] if platform.rank() == 0 else None
    dist.gather(torch.nn.functional.pad(data, (0, longest - data.numel())), parts, dst=0)
    return [pickle.loads(part[: int(n)].numpy().tobytes()) for part, n in zip(parts or (), lengths, strict=False)]

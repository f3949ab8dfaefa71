"""Packing: several samples in one micro-batch row, kept apart by ``cu_seqlens``. Pure functions.

Shapes: T is the pack's padded length, S its number of segments (the padding, if any, is one more segment at the
end). Lengths decide what is real; token ids never do (pad may equal eos).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PAD_ID = 0  # what fills the tail of a pack; never looked at


@dataclass(frozen=True)
class Pack:
    """One micro-batch.

    tokens_T: int64, position_ids_T: int64 (restart at 0 in each segment), cu_seqlens: int32 [S+1 (+1 when padded)],
    rows: for each real segment the index of its sample in the caller's list, num_tokens: real tokens (<= T).
    """

    tokens_T: torch.Tensor
    position_ids_T: torch.Tensor
    cu_seqlens: torch.Tensor
    rows: tuple[int, ...]
    num_tokens: int

    @property
    def segments(self) -> list[tuple[int, int, int]]:
        """(row, start, end) of each real segment."""
        bounds = self.cu_seqlens.tolist()
        return [(row, bounds[i], bounds[i + 1]) for i, row in enumerate(self.rows)]


def plan_packs(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Group rows into packs of at most ``capacity`` tokens: first-fit decreasing, deterministic.

    A row longer than ``capacity`` gets a pack of its own. Within a pack rows keep their order; packs are ordered by
    their first row.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    packs: list[list[int]] = []
    room: list[int] = []
    for row in order:
        for i, free in enumerate(room):
            if lengths[row] <= free:
                packs[i].append(row)
                room[i] -= lengths[row]
                break
        else:
            packs.append([row])
            room.append(capacity - lengths[row])
    return sorted((sorted(rows) for rows in packs), key=lambda rows: rows[0])


def build_pack(sequences: Sequence[torch.Tensor], rows: Sequence[int], multiple_of: int = 1) -> Pack:
    """Concatenate ``sequences[row]`` for ``rows``; pad the tail so that T is a multiple of ``multiple_of``."""
    parts = [sequences[row] for row in rows]
    lengths = [int(part.numel()) for part in parts]
    num_tokens = sum(lengths)
    pad = -num_tokens % multiple_of
    bounds = [0]
    for length in [*lengths, *([pad] if pad else [])]:
        bounds.append(bounds[-1] + length)
    positions = [torch.arange(length) for length in lengths]
    if pad:
        parts = [*parts, torch.full((pad,), PAD_ID)]
        positions.append(torch.arange(pad))
    return Pack(
        tokens_T=torch.cat([part.to(torch.int64) for part in parts]),
        position_ids_T=torch.cat(positions),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        rows=tuple(rows),
        num_tokens=num_tokens,
    )


def pack_sequences(sequences: Sequence[torch.Tensor], capacity: int, multiple_of: int = 1) -> list[Pack]:
    """:func:`plan_packs` and :func:`build_pack` in one: every sequence lands in exactly one pack."""
    plans = plan_packs([int(s.numel()) for s in sequences], capacity)
    return [build_pack(sequences, rows, multiple_of) for rows in plans]


def gather_rows(packs: Sequence[Pack], values: Sequence[torch.Tensor], num_rows: int, width: int) -> torch.Tensor:
    """Scatter per-pack values [T] back to rows: [num_rows, width], zero where a row is shorter than ``width``."""
    first = values[0] if values else torch.zeros(0)
    out = torch.zeros(num_rows, width, dtype=first.dtype)
    for pack, value_T in zip(packs, values, strict=True):
        for row, start, end in pack.segments:
            out[row, : end - start] = value_T[start:end]
    return out


def pack_rows(pack: Pack, values_NT: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`gather_rows` for one pack: ``values_NT[row, :length]`` laid out as [T], zero in the padding."""
    out = torch.zeros(pack.tokens_T.numel(), dtype=values_NT.dtype)
    for row, start, end in pack.segments:
        out[start:end] = values_NT[row, : end - start]
    return out

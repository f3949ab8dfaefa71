"""Scoring a rollout with models: every role computes the rows of its own data-parallel rank, then all share them.

Shapes: B samples of the global batch, T its longest sequence; sequences are token-id tensors without padding.
Results are fp32 CPU tensors that are equal on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aligner.data.loader import rows_of_rank
from aligner.data.packing import Pack, gather_rows
from aligner.distributed.collectives import all_gather_rows
from aligner.distributed.topology import Topology
from aligner.models.forward import score_logprobs, score_values
from aligner.models.packs import pack_for
from aligner.models.role_model import RoleModel


@dataclass(frozen=True)
class RoleRows:
    """The rows of a global batch that one role computes on this rank, packed."""

    rows: list[int]  # global row of each local sequence
    packs: list[Pack]  # their ``rows`` index into ``self.rows``


def rows_for_role(topology: Topology, sequences: Sequence[torch.Tensor], pack_length: int) -> RoleRows:
    """This rank's share of ``sequences`` under the role's own layout."""
    rows = rows_of_rank(sequences, topology.dp_rank, topology.dp)
    return RoleRows(rows, pack_for(topology, [sequences[row] for row in rows], pack_length))


def logprobs_of(
    model: RoleModel, sequences: Sequence[torch.Tensor], *, temperature: float, pack_length: int
) -> torch.Tensor:
    """[B, T] log p(token) under ``model`` at ``temperature`` (full softmax)."""
    share = rows_for_role(model.topology, sequences, pack_length)
    per_pack = score_logprobs(model, share.packs, temperature=temperature)
    return _share(model.topology, share, per_pack, sequences)


def values_of(
    model: RoleModel, sequences: Sequence[torch.Tensor], *, pack_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T] value of each token (predicted before it is seen) and [B] value after the last token."""
    share = rows_for_role(model.topology, sequences, pack_length)
    scored = score_values(model, share.packs)
    values_BT = _share(model.topology, share, [value.values_T for value in scored], sequences)
    last_N1 = torch.zeros(len(share.rows), 1)
    for pack, value in zip(share.packs, scored, strict=True):
        for (row, _, end), _unused in zip(pack.segments, pack.rows, strict=True):
            last_N1[row, 0] = value.head_T[end - 1]
    group = model.topology.pg.dp
    last_B = all_gather_rows(share.rows, last_N1, len(sequences), group)[:, 0]
    return values_BT, last_B


def _share(
    topology: Topology, share: RoleRows, per_pack: Sequence[torch.Tensor], sequences: Sequence[torch.Tensor]
) -> torch.Tensor:
    width = max(int(sequence.numel()) for sequence in sequences)
    local = gather_rows(share.packs, per_pack, len(share.rows), width)
    return all_gather_rows(share.rows, local, len(sequences), topology.pg.dp)

"""Scoring a rollout with models: every role computes the rows of its own data-parallel rank, then all share them.

Shapes: B samples of the global batch, T its longest sequence; sequences are token-id tensors without padding.
Results are fp32 CPU tensors that are equal on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aligner.data.loader import rows_of_rank
from aligner.data.packing import Pack, gather_rows, pack_rows
from aligner.distributed.collectives import all_gather_rows
from aligner.distributed.topology import Topology
from aligner.models.forward import score_logprobs, score_values_and_ends
from aligner.models.packs import pack_for
from aligner.models.role_model import RoleModel
from aligner.rollout.batch import RolloutBatch


@dataclass(frozen=True)
class RoleRows:
    """The rows of a global batch that one role computes on this rank, packed."""

    rows: list[int]  # global row of each local sequence
    packs: list[Pack]  # their ``rows`` index into ``self.rows``


def rows_for_role(topology: Topology, sequences: Sequence[torch.Tensor], pack_length: int) -> RoleRows:
    """This rank's share of ``sequences`` under the role's own layout."""
    rows = rows_of_rank(sequences, topology.dp_rank, topology.dp)
    return RoleRows(rows, pack_for(topology, [sequences[row] for row in rows], pack_length))


def logprobs_of(model: RoleModel, batch: RolloutBatch, *, temperature: float, pack_length: int) -> torch.Tensor:
    """[B, T] log p(token) under ``model`` at ``temperature`` of the tokens that the policy wrote, else 0."""
    share = rows_for_role(model.topology, batch.sequences(), pack_length)
    masks = per_pack(share, batch.loss_mask_BT)
    scored = score_logprobs(model, share.packs, temperature=temperature, masks=masks)
    return _all_rows(model.topology, share, scored, batch)


def logprobs_and_entropy_of(
    model: RoleModel, batch: RolloutBatch, *, temperature: float, pack_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`logprobs_of`, the same bits, and [B, T] the entropy in nats of the distribution that each token is of."""
    share = rows_for_role(model.topology, batch.sequences(), pack_length)
    masks = per_pack(share, batch.loss_mask_BT)
    scored = score_logprobs(model, share.packs, temperature=temperature, masks=masks, with_entropy=True)
    logprobs_BT, entropy_BT = (_all_rows(model.topology, share, one, batch) for one in scored)
    return logprobs_BT, entropy_BT


def values_of(model: RoleModel, batch: RolloutBatch, *, pack_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T] value of each token (predicted before it is seen) and [B] value after the last token."""
    share = rows_for_role(model.topology, batch.sequences(), pack_length)
    values, ends = score_values_and_ends(model, share.packs)
    values_BT = _all_rows(model.topology, share, values, batch)
    last_N = torch.zeros(len(share.rows))
    for pack, end_S in zip(share.packs, ends, strict=True):
        last_N[list(pack.rows)] = end_S
    return values_BT, all_gather_rows(share.rows, last_N, len(batch), model.topology.pg.dp)


def per_pack(share: RoleRows, values_BT: torch.Tensor) -> list[torch.Tensor]:
    """[T] values of each pack of ``share``, from rows of the global batch."""
    local = values_BT[torch.tensor(share.rows, dtype=torch.int64)]
    return [pack_rows(pack, local) for pack in share.packs]


def _all_rows(topology: Topology, share: RoleRows, scored: Sequence[torch.Tensor], batch: RolloutBatch) -> torch.Tensor:
    local = gather_rows(share.packs, scored, len(share.rows), batch.tokens_BT.shape[1])
    return all_gather_rows(share.rows, local, len(batch), topology.pg.dp)

"""This rank's micro-batches of SFT and reward-model training: counting their tokens, and keeping them on failure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from aligner.data.packing import Pack
from aligner.distributed.collectives import all_reduce_sums
from aligner.distributed.topology import Topology


def count_tokens(packs: Sequence[Pack], topology: Topology) -> int:
    """Real tokens of the packs of all data-parallel ranks, padding excluded. Collective."""
    mine = float(sum(pack.num_tokens for pack in packs))
    return int(all_reduce_sums({"tokens": mine}, topology.pg.dp)["tokens"])


def save_packs(
    directory: Path,
    packs: Sequence[Pack],
    sources: Sequence[str],
    loss_masks: Sequence[torch.Tensor] | None = None,
) -> None:
    """Keep this rank's micro-batches, so that their loss can be computed again.

    ``micro_batches.safetensors`` holds ``<i>.tokens``, ``<i>.cu_seqlens`` (the last segment may be padding) and, where
    tokens are what is counted, ``<i>.loss_mask`` of micro-batch i. ``sources.json`` lists for each micro-batch the
    ``file:line`` of each real segment, in order; ``sources`` has them by row of the packs.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for i, pack in enumerate(packs):
        tensors[f"{i}.tokens"], tensors[f"{i}.cu_seqlens"] = pack.tokens_T, pack.cu_seqlens
        if loss_masks is not None:
            tensors[f"{i}.loss_mask"] = loss_masks[i]
    save_file(tensors, directory / "micro_batches.safetensors")
    places = [[sources[row] for row in pack.rows] for pack in packs]
    (directory / "sources.json").write_text(json.dumps(places, indent=1) + "\n", encoding="utf-8")

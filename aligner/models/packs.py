"""Packs in the shape a model's layout needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aligner.data.packing import Pack, pack_sequences
from aligner.distributed.topology import Topology


def pack_multiple(topology: Topology) -> int:
    """Sequence parallelism splits a pack evenly over the tensor-parallel ranks."""
    return topology.degrees.tp if topology.degrees.sequence_parallel else 1


def pack_for(topology: Topology, sequences: Sequence[torch.Tensor], pack_length: int) -> list[Pack]:
    """Pack this rank's ``sequences`` into micro-batches of at most ``pack_length`` tokens."""
    return pack_sequences(sequences, pack_length, pack_multiple(topology))

"""Packs in the shape a model's layout needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from aligner.data.packing import Pack, pack_sequences
from aligner.distributed.topology import Topology

ALIGNMENT = 32  # tokens; few different lengths mean few kernels to prepare and little memory fragmentation


def pack_multiple(topology: Topology) -> int:
    """What a pack's length is a multiple of: sequence parallelism splits it evenly over the tensor-parallel ranks."""
    return math.lcm(ALIGNMENT, topology.degrees.tp if topology.degrees.sequence_parallel else 1)


def pack_for(topology: Topology, sequences: Sequence[torch.Tensor], pack_length: int) -> list[Pack]:
    """Pack this rank's ``sequences`` into micro-batches of at most ``pack_length`` tokens."""
    return pack_sequences(sequences, pack_length, pack_multiple(topology))

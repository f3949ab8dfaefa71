"""Keys and values of running sequences, in one preallocated tensor.

Token-major: the fused QKV projection's key and value of one token are written with one copy, and the keys of a slot
are a strided view that attention reads in place.
"""

from __future__ import annotations

import torch

_GROWTH = 64  # positions cleared at a time


class KVCache:
    """Layout [layers, slots, positions, KV heads, 2 (key, value), head dimension].

    Address space is taken at once, memory as it is used: :meth:`ensure` clears what a step may read (masked positions
    are multiplied by zero, so they must hold numbers).
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_slots, max_length, num_kv_heads, 2, head_dim)
        self.max_length = max_length
        self._clear_slots = self._clear_length = 0
        self.tensor = torch.empty(shape, dtype=dtype, device=device)
        # Per-layer views, made once: indexing in the decode loop costs more than the write itself.
        self._rows = [layer.view(num_slots * max_length, -1) for layer in self.tensor.unbind(0)]
        self._keys = [layer[:, :, :, 0].transpose(1, 2) for layer in self.tensor.unbind(0)]
        self._values = [layer[:, :, :, 1].transpose(1, 2) for layer in self.tensor.unbind(0)]

    def ensure(self, slots: int, length: int) -> None:
        """Make the first ``length`` positions of the first ``slots`` slots readable. Written ones are not touched."""
        if slots > self._clear_slots:
            self.tensor[:, self._clear_slots : slots, : self._clear_length].zero_()
            self._clear_slots = slots
        if length > self._clear_length:
            length = min(self.max_length, -(-length // _GROWTH) * _GROWTH)
            self.tensor[:, : self._clear_slots, self._clear_length : length].zero_()
            self._clear_length = length

    def row(self, slot: int, position: int) -> int:
        """Index of a token for :meth:`write`."""
        return slot * self.max_length + position

    def write(self, layer: int, rows_N: torch.Tensor, kv_NKCD: torch.Tensor) -> None:
        """Store key and value [N, KV heads, 2, head dimension] of N tokens at ``rows_N`` (see :meth:`row`)."""
        self._rows[layer].index_copy_(0, rows_N, kv_NKCD.reshape(kv_NKCD.shape[0], -1))

    def read(self, layer: int, first: int, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (views) of ``count`` slots from ``first``: each [count, KV heads, length, head dimension]."""
        end = first + count
        return self._keys[layer][first:end, :, :length], self._values[layer][first:end, :, :length]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of slot ``source`` to slot ``target``."""
        self.tensor[:, target, :length].copy_(self.tensor[:, source, :length])

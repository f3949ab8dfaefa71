"""Which samples make up which global batch: a pure function of (seed, epoch, position), and one integer of state.

Invariants: the order does not depend on the number of ranks, on the batch size or on library versions; every epoch
visits every sample once; a global batch may begin in one epoch and end in the next; resuming is setting the cursor.
Another data set or seed is another order: it is read from its beginning, wherever the order before it ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aligner.errors import DataError

_MASK = (1 << 64) - 1


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of ``range(num_samples)``: samples sorted by a keyed 64-bit hash of their index.

    int64 or, below 2**31 samples, int32 [num_samples]. About a second for 10 million samples. The hash is SplitMix64
    (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195), written out here so that no library release changes it.
    """
    key = _mix(_mix(np.array([seed & _MASK], dtype=np.uint64)) ^ np.array([epoch & _MASK], dtype=np.uint64))
    keys = _mix(np.arange(num_samples, dtype=np.uint64) + _mix(key))
    order = np.argsort(keys, kind="stable")
    return order.astype(np.int32) if num_samples < 1 << 31 else order


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output for states ``x`` (uint64, arithmetic modulo 2**64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class ShardedOrder:
    """The stream of global batches over a data set of ``num_samples``. Every rank holds an equal copy.

    ``cursor`` is the number of samples handed out since the start of training, over all epochs and data sets;
    ``origin`` is where in that count the data set of now began.
    """

    def __init__(self, num_samples: int, global_batch_size: int, seed: int, fingerprint: str = "") -> None:
        """``fingerprint`` tells the data set from others of the same size."""
        if num_samples < 1:
            raise DataError("empty data set: there is no sample to draw; check the data path and filters")
        if global_batch_size < 1:
            raise DataError(f"global batch size is {global_batch_size}; it must be at least 1")
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.fingerprint = fingerprint
        self.cursor = 0
        self.origin = 0
        self._order: tuple[int, np.ndarray] | None = None  # (epoch, its permutation)

    @property
    def epoch(self) -> float:
        """Epochs of the data set handed out so far."""
        return (self.cursor - self.origin) / self.num_samples

    def next_batch(self) -> list[int]:
        """Data-set indices of the next global batch, [global_batch_size]; moves the cursor."""
        indices: list[int] = []
        while len(indices) < self.global_batch_size:
            epoch, position = divmod(self.cursor - self.origin + len(indices), self.num_samples)
            take = self.global_batch_size - len(indices)
            indices += self._epoch(epoch)[position : position + take].tolist()
        self.cursor += self.global_batch_size
        return indices

    def _epoch(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, epoch_order(self.num_samples, self.seed, epoch))
        return self._order[1]

    def state_dict(self) -> dict[str, Any]:
        """The cursor, and what it is a cursor of."""
        return {"cursor": self.cursor, "origin": self.origin, **self._order_key()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved cursor. One of another order (whether that is meant is checked elsewhere) begins there.

        Another batch size goes on where the old one ended: the cursor counts samples.
        """
        self.cursor = int(state["cursor"])
        is_same = all(state[name] == value for name, value in self._order_key().items())
        self.origin = int(state["origin"]) if is_same else self.cursor

    def _order_key(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples, "seed": self.seed, "fingerprint": self.fingerprint}


def rows_of_rank(indices: Sequence[Any], dp_rank: int, dp: int) -> list[int]:
    """Rows of the global batch that a data-parallel rank works on: row i belongs to rank ``i % dp``.

    Returns positions in ``indices`` (not the data-set indices themselves), so that results can be put back in order.
    """
    return list(range(dp_rank, len(indices), dp))

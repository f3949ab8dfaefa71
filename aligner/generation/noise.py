"""Keyed Gumbel noise: a pure function of (seed, position, global vocabulary id), with cheap exact bounds.

Gumbel-max samples id ``i`` with probability softmax(l)_i as ``argmax_i (l_i + g_i)``, ``g_i = -log t_i`` with t_i
independent and Exp(1). Drawing t for a whole vocabulary is the expensive part, so it is drawn in blocks of
``BLOCK`` ids, top down (the Gumbel process of Maddison et al. 2014, "A* sampling", arXiv:1411.0030). The smallest of
n independent Exp(1) is Exp(1)/n, falls on each of the n ids equally often, and (memoryless) every other t is the
smallest plus a fresh Exp(1):

    t_i = E_block / BLOCK + (0 if i is the block's first id else E_i)

so one hash a block bounds the noise of all its ids from above, and only blocks that can still win are expanded.
Nothing here depends on the batch, the layout, or a generator. Integer arithmetic is modulo 2**64 (two's complement).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

BLOCK = 64  # ids that share one bound; a power of two


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_BLOCK_COUNTER = 1 << 40  # block counters start above every vocabulary id
# SplitMix64's finaliser (Steele et al. 2014): (right shift, mask of the bits a logical shift keeps, multiplier).
_ROUNDS = (
    (30, (1 << 34) - 1, _signed(0xBF58476D1CE4E5B9)),
    (27, (1 << 37) - 1, _signed(0x94D049BB133111EB)),
)


def _mix_(x: torch.Tensor) -> torch.Tensor:
    for shift, mask, multiplier in _ROUNDS:
        x ^= (x >> shift) & mask
        x *= multiplier
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x


def seed_tensor(seeds: Sequence[int]) -> torch.Tensor:
    """Seeds (any integers, taken modulo 2**64) as int64 [B]."""
    return torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64)


def row_keys(seeds_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
    """One int64 key per (seed, position)."""
    keys_B = _mix_(seeds_B + _GAMMA)
    return _mix_(keys_B + (positions_B + 1) * _GAMMA)


def _draw(keys: torch.Tensor, counters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Exp(1) draws (float64) and the raw hashes, of ``keys`` broadcast against ``counters``."""
    hashes = _mix_(keys + (counters + 1) * _GAMMA)
    uniform = ((hashes >> 11) & ((1 << 53) - 1)).double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_(), hashes


def block_bounds(keys_B: torch.Tensor, first_block: int, num_blocks: int) -> torch.Tensor:
    """The largest noise in each block of ids: float32 [B, num_blocks]."""
    counters = torch.arange(first_block, first_block + num_blocks, device=keys_B.device) + _BLOCK_COUNTER
    draws, _ = _draw(keys_B[:, None], counters[None])
    return draws.log_().neg_().add_(math.log(BLOCK)).float()


def block_noise(keys_N: torch.Tensor, blocks_N: torch.Tensor) -> torch.Tensor:
    """The noise of all ids of block ``blocks_N[n]`` under key ``keys_N[n]``: float32 [N, BLOCK]."""
    smallest_N, hashes_N = _draw(keys_N, blocks_N + _BLOCK_COUNTER)
    lanes = torch.arange(BLOCK, device=keys_N.device)
    extra, _ = _draw(keys_N[:, None], blocks_N[:, None] * BLOCK + lanes)
    extra.masked_fill_(lanes == (hashes_N & (BLOCK - 1))[:, None], 0.0)
    # -log(E / BLOCK) is written as log(BLOCK) - log(E) on both sides, so that bounds are met exactly.
    return extra.mul_(BLOCK).add_(smallest_N[:, None]).log_().neg_().add_(math.log(BLOCK)).float()


def vocabulary_noise(keys_B: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The whole noise, float32 [B, vocab_size]: the definition that samplers must agree with."""
    num_blocks = -(-vocab_size // BLOCK)
    blocks = torch.arange(num_blocks, device=keys_B.device).repeat(keys_B.numel())
    noise = block_noise(keys_B.repeat_interleave(num_blocks), blocks)
    return noise.view(keys_B.numel(), num_blocks * BLOCK)[:, :vocab_size]

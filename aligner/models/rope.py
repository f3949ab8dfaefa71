"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) with the frequencies of the HF config.

Megatron hard-codes all constants of llama3 scaling but the factor, so the inverse frequencies are computed here.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from aligner.config.hf_config import Architecture, Llama3Scaling


def inverse_frequencies(arch: Architecture) -> torch.Tensor:
    """Inverse frequencies, fp32 [head_dim / 2], after the config's scaling."""
    exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).to(torch.float32) / arch.head_dim
    frequencies = 1.0 / (arch.rope_theta**exponents)
    return frequencies if arch.rope_scaling is None else _scale_llama3(frequencies, arch.rope_scaling)


def _scale_llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Llama 3.1: long wavelengths are divided by ``factor``, short ones kept, those between interpolated."""
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    long, short = context / scaling.low_freq_factor, context / scaling.high_freq_factor
    scaled = torch.where(wavelengths > long, frequencies / scaling.factor, frequencies)
    smooth = (context / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    is_between = ~(wavelengths < short) & ~(wavelengths > long)
    return torch.where(is_between, between, scaled)


class RotaryTable:
    """Cosines and sines by position, grown on demand and kept on ``device`` in fp32."""

    def __init__(self, arch: Architecture, device: torch.device) -> None:
        self.inverse_frequencies = inverse_frequencies(arch).to(device)
        self._angles = torch.zeros(0, arch.head_dim // 2, device=device)
        self._cos = self._sin = self._angles

    def _grow(self, length: int) -> None:
        positions = torch.arange(length, dtype=torch.float32, device=self._angles.device)
        self._angles = torch.outer(positions, self.inverse_frequencies)
        self._cos, self._sin = self._angles.cos(), self._angles.sin()

    def at(self, position_ids_T: torch.Tensor, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each [T, 1, head_dim / 2], for positions below ``length``."""
        if length > self._angles.size(0):
            self._grow(max(length, 2 * self._angles.size(0)))
        cos = self._cos.index_select(0, position_ids_T).to(dtype).unsqueeze(1)
        return cos, self._sin.index_select(0, position_ids_T).to(dtype).unsqueeze(1)

    def angles(self, length: int) -> torch.Tensor:
        """Angles in Megatron's form, [length, 1, 1, head_dim], for its own attention module."""
        if length > self._angles.size(0):
            self._grow(length)
        half = self._angles[:length]
        return torch.cat((half, half), dim=-1)[:, None, None, :]


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (first, second), (out_first, out_second) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    return out


class _Rotate(torch.autograd.Function):
    """A rotation: its gradient is the rotation back, so no activation is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1.0), None, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads ``x`` [T, heads, head_dim] by ``cos``/``sin`` [T, 1, head_dim / 2]."""
    return _Rotate.apply(x, cos, sin)

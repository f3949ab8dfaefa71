"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) that works with sequence parallelism on any device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from aligner.distributed import platform


class RMSNorm(torch.nn.Module):
    """Normalises the last dimension in fp32 and scales by ``weight`` [hidden_size].

    The weight is marked ``sequence_parallel`` so that Megatron sums its gradient over tensor-parallel ranks, each of
    which sees its part of the sequence.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=platform.current().device)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as ``x``."""
        return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)

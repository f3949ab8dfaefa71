"""Linear layers of the decode path: plain, or over weights packed for oneDNN.

oneDNN reorders a plain weight at every call; at decode sizes that costs about as much as the product. A packed copy
is reordered once (facts of one machine: 1.4x in bfloat16 at any batch, and in float32 from 4 rows on).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Linear = Callable[[torch.Tensor], torch.Tensor]

_PACKED_FOR_ROWS = 16  # oneDNN picks the layout for this many rows; other numbers work as well
_FEW_ROWS = 4  # below, a plain float32 product is faster


class PlainLinear:
    """``x [N, in] -> [N, out]``; ``weight`` [out, in] is a view of the module's parameter."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


class PackedLinear:
    """The same over a packed copy of ``weight``, which must be made again when the parameter changes."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
        self._plain_below = _FEW_ROWS if weight.dtype == torch.float32 else 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] < self._plain_below:
            return torch.nn.functional.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def packing_works(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN can pack weights of ``dtype`` on this machine."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, *, packed: bool) -> Linear:
    """A linear layer over ``weight`` [out, in] and ``bias`` [out] or None."""
    return PackedLinear(weight, bias) if packed else PlainLinear(weight, bias)

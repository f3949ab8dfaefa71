"""Megatron's data-parallel wrapper with less memory traffic: gradients are written before they are added to.

Megatron zeroes its gradient buffers and then adds. Here zeroing marks the parameters; the first gradient of a step
overwrites the buffer, later micro-batches add, and what got no gradient is zeroed when gradients are reduced. With one
replica there is no peer, and no collective is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel


class RoleDataParallel(DistributedDataParallel):
    """``overlap_grad_reduce`` and ``overlap_param_gather`` are not used with it."""

    def zero_grad_buffer(self) -> None:
        """Forget the gradients of the last step."""
        for parameter in self.params_with_grad:
            parameter.gradient_is_stale = True
        for group in self.bucket_groups:
            group.reset()

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        param.gradient_is_stale = False  # type: ignore[attr-defined]

        def hook(*_unused: Any) -> None:
            grad, param.grad = param.grad, None
            if grad is None:
                return
            if param.gradient_is_stale:  # type: ignore[attr-defined]
                param.main_grad.copy_(grad)  # type: ignore[attr-defined]
                param.gradient_is_stale = False  # type: ignore[attr-defined]
            else:
                param.main_grad.add_(grad)  # type: ignore[attr-defined]

        return hook

    def finish_grad_sync(self, *args: Any, **options: Any) -> None:
        """Gradients are complete on this replica: sum them over replicas."""
        for parameter in self.params_with_grad:
            gradient_buffer(parameter)
        if self.dp_cp_group.size() > 1:
            super().finish_grad_sync(*args, **options)

    def start_param_sync(self, *args: Any, **options: Any) -> None:
        """Collect the parameters that other replicas updated."""
        if self.dp_cp_group.size() > 1:
            super().start_param_sync(*args, **options)


def gradient_buffer(parameter: torch.nn.Parameter) -> torch.Tensor:
    """``parameter.main_grad``, ready to be added to: fp32, of the parameter's shape."""
    if parameter.gradient_is_stale:  # type: ignore[attr-defined]
        parameter.main_grad.zero_()  # type: ignore[attr-defined]
        parameter.gradient_is_stale = False  # type: ignore[attr-defined]
    return parameter.main_grad  # type: ignore[attr-defined]

"""Fused Adam on the CPU, with the interface of Apex's ``FusedAdam`` that Megatron's optimizers are written for.

The step counter lives in the parameter group; the state of a parameter is exactly ``exp_avg`` and ``exp_avg_sq``
(fp32, the parameter's shape), so that a distributed checkpoint holds nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class CpuAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015, arXiv:1412.6980) or, with ``adam_w_mode``, AdamW (Loshchilov & Hutter 2019,
    arXiv:1711.05101), as one fused kernel over all parameters of a group."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def initialize_state(self, param: torch.Tensor) -> None:
        """Zero moments for ``param``, as before a first step."""
        self.state[param]["exp_avg"] = torch.zeros_like(param.data)
        self.state[param]["exp_avg_sq"] = torch.zeros_like(param.data)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        fused = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None and p.numel() > 0]
            for param in params:
                if not self.state[param]:
                    self.initialize_state(param)
            if params:
                self._update(fused, group, params)
        return loss

    def _update(
        self,
        fused: Callable[..., None],
        group: dict[str, Any],
        params: list[torch.Tensor],
    ) -> None:
        beta1, beta2 = group["betas"]
        steps = [torch.tensor(float(group["step"]))] * len(params)
        fused(
            params,
            [p.grad for p in params],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            steps,
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

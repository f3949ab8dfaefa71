"""The state of an optimizer that has not stepped yet."""

from __future__ import annotations

from typing import Any


def create_optimizer_state(optimizer: Any) -> None:
    """Give every parameter of a Megatron optimizer its zero moments, where it has none, without a step.

    An optimizer makes its state in the first step; a checkpoint needs it before (the policy during the critic's
    warm-up). Megatron's own way is a real step with zero gradients, which moves the counter and decays weights.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(part, "is_stub_optimizer", False) or part.optimizer is None:
            continue
        part.init_state_fn(part.optimizer, part.config)

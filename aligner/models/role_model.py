"""What the rest of the program holds of a role's model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from aligner.config.hf_config import Architecture
from aligner.distributed.topology import Topology
from aligner.models.transformer import RoleTransformer


@dataclass
class RoleModel:
    """This rank's shard of one role (actor, critic, reference, reward).

    ``module`` is the bare stage; ``chunks`` what Megatron's schedules and checkpoints take: the stage, wrapped for data
    parallelism when the role is trained. ``optimizer`` and ``scheduler`` are None for a frozen role.
    ``before_change``: called before parameters or optimizer state change (a save that is being written takes copies).
    ``horizon_from_run``: the learning-rate schedule's length follows the run's, so a resumed run keeps the saved one.
    """

    name: str
    arch: Architecture
    topology: Topology
    config: TransformerConfig
    head: str
    dtype: torch.dtype
    module: RoleTransformer
    chunks: list[Any]
    optimizer: Any | None = None
    scheduler: Any | None = None
    horizon_from_run: bool = False
    before_change: list[Callable[[], None]] = field(default_factory=list)

    @property
    def trainable(self) -> bool:
        return self.optimizer is not None

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """(Megatron name, parameter) on this rank."""
        yield from self.module.named_parameters()

    def will_change(self) -> None:
        """Call before parameters change from outside; steps of the optimizer do."""
        for tell in self.before_change:
            tell()

    def weights_changed(self) -> None:
        """Call after writing parameters from outside: the optimizer's fp32 copies are taken from them again."""
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    @torch.no_grad()
    def absorb_affine(self, mean: float, std: float) -> None:
        """Make the scalar head predict ``(score - mean) / std`` from now on. Every rank of the role calls it."""
        if self.head != "scalar":
            raise ValueError(f"{self.name} has no scalar head")
        self.will_change()
        if self.module.post_process:
            head = self.module.head
            head.weight.div_(std)
            head.bias.sub_(mean).div_(std)
        self.weights_changed()

"""Small Megatron models to save and load, and everything of them that must come back."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from aligner.checkpoint.stateful import Stateful
from aligner.config.hf_config import Architecture
from aligner.config.schema import OptimizerConfig
from aligner.distributed.topology import Degrees, build_topology, seed_everything
from aligner.models.build import build_model
from aligner.models.role_model import RoleModel

ARCH = Architecture(
    family="llama",
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=90,
    max_position_embeddings=64,
    rope_theta=10000.0,
    rope_scaling=None,
    norm_epsilon=1e-5,
    tie_word_embeddings=True,
    attention_bias=False,
    qk_norm=False,
    sliding_window=None,
    bos_token_id=1,
    eos_token_ids=(2,),
    pad_token_id=None,
    dtype="float32",
)
ONE, TP2, PP2, TP2PP2 = Degrees(), Degrees(tp=2, sequence_parallel=True), Degrees(pp=2), Degrees(tp=2, pp=2)


@dataclass
class Counter:
    """A component with a state that is the same on every rank."""

    seen: int = 0
    history: list[float] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen, self.history = state_dict["seen"], state_dict["history"]


def small_model(
    name: str,
    degrees: Degrees,
    dtype: torch.dtype = torch.float32,
    head: str = "lm",
    distributed: bool = True,
    frozen: bool = False,
) -> RoleModel:
    settings = OptimizerConfig(lr=1e-2, warmup_steps=2, decay_steps=10, use_distributed_optimizer=distributed)
    topology = build_topology(degrees)
    return build_model(name, ARCH, topology, head=head, dtype=dtype, optimizer=None if frozen else settings)


def fill(model: RoleModel, seed: int) -> None:
    """Weights that are equal wherever the same tensor is held twice."""
    model.will_change()
    for name, parameter in model.parameters():
        parameter.data.copy_(noise_like(name, parameter, seed) * 0.1)
    model.weights_changed()


def noise_like(name: str, parameter: torch.Tensor, seed: int) -> torch.Tensor:
    name = name.replace("output_layer", "embedding.word_embeddings")
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
    return torch.randn(parameter.shape, generator=generator)


def take_step(model: RoleModel, step: int) -> None:
    """One optimizer step on made-up gradients that depend on the step alone."""
    assert model.optimizer is not None and model.scheduler is not None
    for name, parameter in model.parameters():
        parameter.main_grad.copy_(  # type: ignore[attr-defined]  # set by Megatron's data parallelism
            noise_like(name, parameter, 1000 + step)
        )
    model.optimizer.step()
    model.scheduler.step(1)


def start(degrees: Degrees) -> None:
    seed_everything(7, build_topology(degrees, make_global=True))


def train(models: dict[str, RoleModel], counter: Counter, steps: range) -> list[float]:
    """Train; returns what this rank's random generators gave meanwhile."""
    noise = []
    for step in steps:
        for model in models.values():
            if model.optimizer is not None and not (model.name == "actor" and step < 2):  # the critic warms up
                take_step(model, step)
        counter.seen += 1
        counter.history.append(0.1 * step)
        noise.append(random.random() + float(np.random.rand()) + float(torch.rand(1)))
    return noise


def all_bytes(models: dict[str, RoleModel]) -> dict[str, bytes]:
    """All weights and optimizer states of this rank, as bytes."""
    found = {}
    for role, model in models.items():
        for name, parameter in model.parameters():
            found[f"{role}.{name}"] = parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()
        for (index, group), values in optimizer_tensors(model).items():
            found[f"{role}.optimizer.{index}.{group}"] = values.contiguous().view(torch.uint8).numpy().tobytes()
        if model.optimizer is not None:
            groups = model.optimizer.param_groups
            found[f"{role}.groups"] = json.dumps([[g["lr"], g.get("step")] for g in groups if g["params"]]).encode()
    return found


def optimizer_tensors(model: RoleModel) -> dict[tuple[int, str], torch.Tensor]:
    if model.optimizer is None:
        return {}
    found = {}
    for index, part in enumerate(model.optimizer.chained_optimizers):
        for number, group in enumerate(part.optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                state = part.optimizer.state[parameter]
                for name, value in {"param": parameter.detach(), **state}.items():
                    found[(index, f"{number}.{position}.{name}")] = value
    return found


def three_roles(actor: Degrees, critic: Degrees, dtype: torch.dtype, distributed: bool) -> dict[str, RoleModel]:
    models = {
        "actor": small_model("actor", actor, dtype, distributed=distributed),
        "critic": small_model("critic", critic, dtype, head="scalar", distributed=distributed),
        "reference": small_model("reference", actor, dtype, frozen=True),
    }
    for seed, model in enumerate(models.values()):
        fill(model, seed)
    return models


def states(stateful: Mapping[str, Stateful]) -> dict[str, Any]:
    """What a save takes: the state of each component."""
    return {name: component.state_dict() for name, component in stateful.items()}

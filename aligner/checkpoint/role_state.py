"""The state of one role's model for a checkpoint, and its way back: weights, optimizer, learning-rate schedule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aligner.checkpoint import manifest, torch_dist
from aligner.checkpoint.agreement import together
from aligner.checkpoint.optimizer_sharding import load_optimizer_state, sharded_optimizer_state
from aligner.distributed.optimizer_state import create_optimizer_state
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.models.role_model import RoleModel


def role_entry(model: RoleModel) -> manifest.RoleEntry:
    """Layout of the role, and whether it is trained."""
    degrees = model.topology.degrees
    return manifest.RoleEntry(
        tp=degrees.tp,
        pp=degrees.pp,
        sequence_parallel=degrees.sequence_parallel,
        optimizer=model.optimizer is not None,
    )


def model_state(model: RoleModel) -> dict[str, Any]:
    """The parameters with their places in the whole model; data-parallel copies are counted in the role's own group."""
    return model.module.sharded_state_dict(metadata={"dp_cp_group": model.topology.pg.dp_cp})


def sharded_state(model: RoleModel, *, is_loading: bool) -> dict[str, Any]:
    """All state of the role. Collective over its data-parallel group."""
    state: dict[str, Any] = {"model": model_state(model)}
    if model.optimizer is not None:
        create_optimizer_state(model.optimizer)
        state["optimizer"] = sharded_optimizer_state(model.optimizer, state["model"], is_loading=is_loading)
    if model.scheduler is not None and not is_loading:
        state["scheduler"] = {**model.scheduler.state_dict(), "horizon_from_run": model.horizon_from_run}
    return state


def load_role(model: RoleModel, directory: Path) -> None:
    """Fill ``model`` from its directory in a checkpoint. Collective.

    Settings of the optimizer and its schedule stay those that ``model`` was built with; the steps taken are counted on.
    """
    model.will_change()
    loaded, _ = torch_dist.load(sharded_state(model, is_loading=True), directory)
    model.module.load_state_dict(loaded["model"])
    if model.optimizer is not None:
        settings = [_settings(group) for group in model.optimizer.param_groups]
        load_optimizer_state(model.optimizer, loaded["optimizer"])
        for group, own in zip(model.optimizer.param_groups, settings, strict=True):
            group.update(own)
    if model.scheduler is not None:
        together(lambda: _continue_schedule(model, loaded["scheduler"]))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Rates, decay, betas and the like of a parameter group: all but its parameters and its count of steps."""
    return {name: value for name, value in group.items() if name not in ("params", "step")}


def _continue_schedule(model: RoleModel, state: Mapping[str, Any]) -> None:
    """Count the saved steps on. A length that followed the run's, and still does, stays the saved one."""
    scheduler: Any = model.scheduler
    if model.horizon_from_run and state["horizon_from_run"]:
        scheduler.lr_decay_steps, scheduler.wd_incr_steps = state["lr_decay_steps"], state["wd_incr_steps"]
    if scheduler.lr_warmup_steps >= scheduler.lr_decay_steps:
        raise ConfigError(
            f"{model.name}.optimizer.warmup_steps is {scheduler.lr_warmup_steps}, but the schedule of this run ends "
            f"after {scheduler.lr_decay_steps} steps; use fewer, or set {model.name}.optimizer.decay_steps too"
        )
    scheduler.num_steps = 0
    scheduler.step(increment=int(state["num_steps"]))


def load_role_weights(model: RoleModel, directory: Path, *, strict: bool) -> list[str]:
    """Only the weights; returns the names of the tensors that kept their values. Collective."""
    model.will_change()
    _, kept = torch_dist.load({"model": model_state(model)}, directory, strict=strict)
    if model.optimizer is not None:
        model.optimizer.reload_model_params()
    return kept


# ------------------------------------------------------------------ components


def role_components(role: str, model: RoleModel, tensors: Any) -> dict[str, dict[str, Any]]:
    """The manifest's components of ``role``; ``tensors`` from :func:`torch_dist.contents`."""
    found: dict[str, dict[str, Any]] = {role: {"kind": "model", "role": role, "bytes": 0, "tensors": {}}}
    if model.optimizer is not None:
        found[f"{role}.optimizer"] = {"kind": "optimizer", "role": role, "bytes": 0, "tensors": {}}
    if model.scheduler is not None:
        found[f"{role}.scheduler"] = {"kind": "scheduler", "role": role}
    for name, (dtype, shape, size) in tensors.items():
        component = found[f"{role}.optimizer" if name.startswith("optimizer.") else role]
        component["tensors"][name] = [dtype, *shape]
        component["bytes"] += size
    return found


def needed_components(role: str, model: RoleModel) -> list[str]:
    """What a checkpoint must hold so that ``role`` can be continued."""
    return [
        role,
        *([f"{role}.optimizer"] if model.optimizer is not None else []),
        *([f"{role}.scheduler"] if model.scheduler is not None else []),
    ]

"""The state of one role's model for a checkpoint, and its way back: weights, optimizer, learning-rate schedule."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from aligner.checkpoint import manifest, torch_dist
from aligner.checkpoint.agreement import together
from aligner.checkpoint.optimizer_sharding import load_optimizer_state, sharded_optimizer_state
from aligner.distributed.optimizer_state import create_optimizer_state
from aligner.errors import CheckpointError

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
        state["scheduler"] = model.scheduler.state_dict()
    return state


def load_role(model: RoleModel, directory: Path) -> None:
    """Fill ``model`` from its directory in a checkpoint. Collective."""
    loaded, _ = torch_dist.load(sharded_state(model, is_loading=True), directory)
    model.module.load_state_dict(loaded["model"])
    if model.optimizer is not None:
        load_optimizer_state(model.optimizer, loaded["optimizer"])
    if model.scheduler is not None:
        model.scheduler.num_steps = 0  # Megatron adds the saved steps to those already counted
        together(lambda: _load_scheduler(model, loaded["scheduler"], directory))


def load_role_weights(model: RoleModel, directory: Path, *, strict: bool) -> list[str]:
    """Only the weights; returns the names of the tensors that kept their values. Collective."""
    _, kept = torch_dist.load({"model": model_state(model)}, directory, strict=strict)
    if model.optimizer is not None:
        model.optimizer.reload_model_params()
    return kept


def _load_scheduler(model: RoleModel, state: dict[str, Any], directory: Path) -> None:
    scheduler: Any = model.scheduler
    if model.horizon_from_run:
        scheduler.lr_decay_steps = state["lr_decay_steps"]
        scheduler.wd_incr_steps = state["wd_incr_steps"]
    try:
        scheduler.load_state_dict(state)
    except AssertionError as error:
        raise CheckpointError(f"{directory}: the learning-rate schedule differs from the saved one: {error}") from None


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

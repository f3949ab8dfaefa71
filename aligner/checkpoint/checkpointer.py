"""Saves a run's models and state in one directory a step, and restores them.

``<run>/checkpoints/step_00000012/`` holds one sub-directory a role (Megatron's ``torch_dist`` format: weights,
optimizer, scheduler), ``state.json`` (cursors, controllers, counters), ``rng_<rank>.pt`` and ``manifest.json``.

Invariants:

- A directory named ``step_*`` is complete: everything is written under a temporary name, then renamed.
- Every method is collective over all ranks; a rank that fails takes the others along, none waits for it.
- Tensors can be loaded at another layout than they were saved at; random states only at the same one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from aligner.checkpoint import manifest, torch_dist
from aligner.checkpoint.optimizer_sharding import load_optimizer_state, sharded_optimizer_state
from aligner.checkpoint.stateful import Stateful
from aligner.distributed import collectives, platform
from aligner.distributed.optimizer_state import create_optimizer_state
from aligner.distributed.random_state import rng_state, set_rng_state
from aligner.errors import CheckpointError

if TYPE_CHECKING:
    from aligner.models.role_model import RoleModel

T = TypeVar("T")

STATE_FILE = "state.json"


class Checkpointer:
    """The checkpoints of one run directory."""

    def __init__(self, run_dir: Path) -> None:
        self.directory = Path(run_dir) / "checkpoints"

    def save(self, step: int, models: Mapping[str, RoleModel], stateful: Mapping[str, Stateful]) -> Path:
        """Save everything after ``step`` finished steps; returns the complete directory. Collective.

        Args:
            models: role name -> model; weights, and the optimizer and scheduler of those that have them.
            stateful: name -> component; its state is the same on every rank.
        """
        final = self.directory / f"step_{step:08d}"
        temporary = self.directory / f".tmp-step_{step:08d}"
        state = _together(lambda: _json_state(stateful))
        _check_equal(state)
        _together(lambda: _make_empty(temporary, list(models)), rank=0)
        for role, model in models.items():
            torch_dist.save(_sharded_state(model, is_loading=False), temporary / role)
        _together(lambda: torch.save(rng_state(), temporary / _rng_file()))
        entries = {role: _entry(model) for role, model in models.items()}
        _together(lambda: _finish(temporary, final, step, entries, state), rank=0)
        return final

    def newest(self) -> Path | None:
        """The newest complete checkpoint, the same on every rank; None when there is none. Collective."""
        return collectives.broadcast_object(_together(lambda: newest_complete(self.directory), rank=0))

    def load(self, path: Path, models: Mapping[str, RoleModel], stateful: Mapping[str, Stateful]) -> int:
        """Continue from ``path``: the state of every model and component, and random states. Collective.

        Returns the number of finished steps. The layout may differ from the saved one; random states are restored
        only where it does not.

        Raises:
            CheckpointError: the checkpoint is damaged, or lacks something that this run has.
        """
        saved = _together(lambda: manifest.read(path))
        _together(lambda: _check_roles(path, saved, models))
        for role, model in models.items():
            _load_role(model, path / role)
        state = _together(lambda: _read_state(path, stateful))
        for name, component in stateful.items():
            component.load_state_dict(state[name])
        if saved.world_size == platform.world_size() and saved.roles == {r: _entry(m) for r, m in models.items()}:
            set_rng_state(_together(lambda: torch.load(path / _rng_file(), weights_only=True)))
        _tell_differences(saved, path)
        return saved.step


def _tell_differences(saved: manifest.Manifest, path: Path) -> None:
    """One line on rank 0 when this process computes other bits than the one that wrote ``path``."""
    changed = manifest.changed_since(saved.fingerprint)
    if changed and platform.rank() == 0:
        print(f"{path.name}: continued, but not bit for bit, because of {changed}", flush=True)


def load_weights(path: Path, role: str, model: RoleModel, *, strict: bool = True) -> list[str]:
    """Only the weights of ``role`` in the checkpoint ``path``, into ``model`` (of any layout). Collective.

    Args:
        strict: every tensor of ``model`` must be there. Otherwise those that are not keep their values (the new
            head of a critic that starts from a policy).

    Returns:
        The names of the tensors that kept their values.
    """
    saved = _together(lambda: manifest.read(path))
    if role not in saved.roles:
        raise CheckpointError(f"{path} holds the roles {sorted(saved.roles)}, not '{role}'; choose one of them")
    state = {"model": _model_state(model)}
    _, kept = torch_dist.load(state, path / role, strict=strict)
    if model.optimizer is not None:
        model.optimizer.reload_model_params()
    return kept


def read_extra(path: Path, name: str) -> dict[str, Any]:
    """The saved state of the component ``name``, without building it (reward statistics). Not collective.

    Raises:
        CheckpointError: the checkpoint is damaged or has no such component.
    """
    manifest.read(path)
    state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    if name not in state:
        raise CheckpointError(f"{path} holds no '{name}', only {sorted(state)}")
    return state[name]


def newest_complete(directory: Path) -> Path | None:
    """The complete checkpoint with the highest step in ``directory``. Local.

    One that a power cut or a full disk damaged is passed over with a printed line; nothing is deleted.
    """
    if not directory.is_dir():
        return None
    for path in sorted(directory.glob("step_*"), reverse=True):
        if not (path / manifest.FILE).is_file():
            continue
        damage = manifest.damage(path)
        if not damage:
            return path
        print(f"passed over the damaged checkpoint {path}: {damage}", flush=True)
    return None


# ------------------------------------------------------------------ agreement


def _together(action: Callable[[], T], rank: int | None = None) -> T:
    """Run ``action`` (on one ``rank`` or on all) and go on only if it succeeded everywhere.

    OSErrors become :class:`CheckpointError`. Where ``action`` did not run, the result is None.
    """

    def run() -> T | None:
        if rank is not None and platform.rank() != rank:
            return None
        try:
            return action()
        except OSError as error:
            raise CheckpointError(f"checkpoint: {error}") from error

    return cast(T, collectives.on_all_ranks(run))


def _check_equal(state: str) -> None:
    if len(set(collectives.all_gather_objects(state))) != 1:
        raise CheckpointError("the state to save differs between ranks; this is a bug in one of the saved components")


# ------------------------------------------------------------------ models


def _model_state(model: RoleModel) -> dict[str, Any]:
    """The parameters with their places in the whole model; data-parallel copies are counted in the role's own group."""
    return model.module.sharded_state_dict(metadata={"dp_cp_group": model.topology.pg.dp_cp})


def _sharded_state(model: RoleModel, *, is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {"model": _model_state(model)}
    if model.optimizer is not None:
        create_optimizer_state(model.optimizer)
        state["optimizer"] = sharded_optimizer_state(model.optimizer, state["model"], is_loading=is_loading)
    if model.scheduler is not None and not is_loading:
        state["scheduler"] = model.scheduler.state_dict()
    return state


def _load_role(model: RoleModel, directory: Path) -> None:
    loaded, _ = torch_dist.load(_sharded_state(model, is_loading=True), directory)
    model.module.load_state_dict(loaded["model"])
    if model.optimizer is not None:
        load_optimizer_state(model.optimizer, loaded["optimizer"])
    if model.scheduler is not None:
        model.scheduler.num_steps = 0  # Megatron adds the saved steps to those already counted
        _together(lambda: _load_scheduler(model, loaded["scheduler"], directory))


def _load_scheduler(model: RoleModel, state: dict[str, Any], directory: Path) -> None:
    scheduler: Any = model.scheduler
    if model.horizon_from_run:
        scheduler.lr_decay_steps = state["lr_decay_steps"]
        scheduler.wd_incr_steps = state["wd_incr_steps"]
    try:
        scheduler.load_state_dict(state)
    except AssertionError as error:
        raise CheckpointError(f"{directory}: the learning-rate schedule differs from the saved one: {error}") from None


def _entry(model: RoleModel) -> manifest.RoleEntry:
    degrees = model.topology.degrees
    return manifest.RoleEntry(
        tp=degrees.tp,
        pp=degrees.pp,
        sequence_parallel=degrees.sequence_parallel,
        optimizer=model.optimizer is not None,
    )


def _check_roles(path: Path, saved: manifest.Manifest, models: Mapping[str, RoleModel]) -> None:
    for role, model in models.items():
        if role not in saved.roles:
            raise CheckpointError(f"{path} holds the roles {sorted(saved.roles)}, but this run trains '{role}' too")
        if model.optimizer is not None and not saved.roles[role].optimizer:
            raise CheckpointError(f"{path}: '{role}' was saved without its optimizer, so its training cannot continue")


# ------------------------------------------------------------------ files


def _rng_file() -> str:
    return f"rng_{platform.rank():05d}.pt"


def _make_empty(directory: Path, roles: list[str]) -> None:
    """An empty ``directory`` with one sub-directory a role; what interrupted saves left beside it goes."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    for leftover in directory.parent.glob(".tmp-*"):
        shutil.rmtree(leftover)
    for role in roles:
        (directory / role).mkdir(parents=True)


def _finish(temporary: Path, final: Path, step: int, entries: dict[str, manifest.RoleEntry], state: str) -> None:
    """State and manifest, then the rename that makes the checkpoint exist (an older one of the step is replaced)."""
    (temporary / STATE_FILE).write_text(state, encoding="utf-8")
    manifest.write(temporary, step, platform.world_size(), entries)
    if final.exists():
        outdated = final.with_name(f".tmp-outdated-{final.name}")
        final.rename(outdated)
        temporary.rename(final)
        shutil.rmtree(outdated)
    else:
        temporary.rename(final)
    manifest.sync(final.parent)  # the rename itself survives a power cut


def _json_state(stateful: Mapping[str, Stateful]) -> str:
    state = {name: component.state_dict() for name, component in stateful.items()}
    _check_json(state, "state")
    return json.dumps(state, indent=1)


def _check_json(value: Any, where: str) -> None:
    """Raise :class:`CheckpointError` for what JSON would change or lose, naming the place."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}; keys of a saved state must be strings")
            _check_json(item, f"{where}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_json(item, f"{where}[{index}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise CheckpointError(f"{where} is a {type(value).__name__}; a saved state holds only what JSON holds exactly")


def _read_state(path: Path, stateful: Mapping[str, Stateful]) -> dict[str, Any]:
    state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    for name in stateful:
        if name not in state:
            raise CheckpointError(f"{path} holds no state of '{name}', only of {sorted(state)}")
    return state

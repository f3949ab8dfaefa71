"""Saves a run's models and state in one directory a step, and restores them.

``<run>/checkpoints/step_00000012/`` holds one sub-directory a role (Megatron's ``torch_dist`` format: weights,
optimizer, scheduler), ``state.json`` (cursors, controllers, counters), ``rng_<rank>.pt`` and ``manifest.json``.

Invariants:

- A directory named ``step_*`` is complete, whatever is killed and when (see ``snapshot.py``).
- Every method is collective over all ranks; what one rank finds out, all ranks act upon.
- A save that cannot be written ends nothing: it is reported, and the checkpoints before it stay.
- At most one save is in flight; what it writes are the values of the moment of :meth:`Checkpointer.save`.
- Tensors can be loaded at another layout than they were saved at; random states only at the same one.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aligner.checkpoint import deletion, manifest, snapshot, verify
from aligner.checkpoint.agreement import failures, gather_on_first, on_first, together
from aligner.checkpoint.async_write import BackgroundWriter, DoneHere, Staging, Writer
from aligner.checkpoint.retention import KEEP_ALL, Retention
from aligner.checkpoint.role_state import (
    load_role,
    load_role_weights,
    needed_components,
    role_components,
    role_entry,
    sharded_state,
)
from aligner.checkpoint.snapshot import Outcome, Snapshot
from aligner.checkpoint.stateful import Stateful
from aligner.checkpoint.torch_dist import Planner, Shards
from aligner.distributed import collectives, faults, platform
from aligner.distributed.random_state import rng_state, set_rng_state
from aligner.errors import CheckpointError

if TYPE_CHECKING:
    from aligner.models.role_model import RoleModel


Published = tuple[float, float, int]  # stall_s, write_s, bytes


@dataclass(frozen=True)
class SaveReport:
    """How a save ended, the same on every rank.

    ``stall_s``: seconds until writing began (gathering, planning); ``write_s``: seconds from there until it
    was published, without the wait for a poll; both of the slowest rank. ``error``: why nothing was published.
    """

    step: int
    path: Path
    stall_s: float
    write_s: float
    bytes: int
    error: str | None


@dataclass
class _Flight:
    """A save that is being written."""

    snapshot: Snapshot
    models: list[RoleModel]
    stall_s: float
    writer: Writer


class Checkpointer:
    """The checkpoints of one run directory.

    Args:
        retention: which ones to keep; the one that was loaded and pinned ones always stay.
        async_save: write in the background, where :meth:`save` is not told to wait.
        may_publish: asked by rank 0 before a checkpoint is made to exist: whether the run is still this process's.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        retention: Retention = KEEP_ALL,
        async_save: bool = False,
        may_publish: Callable[[], bool] = lambda: True,
    ) -> None:
        self.directory = Path(run_dir) / "checkpoints"
        self.resumed_from: Path | None = None
        self._retention = retention
        self._async = async_save
        self._may_publish = may_publish
        self._staging = Staging()
        self._planners: dict[str, Planner] = {}
        self._flight: _Flight | None = None
        self._unreported: list[SaveReport] = []
        self._is_clean = False

    # ------------------------------------------------------------------ saving

    def save(
        self,
        step: int,
        models: Mapping[str, RoleModel],
        state: Mapping[str, Any],
        *,
        identity: Mapping[str, Any] | None = None,
        rng: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        wait: bool = False,
    ) -> SaveReport | None:
        """Save everything after ``step`` finished steps; a save in flight is finished first. Collective.

        Args:
            models: role name -> model; weights, and the optimizer and scheduler of those that have them.
            state: name -> state of a component; what JSON holds exactly, and the same on every rank.
            identity: what the run is, kept in the manifest; what JSON holds exactly.
            rng: this rank's random states; None: as they are now.
            metrics: of the step, kept in the manifest.
            wait: until it is published, also where saving is asynchronous.

        Returns:
            The report, or None when the save is written in the background: :meth:`poll` gives its report.

        Raises:
            CheckpointError: the state cannot be saved at all (not JSON, different on different ranks).
        """
        if (report := self._land()) is not None:
            self._unreported.append(report)
        began = time.perf_counter()
        text = together(lambda: _json_text(state, identity or {}))
        if len(set(collectives.all_gather_objects(text))) != 1:
            raise CheckpointError("the state to save differs between ranks; this is a bug in a saved component")
        plan, error = self._plan(step, models, state, identity or {}, rng, metrics or {})
        if plan is None:
            path = self.directory / manifest.step_name(step)
            return SaveReport(step, path, time.perf_counter() - began, 0.0, 0, error)
        in_background = self._async and not wait
        writer: Callable[[Callable[[], Any]], Writer] = DoneHere
        if in_background:
            try:
                plan, writer = plan.beside_training(self._staging), BackgroundWriter
            except MemoryError as full:
                print(f"step {step} is saved in the foreground: no memory for a copy ({full})", flush=True)
        self._flight = _Flight(plan, list(models.values()), time.perf_counter() - began, writer(plan.write))
        if plan.held is not None:
            for model in self._flight.models:
                model.before_change.append(plan.held.keep)
        return None if in_background else self._land()

    def prepare(self, models: Mapping[str, RoleModel]) -> None:
        """Plan and take memory now, so that the first save in the background is as quick as the next. Collective."""
        if self._async:
            shards = self._shards(models)
            self._staging.reserve([item.data for role in shards.values() for item in role.items])

    @property
    def in_flight(self) -> bool:
        """Whether there is a save whose report is still to come."""
        return self._flight is not None or bool(self._unreported)

    def poll(self) -> SaveReport | None:
        """Publish the save in flight once every rank has written its part; never waits for that. Collective.

        Returns:
            Its report, once; None while it is written, or when there is none.
        """
        if self._unreported:
            return self._unreported.pop(0)
        if self._flight is None or collectives.any_true(not self._flight.writer.done()):
            return None
        return self._land()

    def finish(self) -> SaveReport | None:
        """Wait for the save in flight and publish it; its report, or None when there is none. Collective."""
        if self._unreported:
            return self._unreported.pop(0)
        return self._land()

    def _plan(
        self,
        step: int,
        models: Mapping[str, RoleModel],
        state: Mapping[str, Any],
        identity: Mapping[str, Any],
        rng: Mapping[str, Any] | None,
        metrics: Mapping[str, float],
    ) -> tuple[Snapshot | None, str]:
        """What this rank writes. None, and why, when there is no place to write it. Collective."""
        temporary = snapshot.temporary_path(self.directory, step, collectives.broadcast_object(uuid.uuid4().hex[:8]))
        if error := failures(self._make_room(temporary, list(models))):
            if platform.rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            return None, error
        shards = self._shards(models)
        small = {manifest.rng_file(platform.rank()): _saved(dict(rng) if rng is not None else rng_state())}
        described = None
        if platform.rank() == 0:
            small[manifest.STATE_FILE] = json.dumps(state, indent=1).encode()
            components: dict[str, dict[str, Any]] = {}
            for role, model in models.items():
                components |= role_components(role, model, snapshot.role_contents(shards[role]))
            components |= {name: {"kind": "state"} for name in state}
            components[manifest.RNG] = {"kind": "rng", "ranks": platform.world_size()}
            described = manifest.Manifest(
                step=step,
                world_size=platform.world_size(),
                roles={role: role_entry(model) for role, model in models.items()},
                files={},
                components=components,
                identity=dict(identity),
                fingerprint=manifest.fingerprint(),
                metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
                time=time.time(),
            )
        return Snapshot(self.directory, step, temporary, shards, small, described), ""

    def _shards(self, models: Mapping[str, RoleModel]) -> dict[str, Shards]:
        return {
            role: self._planners.setdefault(role, Planner()).plan(sharded_state(model, is_loading=False))
            for role, model in models.items()
        }

    def _make_room(self, temporary: Path, roles: list[str]) -> OSError | None:
        """The empty directories of a save, made by rank 0; what interrupted ones left goes."""
        try:
            faults.hit("save")
            if platform.rank() != 0:
                return None
            self.directory.mkdir(parents=True, exist_ok=True)
            if not self._is_clean:
                snapshot.clear_leftovers(self.directory)
                self._is_clean = True
            for role in roles:
                (temporary / role).mkdir(parents=True)
        except OSError as error:
            return error
        return None

    def _land(self) -> SaveReport | None:
        """Publish the save in flight, waiting for its writers. Collective."""
        if self._flight is None:
            return None
        flight, self._flight = self._flight, None
        plan = flight.snapshot
        try:
            outcome, error = flight.writer.result(), None
        except Exception as found:
            outcome, error = None, found
        if plan.held is not None:
            for model in flight.models:
                model.before_change.remove(plan.held.keep)
        written: Published | None = None
        reason = failures(error)
        if not reason:
            gathered = gather_on_first((outcome, flight.stall_s))
            written, reason = on_first(lambda: self._publish(plan, gathered))
        if reason and platform.rank() == 0:
            plan.discard()
        if written is None:
            return SaveReport(plan.step, plan.final, flight.stall_s, 0.0, 0, reason)
        return SaveReport(plan.step, plan.final, *written, None)

    def _publish(self, plan: Snapshot, gathered: list[tuple[Outcome, float]]) -> tuple[Published | None, str]:
        """Make the checkpoint exist, then delete those that retention does not keep. Rank 0."""
        began = time.perf_counter()
        if not self._may_publish():
            return None, "another process took over the run directory"
        outcomes = [outcome for outcome, _ in gathered]
        try:
            whole = plan.describe(outcomes, self._best(plan))
            plan.publish(whole)
        except Exception as error:
            if not isinstance(error, OSError):
                traceback.print_exc()
            return None, f"rank 0: {type(error).__name__}: {error}"
        deletion.apply_retention(self.directory, self._retention, self._protected(plan.step))
        seconds = max(outcome.seconds for outcome in outcomes) + time.perf_counter() - began
        return (max(stall_s for _, stall_s in gathered), seconds, whole.bytes), ""

    def _best(self, plan: Snapshot) -> dict[str, Any] | None:
        assert plan.described is not None
        return deletion.best_so_far(self.directory, self._retention, plan.step, plan.described.metrics)

    def _protected(self, step: int) -> set[int]:
        """The step just published, and the one that this run was resumed from."""
        resumed = self.resumed_from
        is_own = resumed is not None and resumed.parent.resolve() == self.directory.resolve()
        found = manifest.step_of(resumed) if resumed is not None and is_own else None
        return {step} if found is None else {step, found}

    # ------------------------------------------------------------------ loading

    def newest(self) -> Path | None:
        """The newest checkpoint whose every file is as it was written, the same on every rank. Collective.

        Damaged ones are passed over with a printed line; nothing is deleted. None: there is no checkpoint.

        Raises:
            CheckpointError: there are checkpoints, but all are damaged.
        """
        together(lambda: snapshot.restore_replaced(self.directory) if platform.rank() == 0 else None)
        return verify.newest_sound(self.directory)

    def load(self, path: Path, models: Mapping[str, RoleModel], stateful: Mapping[str, Stateful]) -> int:
        """Continue from ``path``: the state of every model and component, and random states. Collective.

        Returns the number of finished steps. The layout may differ from the saved one; random states are restored
        only where it does not. Files that :meth:`newest` has verified are not verified again.

        Raises:
            CheckpointError: the checkpoint is damaged, or lacks something that this run has.
        """
        saved = verify.require(path)
        entries = {role: role_entry(model) for role, model in models.items()}
        same_layout = saved.world_size == platform.world_size() and saved.roles == entries
        together(lambda: _check_components(path, saved, models, stateful, same_layout))
        for role, model in models.items():
            load_role(model, path / role)
        state = together(lambda: json.loads((path / manifest.STATE_FILE).read_text(encoding="utf-8")))
        for name, component in stateful.items():
            component.load_state_dict(state[name])
        if same_layout:
            file = path / manifest.rng_file(platform.rank())
            set_rng_state(together(lambda: torch.load(file, weights_only=True)))
        self.resumed_from = path
        _tell_differences(saved, path)
        return saved.step


def load_weights(path: Path, role: str, model: RoleModel, *, strict: bool = True) -> list[str]:
    """Only the weights of ``role`` in the checkpoint ``path``, into ``model`` (of any layout). Collective.

    Args:
        strict: every tensor of ``model`` must be there. Otherwise those that are not keep their values (the new
            head of a critic that starts from a policy).

    Returns:
        The names of the tensors that kept their values.
    """
    saved = verify.require(path, under=f"{role}/")
    if role not in saved.roles:
        raise CheckpointError(f"{path} holds the roles {sorted(saved.roles)}, not '{role}'; choose one of them")
    return load_role_weights(model, path / role, strict=strict)


def read_extra(path: Path, name: str) -> dict[str, Any]:
    """The saved state of the component ``name``, without building it (reward statistics). Not collective.

    Raises:
        CheckpointError: the checkpoint is damaged or has no such component.
    """
    saved = manifest.read(path)
    if saved.components.get(name, {}).get("kind") != "state":
        found = sorted(name for name, component in saved.components.items() if component["kind"] == "state")
        raise CheckpointError(f"{path} holds no '{name}', only {found}")
    if problem := manifest.file_problem(path, manifest.STATE_FILE, saved.files[manifest.STATE_FILE]):
        raise CheckpointError(f"{path} is damaged: {problem}; use another checkpoint")
    return json.loads((path / manifest.STATE_FILE).read_text(encoding="utf-8"))[name]


def newest_complete(directory: Path) -> Path | None:
    """The checkpoint with the highest step in ``directory`` that is sound by the sizes of its files. Local.

    A damaged one is passed over with a printed line; nothing is deleted. Its checksums are verified when it is loaded.
    """
    for path in reversed(manifest.published(directory)):
        damage = manifest.damage(path)
        if not damage:
            return path
        print(verify.passed_over(path, damage), flush=True)
    return None


def _check_components(
    path: Path,
    saved: manifest.Manifest,
    models: Mapping[str, RoleModel],
    stateful: Mapping[str, Stateful],
    same_layout: bool,
) -> None:
    """Refuse a checkpoint that lacks a part of this run, before anything is read from it."""
    for role in models:
        if role not in saved.roles:
            raise CheckpointError(f"{path} holds the roles {sorted(saved.roles)}, but this run trains '{role}' too")
    for role, model in models.items():
        if model.optimizer is not None and not saved.roles[role].optimizer:
            raise CheckpointError(f"{path}: '{role}' was saved without its optimizer, so its training cannot continue")
    needed = [name for role, model in models.items() for name in needed_components(role, model)] + [manifest.RNG]
    for name in [*needed, *stateful]:
        if name not in saved.components:
            what = f"state of '{name}'" if name in stateful else f"component '{name}'"
            raise CheckpointError(
                f"{path} holds no {what}, only {sorted(saved.components)}; use a checkpoint of this command"
            )
    if same_layout and manifest.rng_file(platform.rank()) not in saved.files:
        raise CheckpointError(f"{path} holds no random states of rank {platform.rank()}; use another checkpoint")


def _tell_differences(saved: manifest.Manifest, path: Path) -> None:
    """One line on rank 0 when this process computes other bits than the one that wrote ``path``."""
    changed = manifest.changed_since(saved.fingerprint)
    if changed and platform.rank() == 0:
        print(f"{path.name}: continued, but not bit for bit, because of {changed}", flush=True)


def _saved(rng: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(rng), buffer)
    return buffer.getvalue()


def _json_text(state: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    _check_json(dict(state), "state")
    _check_json(dict(identity), "identity")
    return json.dumps([dict(state), dict(identity)])


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

"""Whether this life may continue the run that stands in its directory, and what it must know then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aligner.checkpoint import manifest
from aligner.checkpoint.identity import check_identity
from aligner.checkpoint.role_state import role_entry
from aligner.config.run_file import write_run_config
from aligner.config.schedule import remaining_updates
from aligner.distributed.collectives import on_all_ranks
from aligner.distributed.context import RunContext
from aligner.distributed.topology import seed_everything
from aligner.errors import ConfigError
from aligner.models.optimizer import schedule_remark
from aligner.models.role_model import RoleModel
from aligner.monitoring.writing import write_on_first_rank

_SEED_STRIDE = 1_000_003  # between the seeds of two steps; the ranks of one step lie between them


def accept_resume(context: RunContext, root: Any, identity: Mapping[str, Any]) -> list[str]:
    """Compare what this life is asked to be with the checkpoint it continues; returns remarks for the user. Collective.

    When it may go on, its configuration becomes the run's ``config.yaml``.

    Raises:
        ConfigError: fewer steps than done; changes that need ``run.accept_changes``, or that would have no effect.
        CheckpointError: another model, tokenizer or source.
    """
    source = context.resume_from
    if source is None:
        return []

    def compare() -> list[str]:
        saved = manifest.read(source)
        steps = root.trainer.max_steps
        if saved.step > steps:
            raise ConfigError(
                f"trainer.max_steps={steps}, but {source} is already at step {saved.step}; "
                f"give trainer.max_steps={saved.step} or more, or another run.dir"
            )
        return check_identity(saved.identity, identity, root.run.accept_changes, finished=saved.step == steps)

    remarks = on_all_ranks(compare)
    path = context.run_dir
    write_on_first_rank(path, lambda: write_run_config(path, root))
    return remarks


def schedule_remarks(root: Any, models: Mapping[str, RoleModel], step: int) -> list[str]:
    """For each role of a run continued after ``step`` whose learning-rate schedule ends before the run does, a line."""
    if step == 0:
        return []
    left = remaining_updates(root, step)
    schedules = {role: model.scheduler for role, model in models.items() if model.scheduler is not None}
    remarks = [schedule_remark(role, scheduler, left[role]) for role, scheduler in schedules.items()]
    return [remark for remark in remarks if remark]


def renew_random_states(context: RunContext, root: Any, models: Mapping[str, RoleModel]) -> None:
    """Start those random states (of dropout) anew that are not the checkpoint's, and not as they were at step 1.

    Under another layout the checkpoint has none for this rank; under another ``trainer.seed`` they are not wanted.
    Collective.
    """
    source = context.resume_from
    if source is None or not models:
        return
    saved = on_all_ranks(lambda: manifest.parse(source))
    layouts = {role: role_entry(model) for role, model in models.items()}
    is_same_layout = saved.world_size == context.world_size and saved.roles == layouts
    seed = saved.identity["config"]["trainer"]["seed"] if saved.identity else root.trainer.seed
    if not is_same_layout or seed != root.trainer.seed:
        topology = next(iter(models.values())).topology
        seed_everything((root.trainer.seed + _SEED_STRIDE * saved.step) % 2**62, topology)

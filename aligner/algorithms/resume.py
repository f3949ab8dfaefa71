"""Whether this life may continue the run that stands in its directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aligner.checkpoint import manifest
from aligner.checkpoint.identity import check_identity
from aligner.config.run_file import write_run_config
from aligner.distributed.collectives import on_all_ranks
from aligner.distributed.context import RunContext
from aligner.errors import ConfigError
from aligner.monitoring.writing import write_on_first_rank


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

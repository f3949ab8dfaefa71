"""Where a role's first weights come from: a Hugging Face directory, a checkpoint, or the newest one of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from aligner.checkpoint import manifest
from aligner.checkpoint.checkpointer import load_weights, newest_complete
from aligner.errors import CheckpointError

if TYPE_CHECKING:
    from aligner.models.role_model import RoleModel


class Source(NamedTuple):
    """``kind`` is ``hf`` (a Hugging Face directory) or ``checkpoint`` (one complete step of a run)."""

    kind: str
    path: Path


def resolve_source(path: str | Path) -> Source:
    """What ``path`` holds. Local; on a shared file system every rank finds the same.

    Raises:
        CheckpointError: it is none of the three.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(
            f"'{path}' does not exist; give a Hugging Face directory, a run directory or a checkpoint"
        )
    if (path / manifest.FILE).is_file():
        return Source("checkpoint", path)
    if (path / "checkpoints").is_dir():
        newest = newest_complete(path / "checkpoints")
        if newest is None:
            raise CheckpointError(f"run directory '{path}' has no complete checkpoint yet; let it save one first")
        return Source("checkpoint", newest)
    if (path / "config.json").is_file():
        return Source("hf", path)
    raise CheckpointError(
        f"'{path}' has neither config.json (Hugging Face), checkpoints/ (a run) nor {manifest.FILE} (a checkpoint)"
    )


def initialize_role(model: RoleModel, source: Source, role_in_checkpoint: str, *, strict: bool = True) -> list[str]:
    """Fill ``model`` with the weights of ``source``. Collective.

    Args:
        role_in_checkpoint: the role to take from a checkpoint; not used for a Hugging Face directory.
        strict: a scalar model's head must be there too; otherwise it may keep its seeded start (a critic or a reward
            model that starts from a policy).

    Returns:
        The names of the tensors that kept their values.
    """
    if source.kind == "checkpoint":
        return load_weights(source.path, role_in_checkpoint, model, strict=strict)
    from aligner.weights.convert import load_hf

    load_hf(model, source.path, need_head=strict)
    return []

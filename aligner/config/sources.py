"""Where a role's architecture and tokenizer are found, given what it starts from. Imports without torch.

A source (``init_from`` or ``model.path``) is one of: a Hugging Face directory, a run directory (its newest complete
checkpoint counts), a checkpoint directory of a run, or a hub id. Runs keep the trained role's ``config.json`` and
tokenizer in ``RUN/model``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODEL_DIRECTORY = "model"
CHECKPOINTS_DIRECTORY = "checkpoints"


def is_run_directory(path: Path) -> bool:
    """A run directory holds ``checkpoints/`` or ``model/config.json``."""
    return (path / CHECKPOINTS_DIRECTORY).is_dir() or (path / MODEL_DIRECTORY / "config.json").is_file()


def model_files(source: str | Path) -> Path | str:
    """The directory with ``config.json`` and tokenizer that belong to ``source``; a hub id is returned as it is."""
    path = Path(source)
    if (path / "config.json").is_file():
        return path
    if is_run_directory(path):
        return path / MODEL_DIRECTORY
    if path.parent.name == CHECKPOINTS_DIRECTORY and is_run_directory(path.parent.parent):
        return path.parent.parent / MODEL_DIRECTORY
    return path if path.exists() else str(source)


def role_source(role: Any) -> str:
    """What a role starts from: ``init_from``, else ``model.path``."""
    return str(role.init_from or role.model.path)

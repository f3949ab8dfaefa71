"""Files that a configuration names exist before ranks start. Imports without torch.

Contents are checked by the readers; this only spares a user the wait for models to load before a mistyped path shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aligner
from aligner.config import schema
from aligner.errors import ConfigError, DataError

_BUILTIN = "builtin:"


def check_files(root: Any) -> None:
    """Raise DataError for a missing data file and ConfigError for a missing function file of ``root``."""
    data = root.data
    keys = {
        schema.TextDataConfig: ("train", "validation"),
        schema.PromptDataConfig: ("prompts",),
        schema.PPODataConfig: ("validation_prompts",),
    }
    for owner, names in keys.items():
        for name in names if isinstance(data, owner) else ():
            if path := getattr(data, name):
                _check_data(f"data.{name}", path)
    if data.filter:
        _check_function("data.filter", data.filter)
    reward = getattr(root, "reward", None)
    if isinstance(reward, schema.RewardConfig) and reward.function:
        _check_function("reward.function", reward.function)


def _check_data(key: str, path: str) -> None:
    if path.startswith(_BUILTIN):
        folder = Path(aligner.__file__).parent / "data" / "builtin"
        names = sorted(file.name for file in folder.glob("*.json*"))
        wanted = path.removeprefix(_BUILTIN)
        if not {wanted, f"{wanted}.jsonl", f"{wanted}.json"} & set(names):
            raise DataError(f"{key}={path}: no built-in data set of this name; available: {', '.join(names)}")
    elif not Path(path).expanduser().is_file():
        found = "a directory" if Path(path).expanduser().is_dir() else "no such file"
        raise DataError(f"{key}={path}: {found}; give the path of a .jsonl or .json file, or builtin:<name>")


def _check_function(key: str, reference: str) -> None:
    path, separator, name = reference.rpartition(":")
    if not separator or not path.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"{key}={reference}: not of the form path/to/file.py:name")
    if not Path(path).expanduser().is_file():
        raise ConfigError(f"{key}={reference}: there is no file {path}; give the path of an existing Python file")

"""From a command and Hydra overrides to one frozen configuration value. Imports without torch.

Hydra's compose API does the composition; this module adds what a training run needs on top of it:

* keys that the schema does not have are errors in every form (``key=``, ``+key=``, ``++key=``), naming the nearest key;
* wrong types, missing values and failed interpolations are one-line :class:`~aligner.errors.ConfigError` messages;
* the result is a tree of frozen dataclasses, built once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigKeyError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
    ValidationError,
)

import aligner
from aligner.config import keys
from aligner.config.keys import ALL_ROOTS
from aligner.config.section import Section, freeze, to_container
from aligner.errors import ConfigError


def conf_directory() -> Path:
    """The folder of configuration files: inside the package when installed from a wheel, beside it in a clone."""
    package = Path(aligner.__file__).resolve().parent
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "ppo.yaml").is_file():
            return candidate
    raise ConfigError(f"no conf/ folder in {package} or beside it; the installation is incomplete, install it again")


def config_groups(config_dirs: Sequence[Path] = (), command: str = "") -> dict[str, list[str]]:
    """Config groups of ``command`` and their options, e.g. ``{"model": ["llama3_8b", ...], "recipe": [...]}``.

    ``cluster`` is the group of ``submit``, which has no other.
    """
    groups: dict[str, set[str]] = {}
    for root in (conf_directory(), *config_dirs):
        for file in sorted(root.glob("*/*.yaml")):
            if (file.parent.name == "cluster") == (command == "submit"):
                groups.setdefault(file.parent.name, set()).add(file.stem)
    return {name: sorted(options) for name, options in sorted(groups.items())}


def recipes(config_dirs: Sequence[Path] = ()) -> dict[str, str | None]:
    """Recipes and the command each is for, by its comment (``For `aligner ppo```); None: it does not say."""
    found: dict[str, str | None] = {}
    for root in (conf_directory(), *config_dirs):
        for file in sorted(root.glob("recipe/*.yaml")):
            match = re.search(r"^# For `aligner (\w+)`", file.read_text(encoding="utf-8"), re.MULTILINE)
            found[file.stem] = match[1] if match else None
    return dict(sorted(found.items()))


def compose(command: str, overrides: Sequence[str] = (), config_dirs: Sequence[Path] = ()) -> Any:
    """The frozen configuration root of ``command`` (one of :data:`~aligner.config.keys.ALL_ROOTS`).

    Raises:
        ConfigError: unknown key or option, wrong type, missing value, unresolvable interpolation.
    """
    config = compose_unresolved(command, overrides, config_dirs)
    _require_complete(command, config)
    try:
        root = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain_value(error, ALL_ROOTS[command])) from None
    assert isinstance(root, Section)
    return freeze(root)


def compose_unresolved(command: str, overrides: Sequence[str] = (), config_dirs: Sequence[Path] = ()) -> DictConfig:
    """The composed configuration before interpolation, as ``--cfg job`` prints it. Raises ConfigError."""
    _register_schema(command)
    directories = [_existing_directory(path) for path in config_dirs]
    arguments = _checked_overrides(command, overrides, directories)
    if directories:
        arguments = [*arguments, f"hydra.searchpath=[{','.join(f'file://{path}' for path in directories)}]"]
    try:
        with initialize_config_dir(str(conf_directory()), version_base="1.3"):
            config = hydra_compose(command, arguments)
    except HydraException as error:
        raise ConfigError(_explain_hydra(error, command)) from None
    except OmegaConfBaseException as error:
        raise ConfigError(_explain_value(error, ALL_ROOTS[command])) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from None
    for key in _leaf_keys(config):
        if not keys.is_known(ALL_ROOTS[command], key):
            raise ConfigError(keys.unknown_key_message(command, key))
    return config


def to_yaml(command: str, root: Section) -> str:
    """``root`` as YAML with the command's name on top: what ``run_dir/config.yaml`` holds."""
    return yaml.safe_dump({"command": command, **to_container(root)}, sort_keys=False, allow_unicode=True)


def quote_override(key: str, value: str) -> str:
    """``key='value'`` with Hydra's quoting, for values that may hold ``=``, commas or spaces."""
    escaped = value.replace("'", "\\'")
    return f"{key}='{escaped}'"


# --------------------------------------------------------------------------- before composition


def _register_schema(command: str) -> None:
    store = ConfigStore.instance()
    name = f"schema_{command}"
    if f"{name}.yaml" not in store.repo:
        store.store(name=name, node=ALL_ROOTS[command], provider="aligner")


def _existing_directory(path: Path) -> Path:
    if not path.is_dir():
        raise ConfigError(f"--config-dir {path}: no such directory")
    return path.resolve()


def _checked_overrides(command: str, overrides: Sequence[str], config_dirs: Sequence[Path]) -> list[str]:
    """Overrides as Hydra takes them, after each key was checked against the groups and the schema."""
    groups = config_groups(config_dirs, command)
    checked = []
    for text in overrides:
        override = _parse_override(text)
        key = override.key_or_group
        if override.is_sweep_override():
            raise ConfigError(
                f"{text}: several values (a sweep) in one run; give one value, or quote a list as {key}='[a,b]'"
            )
        if key == "hydra" or key.startswith("hydra."):
            raise ConfigError(f"{text}: hydra.* keys have no effect here; use run.dir=DIR for the run directory")
        if key in groups and isinstance(override.value(), str):
            _check_option(text, key, str(override.value()), groups[key])
            checked.append(text)
            continue
        if not keys.is_known(ALL_ROOTS[command], key):
            raise ConfigError(keys.unknown_key_message(command, key))
        if keys.is_free_mapping(ALL_ROOTS[command], key) or keys.in_free_mapping(ALL_ROOTS[command], key):
            text = text if override.is_delete() else "++" + text.lstrip("+")
        elif override.is_delete():
            raise ConfigError(f"{text}: keys of the schema cannot be removed; set {key}=null where it is optional")
        checked.append(text)
    return checked


def _parse_override(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        if "=" not in text:
            hint = "overrides have the form key=value; `--help` lists the keys"
        else:
            hint = "not a valid override; quote values with special characters: \"key='value'\""
        raise ConfigError(f"{text!r}: {hint}") from None


def _check_option(text: str, group: str, option: str, options: Sequence[str]) -> None:
    if option in options:
        return
    raise ConfigError(f"{text}: no such {group}; {keys.nearest(option, options)}available: {', '.join(options)}")


# --------------------------------------------------------------------------- after composition


def _leaf_keys(config: Any, prefix: str = "") -> list[str]:
    """Dotted keys of every leaf, without resolving interpolations."""
    plain: Any = OmegaConf.to_container(config, resolve=False) if isinstance(config, DictConfig) else config
    if not isinstance(plain, dict) or not plain:
        return [prefix] if prefix else []
    found: list[str] = []
    for name, value in plain.items():
        found.extend(_leaf_keys(value, f"{prefix}.{name}" if prefix else str(name)))
    return found


def _require_complete(command: str, config: DictConfig) -> None:
    """ConfigError that lists values which must be given (``???`` in the configuration)."""
    missing = [key for key in _leaf_keys(config) if _is_missing(config, key)]
    if not missing:
        return
    hints = {
        "model.path": "model=<preset> or model.path=<Hugging Face directory or hub id>",
        "data.train": "data.train=<file.jsonl>",
        "output": "output=<file.jsonl>",
    }
    wanted = ", ".join(hints.get(key, f"{key}=<value>") for key in missing)
    raise ConfigError(f"aligner {command} needs {', '.join(missing)}; give {wanted}")


def _is_missing(config: DictConfig, key: str) -> bool:
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    return (
        isinstance(node, DictConfig) and OmegaConf.is_missing(node, name) and not OmegaConf.is_interpolation(node, name)
    )


# --------------------------------------------------------------------------- messages


def _explain_hydra(error: HydraException, command: str) -> str:
    cause = error.__cause__ or error.__context__
    if isinstance(cause, OmegaConfBaseException):
        explained = _explain_value(cause, ALL_ROOTS[command])
        origin = str(error).partition("\n")[0]
        if file := re.match(r"In '([^']+)'", origin):
            return f"{explained} (in {file[1]}.yaml)"
        return explained
    lines = [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()]
    wanted = [line for line in lines if not line.startswith(("Config search path", "provider="))]
    return "; ".join(wanted)


def _explain_value(error: OmegaConfBaseException, root: type[Section]) -> str:
    """One line for an OmegaConf error: the key, what was found, what is needed."""
    key = str(error.full_key or error.key or "")
    key, _, item = key.partition("[")  # an element of a list: name the list
    reason = (error.msg if isinstance(error.msg, str) else str(error)).partition("\n")[0]
    if not key:
        return f"a value cannot be read: {reason}"
    if isinstance(error, InterpolationToMissingValueError):
        return f"{key}: {reason}"
    if isinstance(error, InterpolationResolutionError):
        detail = reason.partition('"')[2].rstrip('"') or reason
        return f"{key}: the interpolation cannot be resolved: {detail}"
    if isinstance(error, ConfigKeyError) or not keys.is_known(root, key):
        command = next(name for name, value in ALL_ROOTS.items() if value is root)
        return keys.unknown_key_message(command, key)
    if isinstance(error, ValidationError):
        found = "null" if "not Optional" in reason else reason.rstrip(".")
        where = f" (item {item.rstrip(']')})" if item else ""
        return f"{key}{where}: {found}; needs {keys.describe_type(root, key)}"
    return f"{key}: {reason}"

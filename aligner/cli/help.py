"""The text of ``aligner <command> --help``: config groups, then every key with its default and its meaning."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from aligner.cli.commands import COMMANDS
from aligner.config.compose import compose_unresolved, config_groups, recipes
from aligner.config.schema import ROOTS
from aligner.config.section import Section

_KEY_WIDTH = 62


def command_help(command: str, config_dirs: Sequence[Path] = ()) -> str:
    """Groups, keys and options of a command that takes Hydra overrides."""
    root = ROOTS[command]
    defaults = compose_unresolved(command, (), config_dirs)
    lines = [
        f"aligner {command}: {COMMANDS[command]}",
        "",
        f"usage: aligner {command} [model=NAME] [+recipe=NAME] [key=value ...] [options]",
        "",
        "groups (name=option):",
    ]
    for group, options in config_groups(config_dirs).items():
        if group == "recipe":
            shown = [name for name, owner in recipes(config_dirs).items() if owner in (command, None)]
            lines.append(f"  +recipe: {', '.join(shown) or 'none for this command'}")
        else:
            lines.append(f"  {group}: {', '.join(options)}")
    lines += ["", "keys (key=value; the default stands here):", *key_lines(root, defaults), ""]
    lines += [
        "options:",
        "  --cfg job [--resolve]  print the composed configuration and stop",
        "  --config-dir DIR       search DIR for more model/*.yaml and recipe/*.yaml",
        "  --help                 this text",
    ]
    return "\n".join(lines)


def key_lines(section: type[Section], defaults: DictConfig, prefix: str = "") -> list[str]:
    """``key=default  # comment`` for every key below ``section``."""
    lines = []
    hints, comments = typing.get_type_hints(section), _comments(section)
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        annotation = hints[field.name]
        key = f"{prefix}{field.name}"
        if isinstance(annotation, type) and issubclass(annotation, Section):
            lines += key_lines(annotation, defaults[field.name], f"{key}.")
            continue
        text = f"  {key}={_text(OmegaConf.to_container(defaults, resolve=False), field.name)}"
        comment = comments.get(field.name, "")
        lines.append(f"{text:<{_KEY_WIDTH}}  # {comment}" if comment else text)
    return lines


def _text(values: Any, name: str) -> str:
    value = values[name]
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _comments(section: type[Section]) -> dict[str, str]:
    """``{field: comment}`` read from the schema's source, inherited fields included."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if not issubclass(base, Section) or base is Section:
            continue
        for line in inspect.getsource(base).splitlines():
            code, separator, comment = line.partition("  # ")
            name = code.strip().partition(":")[0]
            if separator and name.isidentifier():
                found[name] = comment.strip()
    return found

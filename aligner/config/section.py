"""Configuration sections: mutable while Hydra composes them, frozen while the program runs.

Hydra and OmegaConf cannot override frozen dataclasses, so the schema classes are ordinary dataclasses
derived from :class:`Section`. After composition :func:`freeze` makes the whole tree immutable, once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

S = TypeVar("S", bound="Section")


class Section:
    """Base of every schema dataclass. After :func:`freeze`, assignment raises ``AttributeError``."""

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_frozen"):
            raise AttributeError(f"configuration is frozen; cannot set {type(self).__name__}.{name}")
        object.__setattr__(self, name, value)


def freeze(section: S) -> S:
    """Freeze ``section`` and every section below it; lists become tuples, dicts read-only. Returns ``section``."""
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        value = getattr(section, field.name)
        if isinstance(value, Section):
            freeze(value)
        elif isinstance(value, list):
            object.__setattr__(section, field.name, tuple(value))
        elif isinstance(value, dict):
            object.__setattr__(section, field.name, MappingProxyType(dict(value)))
    object.__setattr__(section, "_frozen", True)
    return section


def replace(section: S, **changes: Any) -> S:
    """A frozen copy of ``section`` with some fields changed (the original stays as it is)."""
    return freeze(dataclasses.replace(section, **changes))  # type: ignore[type-var]


def to_container(value: Any) -> Any:
    """Sections as dicts, tuples as lists, read-only mappings as dicts: plain values for YAML and JSON."""
    if isinstance(value, Section):
        return {f.name: to_container(getattr(value, f.name)) for f in dataclasses.fields(value)}  # type: ignore[arg-type]
    if isinstance(value, Mapping):
        return {str(key): to_container(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_container(item) for item in value]
    return value

"""The keys of a schema root: which exist, their types, and the nearest one to a misspelt key."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable
from typing import Any

from aligner.config.cluster import SubmitRoot
from aligner.config.schema import ROOTS
from aligner.config.section import Section

#: Every command whose settings are composed; ``submit`` has the cluster's, besides those of the command it submits.
ALL_ROOTS: dict[str, type[Any]] = {**ROOTS, "submit": SubmitRoot}

_LEAST_LIKENESS = 1.0  # of 2
_known: dict[type[Any], dict[str, Any]] = {}


def schema_keys(root: type[Any]) -> dict[str, Any]:
    """Every dotted key below ``root`` (sections included) with its type annotation."""
    if root not in _known:
        _known[root] = _read_keys(root)
    return _known[root]


def _read_keys(root: type[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(root)
    for field in dataclasses.fields(root):
        annotation = hints[field.name]
        found[field.name] = annotation
        if _is_section(annotation):
            for name, inner in schema_keys(annotation).items():
                found[f"{field.name}.{name}"] = inner
    return found


def is_known(root: type[Section], key: str) -> bool:
    """True for keys of the schema and for entries of its free mappings (``evaluation.checkpoints.NAME``)."""
    return key in schema_keys(root) or in_free_mapping(root, key)


def in_free_mapping(root: type[Section], key: str) -> bool:
    """True when ``key`` is an entry of a mapping whose names the user chooses."""
    return is_free_mapping(root, key.rpartition(".")[0])


def is_free_mapping(root: type[Section], key: str) -> bool:
    """True when ``key`` is a mapping whose names the user chooses."""
    return typing.get_origin(schema_keys(root).get(key)) is dict


def unknown_key_message(command: str, key: str) -> str:
    """One line: the key, the nearest key of this command, and the command that does have the key, if one does."""
    known = schema_keys(ALL_ROOTS[command])
    owners = [name for name, root in ALL_ROOTS.items() if name != command and is_known(root, key)]
    belongs = f" (a key of aligner {', '.join(owners)})" if owners else ""
    near = nearest(key, known, "nearest key")
    return f"{key}: unknown key for aligner {command}{belongs}; {near}`aligner {command} --help` lists all"


def nearest(word: str, candidates: Iterable[str], label: str = "nearest") -> str:
    """``nearest: CANDIDATE; `` for the one most like ``word``; "" when none is much like it.

    The last dotted part weighs as much as the whole.
    """
    word = word.lstrip("+~")
    leaf = word.rpartition(".")[2]

    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, word, candidate).ratio()
        last = difflib.SequenceMatcher(None, leaf, candidate.rpartition(".")[2]).ratio()
        return whole + last

    found = max(candidates, key=likeness)
    return f"{label}: {found}; " if likeness(found) >= _LEAST_LIKENESS else ""


def describe_type(root: type[Section], key: str) -> str:
    """What a key takes, in words: ``an integer``, ``a number or null``, ``a section with keys ...``."""
    return _describe(schema_keys(root).get(key, str))


def _describe(annotation: Any) -> str:
    words: dict[Any, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    if annotation in words:
        return words[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [_describe(argument) for argument in arguments if argument is not type(None)]
        return " or ".join(inner) + " or null"
    if origin is list:
        return f"a list, each {_describe(arguments[0])}"
    if origin is dict:
        return f"a mapping of names to values, each {_describe(arguments[1])}"
    if _is_section(annotation):
        names = [field.name for field in dataclasses.fields(annotation)]
        return f"a section with the keys {', '.join(names)}"
    return str(annotation)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)

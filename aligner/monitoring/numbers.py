"""Numbers in JSON files: JSON has no word for non-finite ones, so they are the strings ``"NaN"``, ``"Infinity"`` and
``"-Infinity"`` everywhere in a run directory."""

from __future__ import annotations

import math
from typing import Any

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode_number(value: float) -> float | int | str:
    """``value`` as JSON can hold it: finite numbers as they are, the others as strings. Accepts what ``float`` does
    (a zero-dimensional tensor, a numpy scalar)."""
    if isinstance(value, int):
        return int(value)
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number


def decode_number(value: Any) -> Any:
    """The inverse of :func:`encode_number`; other values stay as they are."""
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def encode_tree(value: Any) -> Any:
    """:func:`encode_number` applied to every float in nested dicts, lists and tuples."""
    if isinstance(value, dict):
        return {name: encode_tree(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode_tree(item) for item in value]
    return encode_number(value) if isinstance(value, float) else value


def decode_tree(value: Any) -> Any:
    """The inverse of :func:`encode_tree` (tuples come back as lists)."""
    if isinstance(value, dict):
        return {name: decode_tree(item) for name, item in value.items()}
    if isinstance(value, list):
        return [decode_tree(item) for item in value]
    return decode_number(value)

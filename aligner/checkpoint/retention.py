"""Which checkpoints of a run stay. Pure: steps in, steps out. Imports without torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Retention:
    """Keep the newest ``keep_last``, every step divisible by ``keep_every``, and the best by ``best_metric``.

    ``keep_last`` None: all. ``best_mode``: "max" or "min". ``best_metric`` is a metric of the step's row.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    best_metric: str | None = None
    best_mode: str = "max"


KEEP_ALL = Retention()


def to_delete(
    steps: Collection[int], keep_last: int | None, keep_every: int | None, best: int | None, protected: Collection[int]
) -> list[int]:
    """The steps that may go, oldest first. ``steps`` are sound; the newest of them always stays."""
    if keep_last is None:
        return []
    ordered = sorted(set(steps))
    newest = ordered[-max(1, keep_last) :]
    kept = {*newest, *protected, *([] if best is None else [best])}
    return [step for step in ordered if step not in kept and not (keep_every and step % keep_every == 0)]


def best_of(metrics: Mapping[int, Mapping[str, float]], retention: Retention) -> dict[str, Any] | None:
    """The best step by ``retention.best_metric`` as ``{"metric", "mode", "step", "value"}``; of equal ones the first.

    ``metrics``: step -> metrics. None when no step has a finite value of the metric, or none is asked for.
    """
    name = retention.best_metric
    if name is None:
        return None
    values = {step: row[name] for step, row in metrics.items() if math.isfinite(row.get(name, math.nan))}
    if not values:
        return None
    sign = 1 if retention.best_mode == "max" else -1
    best = max(sorted(values), key=lambda step: sign * values[step])
    return {"metric": name, "mode": retention.best_mode, "step": best, "value": values[best]}

"""Retention applied to a directory of checkpoints: by rank 0, after the next one is published."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from aligner.checkpoint import manifest, snapshot
from aligner.checkpoint.pins import pinned_steps
from aligner.checkpoint.retention import Retention, best_of, to_delete


def best_so_far(directory: Path, retention: Retention, step: int, metrics: dict[str, float]) -> dict[str, Any] | None:
    """The best step, with ``step`` about to be published with ``metrics``; see :func:`retention.best_of`."""
    if retention.best_metric is None:
        return None
    return best_of({**_sound_metrics(directory), step: metrics}, retention)


def apply_retention(directory: Path, retention: Retention, protected: Collection[int]) -> None:
    """Delete what ``retention`` does not keep and nobody needs. What cannot be deleted is told. Local.

    Damaged checkpoints are neither counted nor deleted.
    """
    if retention.keep_last is None:
        return
    metrics = _sound_metrics(directory)
    best = best_of(metrics, retention)
    kept = {*protected, *pinned_steps(directory)}
    best_step = best["step"] if best is not None else None
    for step in to_delete(metrics, retention.keep_last, retention.keep_every, best_step, kept):
        try:
            snapshot.remove(directory, step, still_allowed=lambda step=step: step not in pinned_steps(directory))  # type: ignore[misc]
        except OSError as error:
            print(f"checkpoint {manifest.step_name(step)} cannot be deleted: {error}", flush=True)


def _sound_metrics(directory: Path) -> dict[int, dict[str, float]]:
    """Step -> metrics of the checkpoints that are sound by the sizes of their files."""
    found = {}
    for path in manifest.published(directory):
        if not manifest.damage(path):
            content = manifest.parse(path)
            found[content.step] = content.metrics
    return found

"""Deleting checkpoints: by retention (rank 0, after the next one is published), or by name. Imports without torch."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from aligner.checkpoint import manifest
from aligner.checkpoint.pins import pinned_steps
from aligner.checkpoint.retention import Retention, best_of, to_delete

DELETION_THREAD = "checkpoint-deletion"


def best_so_far(directory: Path, retention: Retention, step: int, metrics: dict[str, float]) -> dict[str, Any] | None:
    """The best step, with ``step`` about to be published with ``metrics``; see :func:`retention.best_of`."""
    if retention.best_metric is None:
        return None
    return best_of({**_sound_metrics(directory), step: metrics}, retention)


def apply_retention(directory: Path, retention: Retention, protected: Collection[int]) -> None:
    """Delete what ``retention`` does not keep and nobody needs. What cannot be deleted is told. Local.

    Damaged checkpoints are neither counted nor deleted. Files are removed beside training, which takes a second for a
    few gigabytes; this process does not end before.
    """
    if retention.keep_last is None:
        return
    metrics = _sound_metrics(directory)
    best = best_of(metrics, retention)
    kept = {*protected, *pinned_steps(directory)}
    best_step = best["step"] if best is not None else None
    for step in to_delete(metrics, retention.keep_last, retention.keep_every, best_step, kept):
        try:
            withdrawn = _withdraw(directory, step)
        except OSError as error:
            print(f"checkpoint {manifest.step_name(step)} cannot be deleted: {error}", flush=True)
            continue
        if withdrawn is not None:
            threading.Thread(target=shutil.rmtree, args=(withdrawn, True), name=DELETION_THREAD).start()


def remove(directory: Path, step: int, *, even_pinned: bool = False) -> bool:
    """Delete a checkpoint: it stops being one at once. False: somebody pinned it, so it is kept. Raises OSError."""
    withdrawn = _withdraw(directory, step, even_pinned=even_pinned)
    if withdrawn is None:
        return False
    shutil.rmtree(withdrawn, ignore_errors=True)
    return True


def _withdraw(directory: Path, step: int, *, even_pinned: bool = False) -> Path | None:
    """Take its name from a checkpoint; where its files are now, or None when somebody pinned it meanwhile."""
    path = directory / manifest.step_name(step)
    doomed = directory / f"{manifest.TEMPORARY}deleted-{path.name}.{os.getpid()}"
    os.rename(path, doomed)
    if not even_pinned and step in pinned_steps(directory):  # looked at when nobody can start to use it any more
        os.rename(doomed, path)
        return None
    return doomed


def _sound_metrics(directory: Path) -> dict[int, dict[str, float]]:
    """Step -> metrics of the checkpoints that are sound by the sizes of their files."""
    found = {}
    for path in manifest.published(directory):
        if not manifest.damage(path):
            content = manifest.parse(path)
            found[content.step] = content.metrics
    return found

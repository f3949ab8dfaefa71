"""One checkpoint on its way to the disk: planned by all ranks, written by each, published by rank 0.

Invariants:

- A directory named ``step_*`` is complete and on the disk: everything is written under a temporary name, then renamed.
- A checkpoint that exists stays whole whenever a process is killed; one of the same step is exchanged in one operation.
- Writing touches nothing but memory and files, so it can run beside training.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aligner.checkpoint import manifest
from aligner.checkpoint.async_write import HeldTensors, Staging
from aligner.checkpoint.shard_file import TensorSource
from aligner.checkpoint.torch_dist import Shards, Written, contents, finish
from aligner.distributed import faults

_OLD = ".old-"  # a checkpoint that is being replaced, where the file system cannot exchange

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Outcome:
    """What one rank wrote: by role, and files beside the roles (path inside the checkpoint)."""

    roles: dict[str, Written] = field(default_factory=dict)
    files: dict[str, manifest.Entry] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """What this rank writes of a checkpoint. ``described`` is the manifest without files, on rank 0; else None.

    ``held``: where tensors are read while training goes on; None: they stand still.
    """

    directory: Path  # RUN/checkpoints
    step: int
    temporary: Path
    roles: dict[str, Shards]
    small: dict[str, bytes]
    described: manifest.Manifest | None
    held: HeldTensors | None = None

    @property
    def final(self) -> Path:
        return self.directory / manifest.step_name(self.step)

    def write(self) -> Outcome:
        """Write this rank's files. Not collective; raises OSError."""
        began = time.perf_counter()
        faults.hit("write")
        self.temporary.mkdir(parents=True, exist_ok=True)
        source_of = TensorSource if self.held is None else self.held.source
        done = Outcome(
            roles={role: shards.write(self.temporary / role, source_of) for role, shards in self.roles.items()},
            files={name: manifest.write_file(self.temporary / name, data) for name, data in self.small.items()},
        )
        return replace(done, seconds=time.perf_counter() - began)

    def beside_training(self, staging: Staging) -> Snapshot:
        """The same, whatever becomes of the tensors after ``held.keep()``. Raises MemoryError."""
        return replace(self, held=staging.hold([item.data for shards in self.roles.values() for item in shards.items]))

    def describe(self, outcomes: list[Outcome], best: dict[str, Any] | None) -> manifest.Manifest:
        """Write the index of each role; returns the whole manifest. Rank 0; raises OSError."""
        assert self.described is not None
        files: dict[str, manifest.Entry] = {}
        for outcome in outcomes:
            files |= outcome.files
            for role, written in outcome.roles.items():
                files |= {f"{role}/{name}": entry for name, entry in written.files.items()}
        for role, shards in self.roles.items():
            assert shards.index is not None
            storages = [outcome.roles[role].storage for outcome in outcomes]
            files[f"{role}/.metadata"] = finish(self.temporary / role, shards.index, storages)
        return replace(self.described, files=files, best=best)

    def publish(self, whole: manifest.Manifest) -> None:
        """Write the manifest, then the rename that makes the checkpoint exist. Rank 0; raises OSError.

        One of the same step is replaced.
        """
        manifest.write(self.temporary, whole)
        faults.hit("publish")
        if self.final.exists():
            _exchange(self.temporary, self.final)
            manifest.sync(self.directory)
            self.discard()
        else:
            os.rename(self.temporary, self.final)
            manifest.sync(self.directory)
        manifest.point_to(self.final)

    def discard(self) -> None:
        """Remove what was written. Rank 0; never raises."""
        shutil.rmtree(self.temporary, ignore_errors=True)


def role_contents(shards: Shards) -> Mapping[str, tuple[str, list[int], int]]:
    """The tensors of a role as a whole; only on rank 0."""
    return contents(shards.index) if shards.index is not None else {}


def temporary_path(directory: Path, step: int, token: str) -> Path:
    """Where a save writes: a name that no other save has, so that a writer of an ended life cannot disturb it."""
    return directory / f"{manifest.TEMPORARY}{manifest.step_name(step)}.{token}"


def clear_leftovers(directory: Path) -> None:
    """Remove what interrupted saves and deletions left. Only for the holder of the run, without a save in flight."""
    restore_replaced(directory)
    for leftover in [*directory.glob(f"{manifest.TEMPORARY}*"), *directory.glob(f"{_OLD}*")]:
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def restore_replaced(directory: Path) -> None:
    """Bring back a checkpoint whose replacement was interrupted, where the file system cannot exchange."""
    for old in directory.glob(f"{_OLD}*"):
        final = directory / old.name.removeprefix(_OLD)
        if not final.exists():
            os.rename(old, final)


def _exchange(new: Path, old: Path) -> None:
    """Swap two directories in one operation, where the file system can; else so that none is lost in between."""
    result = _LIBC.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE)
    if result == 0:
        return
    aside = old.with_name(f"{_OLD}{old.name}")
    os.rename(old, aside)
    os.rename(new, old)
    shutil.rmtree(aside, ignore_errors=True)

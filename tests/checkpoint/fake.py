"""Checkpoints that hold no model: real manifests over made-up files, for what needs neither torch nor ranks."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from aligner.checkpoint import manifest
from aligner.checkpoint.deletion import DELETION_THREAD


def fake_checkpoint(directory: Path, step: int, **fields: Any) -> Path:
    """``directory/step_…`` with a role ``actor`` of ``100 + step`` bytes and the state ``counters``."""
    path = directory / manifest.step_name(step)
    (path / "actor").mkdir(parents=True)
    files = {
        "actor/__0_0.distcp": manifest.write_file(path / "actor" / "__0_0.distcp", bytes(100 + step)),
        "actor/.metadata": manifest.write_file(path / "actor" / ".metadata", b"index"),
        manifest.STATE_FILE: manifest.write_file(path / manifest.STATE_FILE, json.dumps({"counters": {}}).encode()),
        manifest.rng_file(0): manifest.write_file(path / manifest.rng_file(0), b"random"),
    }
    described: dict[str, Any] = {
        "roles": {"actor": manifest.RoleEntry(tp=1, pp=1, sequence_parallel=False, optimizer=True)},
        "components": {
            "actor": {"kind": "model", "role": "actor", "bytes": 100 + step, "tensors": {"w": ["float32", 5, 5]}},
            "counters": {"kind": "state"},
            manifest.RNG: {"kind": "rng", "ranks": 1},
        },
        "time": 1.7e9 + step,
    }
    manifest.write(path, manifest.Manifest(step, 1, files=files, **(described | fields)))
    return path


def wait_for_deletions() -> None:
    """Until the files of deleted checkpoints are gone."""
    for thread in threading.enumerate():
        if thread.name == DELETION_THREAD:
            thread.join()

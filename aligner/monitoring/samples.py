"""Kept samples: ``run_dir/samples/step_00000012.jsonl``, one JSON object a response.

A row holds ``prompt`` and ``response`` (strings), ``step`` (int) or ``model`` (a checkpoint's name), and scores under
their names (``reward``, ``rule_score``, ``kl``), ``tokens`` and ``finish_reason`` where known. The report puts
responses to one prompt side by side.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from aligner.errors import CheckpointError
from aligner.monitoring.numbers import decode_number, encode_tree

SAMPLES_DIR = "samples"
_STEP_FILE = re.compile(r"step_(\d+)\.jsonl")


def step_samples_path(run_dir: Path, step: int) -> Path:
    """Where the samples of a validation at ``step`` belong."""
    return run_dir / SAMPLES_DIR / f"step_{step:08d}.jsonl"


def write_samples(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write ``rows`` to ``path`` under a temporary name, then rename. Call on rank 0 alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(encode_tree(dict(row)), ensure_ascii=False, allow_nan=False) + "\n")
    os.replace(temporary, path)


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The rows of one file. Raises :class:`CheckpointError` naming file, line and field for a malformed row."""
    rows = []
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{path}:{number}: not a JSON object ({error}); remove the line") from None
            if not isinstance(row, dict):
                raise CheckpointError(f"{path}:{number}: expected a JSON object, found {type(row).__name__}")
            for name in ("prompt", "response"):
                if not isinstance(row.get(name), str):
                    raise CheckpointError(f"{path}:{number}: field '{name}' must be a string, found {row.get(name)!r}")
            rows.append({name: decode_number(value) for name, value in row.items()})
    return rows


def drop_samples_after(run_dir: Path, resumed_step: int | None) -> None:
    """Remove sample files of steps beyond ``resumed_step`` (``None``: of every step)."""
    for path in (run_dir / SAMPLES_DIR).glob("step_*.jsonl"):
        match = _STEP_FILE.fullmatch(path.name)
        if match and (resumed_step is None or int(match.group(1)) > resumed_step):
            path.unlink()

"""Where metrics go: ``metrics.jsonl`` and TensorBoard, written by rank 0 alone.

``metrics.jsonl`` holds one JSON object a step: ``{"step": 3, "time": 1718000000.0, "train/loss": 1.25, ...}``; ``time``
is seconds since the epoch. Steps increase from line to line. JSON has no word for non-finite numbers, so they are the
strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``; :func:`read_metrics` turns them back into floats.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from aligner.errors import CheckpointError
from aligner.monitoring.numbers import decode_number, encode_number, encode_tree
from aligner.monitoring.samples import drop_samples_after

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl``, non-finite values as floats.

    A torn last line (the process was killed while writing it) is left out. Raises :class:`CheckpointError` with file
    and line for anything else that is not an object with an integer ``step``.
    """
    rows = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            if number == len(lines):
                break
            raise CheckpointError(f"{path}:{number}: not a JSON object ({error}); remove the line") from None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise CheckpointError(f"{path}:{number}: expected an object with an integer 'step'; remove the line")
        rows.append({name: decode_number(value) for name, value in row.items()})
    return rows


class MetricsLogger:
    """Appends one line a step to ``run_dir/metrics.jsonl`` and the same scalars to ``run_dir/tensorboard``.

    ``resumed_step`` is the step of the checkpoint a run continues from: later lines, written by a life that ended
    before its next checkpoint, are dropped (the file is rewritten under a temporary name and renamed), and so are
    kept samples of later steps. ``None`` starts anew: nothing of an earlier life stays. On ranks other than 0 nothing
    happens at all. Raises :class:`CheckpointError` on rank 0 when the file is damaged; let all ranks agree first.
    """

    def __init__(self, run_dir: Path, rank: int, resumed_step: int | None = None):
        self._file = None
        self._writer = None
        self._last_step: int | None = None
        if rank != 0:
            return
        from torch.utils.tensorboard import SummaryWriter

        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / METRICS_FILE
        self._last_step = _drop_after(path, resumed_step)
        drop_samples_after(run_dir, resumed_step)
        self._file = path.open("a", encoding="utf-8")
        threading.excepthook = _tell_full_disk
        purge_step = 0 if resumed_step is None else resumed_step + 1
        self._writer = SummaryWriter(str(run_dir / TENSORBOARD_DIR), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write all metrics of ``step`` in one line. Raises ``ValueError`` when ``step`` was already written."""
        if self._file is None or self._writer is None:
            return
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} logged after step {self._last_step}; one call a step, in order")
        self._last_step = step
        row = {"step": step, "time": round(time.time(), 3)}
        row.update({name: encode_number(value) for name, value in metrics.items()})  # type: ignore[misc]
        self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), global_step=step)
        self._writer.flush()

    def close(self) -> None:
        """Close both sinks. Safe to call twice; what a full disk no longer takes was told when it was logged."""
        for sink in (self._file, self._writer):
            if sink is not None:
                with suppress(OSError):
                    sink.close()
        self._file = self._writer = None

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _tell_full_disk(failed: threading.ExceptHookArgs) -> None:
    """One line where TensorBoard's thread cannot write; the traceback of any other failed thread."""
    if isinstance(failed.exc_value, OSError) and "AsyncWriter" in type(failed.thread).__name__:
        print(f"TensorBoard files cannot be written: {failed.exc_value.strerror}", file=sys.stderr, flush=True)
        return
    threading.__excepthook__(failed)


def _drop_after(path: Path, resumed_step: int | None) -> int | None:
    """Rewrite ``path`` atomically without rows beyond ``resumed_step`` (``None``: without any). Returns the last
    step kept."""
    if not path.exists():
        return None
    kept = [] if resumed_step is None else [row for row in read_metrics(path) if row["step"] <= resumed_step]
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        for row in kept:
            stream.write(json.dumps(encode_tree(row), ensure_ascii=False, allow_nan=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    return kept[-1]["step"] if kept else None

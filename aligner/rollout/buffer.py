"""The finished rollout chunks of an unfinished step, kept between two lives of a run.

``RUN/rollouts/step_<step>/chunk_<i>/`` holds what :meth:`RolloutBatch.save` writes; ``manifest.json`` beside it names
the step, the checkpoint whose weights sampled the chunks (by the sha256 of its manifest), what they were sampled with
(seed, sampling parameters: the next life may have others), and size and checksum of every file. The directory is
published by rename; nothing in it is unpickled. Chunks only save time: whatever is wrong with them, they are sampled
again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aligner.checkpoint.manifest import file_entry, file_problem, step_name, sync, write_file
from aligner.distributed.collectives import broadcast_object
from aligner.distributed.platform import rank
from aligner.errors import AlignerError
from aligner.rollout.batch import JSON_FILE, TENSORS_FILE, RolloutBatch

ROLLOUTS_DIRECTORY = "rollouts"
MANIFEST_FILE = "manifest.json"
FORMAT = 1


def save_chunks(
    run_dir: Path,
    step: int,
    chunks: Sequence[RolloutBatch],
    checkpoint_digest: str,
    sampled_with: Mapping[str, Any] | None = None,
) -> str:
    """Keep ``chunks`` of ``step`` in place of all that were kept before; rank 0 writes.

    ``checkpoint_digest``: of the checkpoint that the step continues from. ``sampled_with``: JSON values. Returns why
    nothing is kept, the same on every rank; "" when all is. Collective.
    """
    reason = ""
    if rank() == 0:
        try:
            _write(run_dir / ROLLOUTS_DIRECTORY, step, chunks, checkpoint_digest, _plain(sampled_with))
        except Exception as error:  # whatever it is, the other ranks must hear of it
            reason = _words(error)
    return broadcast_object(reason)


def load_chunks(
    run_dir: Path, step: int, checkpoint_digest: str, sampled_with: Mapping[str, Any] | None = None
) -> list[RolloutBatch]:
    """The chunks kept of ``step`` that were sampled from the checkpoint of ``checkpoint_digest`` with ``sampled_with``.

    None are returned when there are none, when one is damaged or when they were sampled otherwise; rank 0 says why and
    reads for all. Collective.
    """
    chunks: list[RolloutBatch] = []
    directory = run_dir / ROLLOUTS_DIRECTORY / step_name(step)
    if rank() == 0 and directory.exists():
        try:
            chunks = _read(directory, step, checkpoint_digest, _plain(sampled_with))
        except Exception as error:
            print(f"{directory}: {_words(error)}; step {step} is sampled anew", flush=True)
    return broadcast_object(chunks)


def kept_samples(run_dir: Path, step: int) -> int:
    """How many samples of ``step`` are kept, by the manifest alone; 0 where there is none. Local."""
    try:
        return int(_manifest(run_dir / ROLLOUTS_DIRECTORY / step_name(step), step)["samples"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return 0


def drop_chunks(run_dir: Path) -> None:
    """Remove all chunks of the run, if there are any. Rank 0 acts; collective in name only: it waits for nobody."""
    if rank() == 0:
        shutil.rmtree(run_dir / ROLLOUTS_DIRECTORY, ignore_errors=True)


def _write(
    rollouts: Path, step: int, chunks: Sequence[RolloutBatch], checkpoint_digest: str, sampled_with: dict[str, Any]
) -> None:
    temporary, published = rollouts / f".tmp-{step_name(step)}", rollouts / step_name(step)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        files = {}
        for index, chunk in enumerate(chunks):
            chunk.save(temporary / _chunk_name(index))
            for name in _files(index):
                files[name] = file_entry(temporary / name)
                sync(temporary / name)
            sync(temporary / _chunk_name(index))
        content = {
            "format": FORMAT,
            "step": step,
            "checkpoint": checkpoint_digest,
            "sampled_with": sampled_with,
            "samples": sum(len(chunk) for chunk in chunks),
            "chunks": len(chunks),
            "files": files,
        }
        write_file(temporary / MANIFEST_FILE, json.dumps(content, indent=1).encode())
        sync(temporary)
        if published.exists():  # a directory cannot be replaced at once: between the two renames nothing is kept
            shutil.rmtree(rollouts / ".old", ignore_errors=True)
            os.rename(published, rollouts / ".old")
        os.rename(temporary, published)
        sync(rollouts)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for other in rollouts.iterdir():
        if other != published:
            shutil.rmtree(other, ignore_errors=True)


def _manifest(directory: Path, step: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / MANIFEST_FILE).read_text(encoding="utf-8"))
    if content["format"] != FORMAT or content["step"] != step:
        raise ValueError(f"holds format {content['format']} of step {content['step']}, not {FORMAT} of step {step}")
    return content


def _read(directory: Path, step: int, checkpoint_digest: str, sampled_with: dict[str, Any]) -> list[RolloutBatch]:
    """The chunks in ``directory``. Raises ValueError and others for everything that is not as it was written."""
    content = _manifest(directory, step)
    if content["checkpoint"] != checkpoint_digest:
        raise ValueError("was sampled from another checkpoint than the one the run continues from")
    if content["sampled_with"] != sampled_with:
        before = {name: value for name, value in content["sampled_with"].items() if sampled_with.get(name) != value}
        now = {name: value for name, value in sampled_with.items() if content["sampled_with"].get(name) != value}
        raise ValueError(f"was sampled with {before}, not with {now}")
    count, files = int(content["chunks"]), content["files"]
    if count < 1 or len(files) != 2 * count:
        raise ValueError(f"its manifest names {count} chunks and {len(files)} files, which do not belong together")
    for name in (name for index in range(count) for name in _files(index)):
        size, digest = files[name]
        if problem := file_problem(directory, name, (size, digest)):
            raise ValueError(problem)
    return [RolloutBatch.load(directory / _chunk_name(index)).validate() for index in range(count)]


def _plain(sampled_with: Mapping[str, Any] | None) -> dict[str, Any]:
    """As it comes back from JSON, so that it can be compared."""
    return json.loads(json.dumps(dict(sampled_with or {})))


def _chunk_name(index: int) -> str:
    return f"chunk_{index:05d}"


def _files(index: int) -> list[str]:
    return [f"{_chunk_name(index)}/{name}" for name in (TENSORS_FILE, JSON_FILE)]


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or ''} {error.strerror or error}".strip()
    if isinstance(error, (AlignerError, ValueError)) and not isinstance(error, json.JSONDecodeError):
        return str(error)
    return f"{type(error).__name__}: {error}"

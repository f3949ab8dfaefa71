"""The manifest of a checkpoint: written last, read first, and all that is trusted before anything is unpickled.

``manifest.json`` (format 2) names what the checkpoint consists of (``components``), the layouts of its roles, what the
run is (``identity``, made by the caller), the software that wrote it, the metrics of its step, and the size and
checksum of every other file. Imports without torch.

The checksum is XXH3's of 128 bits: it finds damage as surely as a cryptographic one, at ten times the speed, which
is what a save in the background takes from training. It does not protect from somebody who may write here anyway.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform as python_platform
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

from aligner.errors import CheckpointError

FILE = "manifest.json"
FORMAT = 2
STATE_FILE = "state.json"
RNG = "rng"  # the component of random states
LATEST = "latest"  # beside the checkpoints: the name of the newest; a hint
TEMPORARY = ".tmp-"  # how names begin that no reader looks at

Entry = tuple[int, str]  # bytes, checksum as of `xxh128sum`

new_checksum = xxhash.xxh3_128  # an object with update() and hexdigest(), as of hashlib


@dataclass(frozen=True)
class RoleEntry:
    """The layout of one saved role, and whether an optimizer was saved with it."""

    tp: int
    pp: int
    sequence_parallel: bool
    optimizer: bool


@dataclass(frozen=True)
class Manifest:
    """What ``manifest.json`` says.

    ``components``: name -> ``{"kind": "model" | "optimizer" | "scheduler" | "state" | "rng", ...}``; a model's or
    optimizer's has ``role``, ``bytes`` and ``tensors`` (name -> [type, shape of the whole tensor]). ``time``: of the
    save, seconds since the epoch. ``best``: the best step so far by the run's metric, when it has one. ``files``:
    relative path -> (bytes, checksum).
    """

    step: int
    world_size: int
    roles: dict[str, RoleEntry]
    files: dict[str, Entry]
    components: dict[str, dict[str, Any]] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    fingerprint: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    time: float = 0.0

    @property
    def bytes(self) -> int:
        """Size of all files but the manifest itself."""
        return sum(size for size, _ in self.files.values())


def rng_file(rank: int) -> str:
    """Where the random states of ``rank`` are."""
    return f"rng_{rank:05d}.pt"


def step_name(step: int) -> str:
    """``step_00000012``: the directory of a step."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that a directory's name stands for; None for other names."""
    digits = path.name.removeprefix("step_")
    return int(digits) if path.name.startswith("step_") and digits.isdecimal() else None


def published(directory: Path) -> list[Path]:
    """The checkpoints in ``directory``, oldest step first, damaged or not: a name exists only once all is written."""
    if not directory.is_dir():
        return []
    steps = {path: step_of(path) for path in directory.iterdir()}
    found = [(step, path) for path, step in steps.items() if step is not None and path.is_dir()]
    return [path for _, path in sorted(found)]


def point_to(checkpoint: Path) -> None:
    """Name ``checkpoint`` in the ``latest`` file: a hint for people and tools, so a failure is none."""
    partial = checkpoint.with_name(f"{TEMPORARY}{LATEST}")
    with contextlib.suppress(OSError):
        partial.write_text(f"{checkpoint.name}\n", encoding="utf-8")
        partial.replace(checkpoint.with_name(LATEST))


def fingerprint() -> dict[str, str]:
    """What bit equality depends on besides the layout: releases, threads and instruction set."""
    import torch

    from aligner.distributed import platform

    versions = {}
    for name in ("torch", "megatron-core", "numpy", "megatron-aligner"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        **versions,
        "python": python_platform.python_version(),
        "threads": str(torch.get_num_threads()),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "device": platform.current().kind,
    }


def changed_since(saved: dict[str, str]) -> str:
    """What differs between the fingerprint ``saved`` and this process's ("threads 4 -> 8, ..."); "" for nothing."""
    now = fingerprint()
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    return ", ".join(f"{name} {saved.get(name, '-')} -> {now.get(name, '-')}" for name in names)


# ------------------------------------------------------------------ writing


class SummedFile:
    """A new file that is summed while it is written; use as a context manager. :attr:`entry` is set at its end.

    Its content survives a power cut once the block is left.
    """

    def __init__(self, path: Path) -> None:
        self.entry: Entry = (0, "")
        self._sum = new_checksum()
        self._size = 0
        self._stream = open(path, "wb", buffering=1 << 20)  # noqa: SIM115  (closed in __exit__)

    def write(self, data: Any) -> int:
        """Append bytes (or any buffer). Raises OSError."""
        size = memoryview(data).nbytes
        self._sum.update(data)
        self._stream.write(data)
        self._size += size
        return size

    def tell(self) -> int:
        return self._size

    def __enter__(self) -> SummedFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._stream.flush()
                os.fsync(self._stream.fileno())
                self.entry = (self._size, self._sum.hexdigest())
        finally:
            try:
                self._stream.close()
            except OSError:
                if kind is None:
                    raise


def write_file(path: Path, content: bytes) -> Entry:
    """Write a whole new file, on the disk when this returns."""
    with SummedFile(path) as file:
        file.write(content)
    return file.entry


def write(directory: Path, manifest: Manifest) -> None:
    """Write the manifest of a directory whose other files are complete. They and it survive a power cut afterwards."""
    content = {
        "format": FORMAT,
        "step": manifest.step,
        "time": manifest.time,
        "world_size": manifest.world_size,
        "layouts": {name: asdict(entry) for name, entry in manifest.roles.items()},
        "components": manifest.components,
        "identity": manifest.identity,
        "fingerprint": manifest.fingerprint,
        "metrics": manifest.metrics,
        "best": manifest.best,
        "files": {name: list(entry) for name, entry in sorted(manifest.files.items())},
    }
    write_file(directory / FILE, json.dumps(content, indent=1).encode())
    for path in sorted(path for path in directory.rglob("*") if path.is_dir()):
        sync(path)
    sync(directory)


def sync(path: Path) -> None:
    """A file's content, or a directory's entries, survive a power cut from here on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ------------------------------------------------------------------ reading


def read(directory: Path) -> Manifest:
    """Read and check the manifest: format, owner, and that every file is there in its size. Nothing is summed.

    Raises:
        CheckpointError: the directory is incomplete, damaged, or could have been written by somebody else.
    """
    found = parse(directory)
    _check_owner(directory)
    for problem in size_problems(directory, found):
        raise CheckpointError(f"{directory} is damaged: {problem}; use another checkpoint")
    return found


def parse(directory: Path) -> Manifest:
    """The manifest alone; no other file is looked at. Raises :class:`CheckpointError`."""
    path = directory / FILE
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {content['format']}, this release reads {FORMAT}; use that release")
        return Manifest(
            step=content["step"],
            world_size=content["world_size"],
            roles={name: RoleEntry(**entry) for name, entry in content["layouts"].items()},
            files={name: (int(entry[0]), str(entry[1])) for name, entry in content["files"].items()},
            components=content["components"],
            identity=content["identity"],
            fingerprint=content["fingerprint"],
            metrics=content["metrics"],
            best=content["best"],
            time=content["time"],
        )
    except FileNotFoundError:
        raise CheckpointError(f"{directory} is not a complete checkpoint: {FILE} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{directory} is not a complete checkpoint: {type(error).__name__}: {error}") from error


def damage(directory: Path) -> str:
    """Why ``directory`` is no sound checkpoint by its manifest and the sizes of its files; "" when it is one.

    Quick: nothing is summed, and nothing but the manifest is read.
    """
    try:
        found = parse(directory)
    except CheckpointError as error:
        return str(error)
    return next(size_problems(directory, found), "")


def size_problems(directory: Path, manifest: Manifest) -> Iterator[str]:
    """What is wrong with the files by their sizes."""
    for name, (size, _) in manifest.files.items():
        if problem := _size_problem(directory, name, size):
            yield problem


def file_problem(directory: Path, name: str, entry: Entry) -> str:
    """What is wrong with one file by its size and checksum; "" for nothing. Reads the file."""
    size, digest = entry
    if problem := _size_problem(directory, name, size):
        return problem
    try:
        _, found = file_entry(directory / name)
    except OSError as error:
        return f"file '{name}' cannot be read: {error.strerror or error}"
    return "" if found == digest else f"file '{name}' has changed: its checksum is {found[:12]}, not {digest[:12]}"


def file_entry(path: Path) -> Entry:
    """Size and checksum of a file. Reads it; raises OSError."""
    with open(path, "rb") as stream:
        return os.fstat(stream.fileno()).st_size, hashlib.file_digest(stream, new_checksum).hexdigest()


def digest(directory: Path) -> str:
    """The sha256 of the manifest: the identity of a checkpoint. Raises :class:`CheckpointError`."""
    try:
        return hashlib.sha256((directory / FILE).read_bytes()).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{directory} is not a complete checkpoint: {error}") from error


def _size_problem(directory: Path, name: str, size: int) -> str:
    file = directory / name
    try:
        if not file.resolve().is_relative_to(directory.resolve()) or not file.is_file():
            return f"file '{name}' is missing"
        found = file.stat().st_size
    except OSError as error:
        return f"file '{name}' cannot be read: {error.strerror or error}"
    return "" if found == size else f"file '{name}' has {found} bytes instead of {size}"


def _check_owner(directory: Path) -> None:
    """Checkpoints hold pickles: refuse a directory that another user owns or anybody may write."""
    info = directory.stat()
    if info.st_uid not in (os.getuid(), 0):
        raise CheckpointError(f"{directory} belongs to user id {info.st_uid}, not to you; copy it if you trust it")
    if info.st_mode & stat.S_IWOTH:
        raise CheckpointError(f"{directory} is writable for everybody; take the right away (chmod o-w) if you trust it")

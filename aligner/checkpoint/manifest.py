"""The manifest of a checkpoint: written last, read first, and all that is trusted before anything is unpickled."""

from __future__ import annotations

import hashlib
import json
import os
import platform as python_platform
import stat
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from aligner.distributed import platform
from aligner.errors import CheckpointError

FILE = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class RoleEntry:
    """One saved role: its layout, and whether an optimizer was saved with it."""

    tp: int
    pp: int
    sequence_parallel: bool
    optimizer: bool


@dataclass(frozen=True)
class Manifest:
    """``files``: relative path -> [bytes, sha256]; the hash is kept for files that are unpickled, else empty."""

    step: int
    world_size: int
    roles: dict[str, RoleEntry]
    fingerprint: dict[str, str]
    files: dict[str, tuple[int, str]]


def fingerprint() -> dict[str, str]:
    """What bit equality depends on besides the layout: releases, threads and instruction set."""
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


def write(directory: Path, step: int, world_size: int, roles: dict[str, RoleEntry]) -> None:
    """Describe the finished files of ``directory``, which reach the disk first; nothing is added to it afterwards."""
    files = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            sync(path)
            pickled = path.suffix != ".distcp"
            files[str(path.relative_to(directory))] = [path.stat().st_size, _sha256(path) if pickled else ""]
        else:
            sync(path)
    content = {
        "format": FORMAT,
        "step": step,
        "world_size": world_size,
        "roles": {name: asdict(entry) for name, entry in roles.items()},
        "fingerprint": fingerprint(),
        "files": files,
    }
    with open(directory / FILE, "w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    sync(directory)


def sync(path: Path) -> None:
    """A file's content, or a directory's entries, survive a power cut from here on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def changed_since(saved: dict[str, str]) -> str:
    """What differs between the fingerprint ``saved`` and this process's ("threads 4 -> 8, ..."); "" for nothing."""
    now = fingerprint()
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    return ", ".join(f"{name} {saved.get(name, '-')} -> {now.get(name, '-')}" for name in names)


def damage(directory: Path) -> str:
    """Why ``directory`` is no sound checkpoint by its manifest and the sizes of its files; "" when it is one.

    Quick: nothing is hashed, and nothing but the manifest is read.
    """
    try:
        files = json.loads((directory / FILE).read_text(encoding="utf-8"))["files"]
        for name, (size, _) in files.items():
            if (found := (directory / name).stat().st_size) != size:
                return f"file '{name}' has {found} bytes instead of {size}"
    except FileNotFoundError as error:
        return f"file '{Path(error.filename).relative_to(directory)}' is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{FILE} cannot be read: {type(error).__name__}: {error}"
    return ""


def read(directory: Path) -> Manifest:
    """Read and check the manifest: format, owner, and that every file is there as it was written.

    Raises:
        CheckpointError: the directory is incomplete, damaged, or could have been written by somebody else.
    """
    path = directory / FILE
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {content['format']}, this release reads {FORMAT}; use that release")
        manifest = Manifest(
            step=content["step"],
            world_size=content["world_size"],
            roles={name: RoleEntry(**entry) for name, entry in content["roles"].items()},
            fingerprint=content["fingerprint"],
            files={name: (entry[0], entry[1]) for name, entry in content["files"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{directory} is not a complete checkpoint: {type(error).__name__}: {error}") from error
    _check_owner(directory)
    for name, (size, digest) in manifest.files.items():
        file = directory / name
        if not file.resolve().is_relative_to(directory.resolve()) or not file.is_file():
            raise CheckpointError(f"{directory} is damaged: file '{name}' is missing; use another checkpoint")
        if file.stat().st_size != size:
            raise CheckpointError(
                f"{directory} is damaged: file '{name}' has {file.stat().st_size} bytes instead of {size}; "
                "use another checkpoint"
            )
        if digest and _sha256(file) != digest:
            raise CheckpointError(f"{directory} is damaged: file '{name}' has changed; use another checkpoint")
    return manifest


def _check_owner(directory: Path) -> None:
    """Checkpoints hold pickles: refuse a directory that another user owns or anybody may write."""
    info = directory.stat()
    if info.st_uid not in (os.getuid(), 0):
        raise CheckpointError(f"{directory} belongs to user id {info.st_uid}, not to you; copy it if you trust it")
    if info.st_mode & stat.S_IWOTH:
        raise CheckpointError(f"{directory} is writable for everybody; take the right away (chmod o-w) if you trust it")


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

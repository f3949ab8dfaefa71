"""Checks of whole checkpoints by all ranks together: each sums its share of the files, all agree on the result."""

from __future__ import annotations

from pathlib import Path

from aligner.checkpoint import manifest
from aligner.checkpoint.agreement import failures, on_first
from aligner.distributed import platform
from aligner.errors import CheckpointError

_sound: dict[Path, tuple[str, set[str]]] = {}  # what this process has verified: digest of the manifest, files


def newest_sound(directory: Path) -> Path | None:
    """The checkpoint with the highest step in ``directory`` whose files are all as they were written. Collective.

    Damaged ones are passed over with a printed line; nothing is deleted. None: there is no checkpoint at all.

    Raises:
        CheckpointError: there are checkpoints, but all are damaged.
    """
    candidates = on_first(lambda: manifest.published(directory))
    reason = ""
    for path in reversed(candidates):
        found, problem = check(path)
        if found is not None:
            return path
        reason = reason or f"{path.name}: {_bare(path, problem)}"
        if platform.rank() == 0:
            print(passed_over(path, problem), flush=True)
    if candidates:
        raise CheckpointError(
            f"all {len(candidates)} checkpoints in {directory} are damaged ({reason}); bring one back from a copy, or "
            "move the directory away to start anew"
        )
    return None


def passed_over(path: Path, problem: str) -> str:
    """What is told about a checkpoint that is not used because of ``problem``."""
    return f"passed over the damaged checkpoint {path}: {_bare(path, problem)}"


def _bare(path: Path, problem: str) -> str:
    """``problem`` without the path and the advice that an error about ``path`` has."""
    bare = problem.removesuffix("; use another checkpoint")
    return bare.removeprefix(f"{path} is damaged: ").removeprefix(f"{path} is ")


def require(path: Path, under: str = "") -> manifest.Manifest:
    """The manifest of ``path``, with every file (whose name starts with ``under``) verified. Collective.

    What this process has verified before is not read again.

    Raises:
        CheckpointError: a file is missing, has another size or another checksum; on all ranks.
    """
    found, problem = check(path, under)
    if found is None:
        raise CheckpointError(problem)
    return found


def check(path: Path, under: str = "") -> tuple[manifest.Manifest | None, str]:
    """As :func:`require`, but the damage is returned, the same on every rank. Collective."""

    def first_look() -> tuple[manifest.Manifest | None, str, str]:
        try:
            return manifest.read(path), manifest.digest(path), ""
        except (CheckpointError, OSError) as error:
            return None, "", str(error)

    found, digest, problem = on_first(first_look)
    if found is None:
        return None, problem
    known = _sound.get(path)
    verified = known[1] if known is not None and known[0] == digest else set()
    wanted = {name: entry for name, entry in found.files.items() if name.startswith(under) and name not in verified}
    largest_first = sorted(wanted, key=lambda name: (-wanted[name][0], name))
    mine = largest_first[platform.rank() :: platform.world_size()]
    problems = (manifest.file_problem(path, name, wanted[name]) for name in mine)
    if problem := failures(next(filter(None, problems), None)):
        return None, f"{path} is damaged: {problem.partition(': ')[2]}; use another checkpoint"
    _sound[path] = (digest, verified | wanted.keys())
    return found, ""

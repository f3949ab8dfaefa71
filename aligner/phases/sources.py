"""What the roles of a run start from, decided once: a resumed run keeps the very checkpoints of its first life.

``RUN/sources.json``: ``{role: {"given": ..., "kind": "hf" | "checkpoint", "path": ..., "sha256": ...}}``. ``given`` is
what the configuration says (a run directory, for instance), ``path`` what it meant when the run began, ``sha256`` what
was there: of a checkpoint its manifest, of a Hugging Face directory names, sizes and sums of the weight files.

Invariants: the file says what the first life began with, also when a later one is given new places; on resume the
weights of frozen roles are the same as in the first life, wherever their files are now; a source that is given anew
holds the same as the old one. A checkpoint of another run is pinned, so that it stays.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from aligner.checkpoint import manifest
from aligner.checkpoint.initialize import Source, resolve_source
from aligner.checkpoint.pins import pin
from aligner.config.sources import CHECKPOINTS_DIRECTORY
from aligner.distributed.collectives import all_gather_objects, broadcast_object, on_all_ranks
from aligner.distributed.context import RunContext
from aligner.errors import CheckpointError, ConfigError
from aligner.weights.convert import weight_files
from aligner.weights.hub import resolve_model_directory

SOURCES_FILE = "sources.json"
KEYS = ("given", "kind", "path", "sha256")

Entry = dict[str, str]
T = TypeVar("T")


def pin_sources(context: RunContext, given: Mapping[str, str], frozen: Collection[str] = ()) -> dict[str, Source]:
    """The source of each role in ``given`` (role -> ``init_from`` or ``model.path``). Collective.

    Args:
        frozen: roles that are not saved with the run: what they hold is compared on every resume.

    Raises:
        CheckpointError: a source is missing, or holds other weights than when the run began.
        ConfigError: a resumed run is given a source with other weights.
    """
    file, is_resumed = context.run_dir / SOURCES_FILE, context.resume_from is not None
    known = read_sources(context)
    on_first = on_all_ranks(lambda: _find_all(known, given, frozen, is_resumed) if context.rank == 0 else {})
    found = broadcast_object(on_first)
    moved = {role for role in found if role in known and known[role]["given"] != given[role]}
    checked = {role: found[role] for role in found if not is_resumed or role in frozen or role in moved}
    with context.watchdog.idle():  # sums of large files
        digests = digest_sources(checked, context)
    entries = {role: _entry(given[role], found[role], digests[role]) for role in checked}
    if is_resumed:
        on_all_ranks(lambda: _compare(context.run_dir, known, entries))
    on_all_ranks(lambda: _keep(file, known, entries, checked, is_resumed) if context.rank == 0 else None)
    return found


def read_sources(context: RunContext) -> dict[str, Entry]:
    """``RUN/sources.json``, the same on every rank; empty before the first life has written it. Collective."""

    def read() -> dict[str, Entry]:
        file = context.run_dir / SOURCES_FILE
        if context.rank != 0 or not file.is_file():
            return {}
        try:
            entries: dict[str, Entry] = json.loads(file.read_text(encoding="utf-8"))
            return {role: {key: entry[key] for key in KEYS} for role, entry in entries.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"{file} cannot be read ({type(error).__name__}: {error})"
            raise CheckpointError(f"{what}; remove it: checkpoints hold the sums too, so they are compared") from error

    return broadcast_object(on_all_ranks(read))


def find_source(path: str | Path) -> Source:
    """What ``path`` (or a hub id) holds now. Local."""
    return resolve_source(resolve_model_directory(path))


def digest_sources(sources: Mapping[str, Source], context: RunContext) -> dict[str, str]:
    """Role -> sha256 of what its source holds. Collective: the ranks share the files, each is read once."""
    directories = sorted({source.path for source in sources.values() if source.kind == "hf"})
    files = on_all_ranks(lambda: {directory: weight_files(directory) for directory in directories})
    sums = _sum_files([path for paths in files.values() for path in paths], context)

    def digest(source: Source) -> str:
        if source.kind == "checkpoint":
            return manifest.digest(source.path)
        lines = [f"{path.name} {' '.join(map(str, sums[path]))}\n" for path in files[source.path]]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    return on_all_ranks(lambda: {role: digest(source) for role, source in sources.items()})


# --------------------------------------------------------------------------- finding


def _find_all(
    known: Mapping[str, Entry], given: Mapping[str, str], frozen: Collection[str], is_resumed: bool
) -> dict[str, Source]:
    return {role: _find(role, known.get(role), given[role], is_resumed, role in frozen) for role in given}


def _find(role: str, entry: Entry | None, given: str, is_resumed: bool, is_frozen: bool) -> Source:
    if entry is None or (entry["given"] != given and not is_resumed):
        return find_source(given)
    if entry["given"] != given:
        return _find_moved(entry, given)
    source = Source(entry["kind"], Path(entry["path"]))
    if source.path.exists() or (is_resumed and not is_frozen):  # a trained role is in the checkpoint
        return source
    if not is_resumed:
        return find_source(given)
    raise CheckpointError(
        f"{role} began from {source.path}, which is gone; restore it to resume this run, or give its new place"
    )


def _find_moved(entry: Entry, given: str) -> Source:
    """What stands for ``entry`` in the new place: of a run the same step, not its newest."""
    step = Path(given) / CHECKPOINTS_DIRECTORY / Path(entry["path"]).name
    if entry["kind"] == "checkpoint" and step.is_dir():
        return Source("checkpoint", step)
    return find_source(given)


def _entry(given: str, source: Source, digest: str) -> Entry:
    return {"given": given, "kind": source.kind, "path": str(source.path.resolve()), "sha256": digest}


# --------------------------------------------------------------------------- comparing and keeping


def _compare(run_dir: Path, known: Mapping[str, Entry], entries: Mapping[str, Entry]) -> None:
    for role, now in entries.items():
        before = known.get(role)
        if before is None or before["sha256"] == now["sha256"]:
            continue
        sums = f"sha256 {before['sha256'][:12]} -> {now['sha256'][:12]}"
        if before["given"] != now["given"]:
            raise ConfigError(
                f"{run_dir} began with {role} from {before['given']}, not from {now['given']}, which holds other "
                f"weights ({sums}); resume it with the same source, or start a new run.dir"
            )
        raise CheckpointError(
            f"{role}: {now['path']} holds other weights than when the run began ({sums}); restore them to resume this "
            "run, or start a new run.dir"
        )


def _keep(
    file: Path,
    known: Mapping[str, Entry],
    entries: Mapping[str, Entry],
    sources: Mapping[str, Source],
    is_resumed: bool,
) -> None:
    """Pin the checkpoints of other runs, and write what is new. Rank 0."""
    for source in sources.values():
        if source.kind == "checkpoint" and not source.path.resolve().is_relative_to(file.parent.resolve()):
            pin(source.path.resolve(), by=str(file.parent))
    content: dict[str, Any] = {**entries, **known} if is_resumed else {**known, **entries}
    if content != known:
        temporary = file.with_name(file.name + ".tmp")
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, file)


# --------------------------------------------------------------------------- sums


def _sum_files(paths: Collection[Path], context: RunContext) -> dict[Path, tuple[int, str]]:
    """File -> (bytes, sha256): the largest first, each by the rank that has least to read so far. Collective."""
    sizes = on_all_ranks(lambda: {path: _read(path, _size) for path in paths})
    loads = [0] * context.world_size
    mine = []
    for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
        rank = loads.index(min(loads))
        loads[rank] += sizes[path]
        if rank == context.rank:
            mine.append(path)
    sums = on_all_ranks(lambda: {path: (sizes[path], _read(path, _sha256)) for path in mine})
    return {path: entry for part in all_gather_objects(sums) for path, entry in part.items()}


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size


def _read(path: Path, action: Callable[[Path], T]) -> T:
    try:
        return action(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}); restore the weights") from error

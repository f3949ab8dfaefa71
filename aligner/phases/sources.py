"""What the roles of a run start from, decided once: a resumed run keeps the very checkpoints of its first life.

``RUN/sources.json``: ``{role: {"given": ..., "kind": "hf" | "checkpoint", "path": ...}}``. ``given`` is what the
configuration says (a run directory, for instance), ``path`` what it meant when the run began.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from aligner.checkpoint.initialize import Source, resolve_source
from aligner.distributed.collectives import broadcast_object, on_all_ranks
from aligner.distributed.context import RunContext
from aligner.errors import CheckpointError, ConfigError
from aligner.weights.hub import resolve_model_directory

SOURCES_FILE = "sources.json"


def pin_sources(context: RunContext, given: Mapping[str, str]) -> dict[str, Source]:
    """The source of each role in ``given`` (role -> ``init_from`` or ``model.path``). Collective.

    Raises CheckpointError when a source is missing, ConfigError when a resumed run is given another one.
    """
    found = on_all_ranks(lambda: _pin(context.run_dir / SOURCES_FILE, given) if context.rank == 0 else {})
    return broadcast_object(found)


def find_source(path: str | Path) -> Source:
    """What ``path`` (or a hub id) holds now. Local."""
    return resolve_source(resolve_model_directory(path))


def _pin(file: Path, given: Mapping[str, str]) -> dict[str, Source]:
    if file.is_file():
        return _read(file, given)
    found = {role: find_source(source) for role, source in given.items()}
    content = {
        role: {"given": given[role], "kind": source.kind, "path": str(source.path.resolve())}
        for role, source in found.items()
    }
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, file)
    return found


def _read(file: Path, given: Mapping[str, str]) -> dict[str, Source]:
    saved = json.loads(file.read_text(encoding="utf-8"))
    for role, source in given.items():
        before = saved.get(role, {}).get("given")
        if before != source:
            raise ConfigError(
                f"{file.parent} began with {role} from {before}, not from {source}; resume it with the same source, "
                "or start a new run.dir"
            )
        path = Path(saved[role]["path"])
        if not path.exists():
            raise CheckpointError(f"{file}: {role} began from {path}, which is gone; restore it to resume this run")
    return {role: Source(saved[role]["kind"], Path(saved[role]["path"])) for role in given}

"""What a training run is: made once a life, saved with its checkpoints, compared when it is resumed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aligner.config.run_file import command_of
from aligner.config.schema import PPORoot
from aligner.config.section import to_container
from aligner.data.datasets import PreferenceDataset, PromptDataset, TextDataset
from aligner.distributed.collectives import broadcast_object, on_all_ranks
from aligner.distributed.context import RunContext
from aligner.errors import ConfigError
from aligner.phases.roles import FROZEN, RoleFiles, files_of_roles
from aligner.phases.sources import read_sources

Dataset = TextDataset | PreferenceDataset | PromptDataset


def run_identity(root: Any, context: RunContext, datasets: Mapping[str, Dataset | None]) -> dict[str, Any]:
    """The identity of ``root``'s run (``checkpoint/identity.py`` says of what it consists). Collective.

    Call it when the roles are loaded: what frozen roles hold was summed then.

    Args:
        datasets: configuration key (``data.train``) -> the opened data set, None where there is none.
    """
    sources = read_sources(context)

    def build() -> dict[str, Any]:
        if context.rank != 0:
            return {}
        return {
            "command": command_of(root),
            "config": to_container(root),
            "models": {role: _model(files) for role, files in files_of_roles(root).items()},
            "sources": _sources(root, sources),
            "data": {key: data.report.identity() for key, data in datasets.items() if data is not None and data.report},
        }

    return broadcast_object(on_all_ranks(build))


def _model(files: RoleFiles) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(files.architecture)))
    return {
        "architecture": hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest(),
        "tokenizer": files.tokenizer.vocabulary_digest(),
        "chat_template": files.tokenizer.template_digest(),
        "fields": fields,
    }


def _sources(root: Any, entries: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """What the frozen roles hold."""
    if not isinstance(root, PPORoot):
        return {}
    found = {
        role: {key: entries[role][key] for key in ("kind", "path", "sha256")}
        for role in FROZEN
        if role in entries and not (role == "reward" and root.reward.function)
    }
    if root.reward.function:
        found["reward"] = _function(root.reward.function)
    return found


def _function(reference: str) -> dict[str, str]:
    path, _, name = reference.rpartition(":")
    try:
        content = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(
            f"reward.function={reference}: cannot be read ({error.strerror}); give another file"
        ) from error
    digest = hashlib.sha256(name.encode() + b"\n" + content).hexdigest()
    return {"kind": "function", "path": reference, "sha256": digest}

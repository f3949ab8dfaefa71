"""What a run is, as saved with every checkpoint, and whether a life may continue it. Pure: dictionaries in, text out.

An identity is a dictionary of plain values::

    command   "ppo"
    config    the whole configuration, nested
    models    {role: {"architecture": sha256, "tokenizer": sha256, "chat_template": sha256, "fields": {...}}}
    sources   {role: {"kind": "hf" | "checkpoint" | "function", "path": ..., "sha256": ...}}     of frozen roles
    data      {configuration key: {"path", "rows", "sha256", "kept", "kept_sha256"}}

What may change is the table in ``config/consent.py``. Models, tokenizers and what frozen roles hold never may.
Imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aligner.config.consent import CONSENT, FIXED, FREE, Change, changed_keys, why_fixed
from aligner.errors import CheckpointError, ConfigError

ALL = "all"  # in run.accept_changes: every change that may be accepted
ACCEPT = "run.accept_changes"

_PARTS = {
    "architecture": "architecture (config.json)",
    "tokenizer": "tokenizer",
    "chat_template": "chat template",
}


def check_identity(
    saved: Mapping[str, Any], now: Mapping[str, Any], accepted: Sequence[str], *, finished: bool
) -> list[str]:
    """Whether a run that was ``saved`` may continue as ``now``; returns what to tell the user, a line each.

    Args:
        accepted: ``run.accept_changes``: keys, sections, or ``all``.
        finished: there is no step left to do.

    Raises:
        CheckpointError: another model, tokenizer or source, or a setting that is fixed for the run's life.
        ConfigError: changes that are not accepted, or that no step is left for.
    """
    if not saved:
        return ["the checkpoint does not say what its run was, so nothing is compared"] if now else []
    changes = changed_keys(saved["command"], saved["config"], now["config"])
    changes += [*_source_changes(saved, now), *_data_changes(saved, now)]
    _refuse([*_model_differences(saved, now), *_source_differences(saved, now), *_fixed_differences(changes)])
    asked = [change for change in changes if change.rule is CONSENT]
    if finished and asked:
        raise ConfigError(
            f"the run is finished, so this would have no effect:\n{_listed(asked)}\n"
            "give a larger trainer.max_steps to train on with it, or leave it as it was"
        )
    missing = [change for change in asked if not _is_accepted(change.key, accepted)]
    if missing:
        names = ",".join(dict.fromkeys(change.key for change in missing))
        raise ConfigError(
            f"the run began with other settings (before -> now):\n{_listed(missing)}\n"
            f"give {ACCEPT}=[{names}] to continue with the new ones, leave them as they were, or start a new run.dir"
        )
    return _remarks(changes, asked, accepted)


# --------------------------------------------------------------------------- what is refused


def _refuse(differences: list[str]) -> None:
    if differences:
        lines = "\n".join(f"  {line}" for line in differences)
        raise CheckpointError(
            f"this is another run than the one that was saved:\n{lines}\n"
            "restore what it began with, or start a new run.dir"
        )


def _model_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = []
    for role, before in saved["models"].items():
        after = now["models"].get(role)
        if after is None:
            found.append(f"{role}: the run has a model of this role, now there is none")
            continue
        for part, name in _PARTS.items():
            if before[part] == after[part]:
                continue
            what = f": {_fields(before, after)}" if part == "architecture" else _digests(before[part], after[part])
            found.append(f"{role}: its {name} is another one{what}")
    found += [f"{role}: the run has no model of this role" for role in now["models"] if role not in saved["models"]]
    return found


def _fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    one, other = before["fields"], after["fields"]
    changed = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return ", ".join(f"{name} {one.get(name)} -> {other.get(name)}" for name in changed)


def _source_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = []
    for role, before, after in _pairs(saved["sources"], now["sources"]):
        if before is None or after is None or before["kind"] != after["kind"]:
            found.append(f"{role}: began as {_source(before)}, is now {_source(after)}")
        elif before["kind"] != "function" and before["sha256"] != after["sha256"]:
            digests = _digests(before["sha256"], after["sha256"])
            found.append(f"{role}: {after['path']} holds other weights than {before['path']} did{digests}")
    return found


def _source(entry: Mapping[str, Any] | None) -> str:
    kinds = {"hf": "the model", "checkpoint": "the checkpoint", "function": "the function"}
    return "nothing" if entry is None else f"{kinds[entry['kind']]} {entry['path']}"


def _fixed_differences(changes: Sequence[Change]) -> list[str]:
    return [f"{change}: {why_fixed(change.key)}" for change in changes if change.rule is FIXED]


# --------------------------------------------------------------------------- what needs consent


def _source_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Functions whose file is another one: code may be corrected."""
    found = []
    for role, before, after in _pairs(saved["sources"], now["sources"]):
        if before and after and before["kind"] == after["kind"] == "function" and before["sha256"] != after["sha256"]:
            old, new = (f"{entry['path']} (sha256 {entry['sha256'][:12]})" for entry in (before, after))
            found.append(Change(f"{role}.function", old, new, CONSENT))
    return found


def _data_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Data sets that hold, or keep, other rows. Where their files are does not matter."""
    found = []
    for key, before, after in _pairs(saved["data"], now["data"]):
        if before is None or after is None:
            found.append(Change(key, before and before["path"], after and after["path"], CONSENT))
        elif (before["sha256"], before["kept_sha256"]) != (after["sha256"], after["kept_sha256"]):
            found.append(Change(key, _data(before), _data(after), CONSENT))
    return found


def _data(entry: Mapping[str, Any]) -> str:
    sums = f"sha256 {entry['sha256'][:12]}, rows used {entry['kept_sha256'][:12]}"
    return f"{entry['path']} ({entry['kept']} of {entry['rows']} rows; {sums})"


def _is_accepted(key: str, accepted: Sequence[str]) -> bool:
    return any(name == ALL or key == name or key.startswith(f"{name}.") for name in accepted)


# --------------------------------------------------------------------------- what is said


def _remarks(changes: Sequence[Change], asked: Sequence[Change], accepted: Sequence[str]) -> list[str]:
    remarks = [f"changed from here on: {change}" for change in asked]
    if any(change.key in ("data.train", "data.prompts", "trainer.seed") for change in asked):
        remarks.append("the new order of samples is read from its beginning; samples and steps are counted on")
    said = {change.key for change in asked}
    free = [change for change in changes if change.rule is FREE and change.key not in said]
    free = [change for change in free if not change.key.startswith("run.")]
    if free:
        remarks.append(f"changed: {', '.join(map(str, free))}")
    for name in accepted:
        if name != ALL and not any(_is_accepted(change.key, [name]) for change in asked):
            remarks.append(f"{ACCEPT} names {name}, which has not changed")
    return remarks


def _listed(changes: Sequence[Change]) -> str:
    return "\n".join(f"  {change}" for change in changes)


def _digests(before: str, after: str) -> str:
    return f" (sha256 {before[:12]} -> {after[:12]})"


def _pairs(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(name, saved.get(name), now.get(name)) for name in {**saved, **now}]

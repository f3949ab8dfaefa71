"""Which settings may change when a run is continued, and which of them need the user's word for it. Without torch.

``FREE``: where and how a run is computed; its result does not depend on it beyond rounding. Also paths: what they hold
is compared instead (``checkpoint/identity.py``), so files may move.
``CONSENT``: the result depends on it. A change must be named in ``run.accept_changes``; then it takes effect from the
checkpoint on.
``FIXED``: a run has one value from beginning to end.

A key's rule is that of its longest prefix in :data:`RULES`. A test walks the schema: every key has one.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from aligner.config.schema import ROOTS
from aligner.config.section import to_container

RESUMABLE = ("sft", "rm", "ppo")  # commands whose runs can be continued


class Rule(Enum):
    """Whether a key may change."""

    FREE = "free"
    CONSENT = "consent"
    FIXED = "fixed"


FREE, CONSENT, FIXED = Rule.FREE, Rule.CONSENT, Rule.FIXED

_MODEL = {
    "path": FREE,  # the architecture, the tokenizer and the weights of frozen roles are compared
    "tokenizer": FREE,  # compared as well
    "dtype": FIXED,
    "hidden_dropout": CONSENT,
    "attention_dropout": CONSENT,
}
_ROLE = {
    **{f"model.{key}": rule for key, rule in _MODEL.items()},
    "parallel": FREE,  # checkpoints load at every layout
    "placement": FREE,
    "offload": FREE,
    "init_from": FREE,  # what it holds is compared: a trained role cannot start anew, a frozen one must stay
    "optimizer": CONSENT,
    "optimizer.use_distributed_optimizer": FIXED,
}

RULES: dict[str, Rule] = {
    "run": FREE,
    "trainer": FREE,  # ranks, threads, cadence, time limits, restarts; max_steps: fewer than done is refused elsewhere
    "trainer.seed": CONSENT,  # another order of samples, other sampling noise
    "checkpoint": FREE,
    **{f"model.{key}": rule for key, rule in _MODEL.items()},
    "data": CONSENT,
    "data.train": FREE,  # of data sets the rows are compared, not where they are
    "data.validation": FREE,
    "data.prompts": FREE,
    "data.validation_prompts": FREE,
    "data.filter": FREE,  # the rows that it keeps are compared
    "data.pack_length": FREE,  # how much is computed at once
    "generation": CONSENT,
    "generation.max_batch_size": FREE,  # how much is computed at once
    "generation.poll_interval": FREE,
    "ppo": CONSENT,
    "ppo.rollout_chunk_size": FREE,  # how much is computed at once
    "ppo.self_check": FREE,  # of the first step only
    "ppo.self_check_tolerance": FREE,
    **{f"actor.{key}": rule for key, rule in _ROLE.items()},
    **{f"critic.{key}": rule for key, rule in _ROLE.items()},
    **{f"reference.{key}": rule for key, rule in _ROLE.items() if not key.startswith("optimizer")},
    **{f"reward.{key}": rule for key, rule in _ROLE.items()},
    "reward.function": FREE,  # its file is compared
    "reward.standardize": CONSENT,
}

WHY_FIXED = {
    "dtype": "weights and optimizer states are saved in the precision that they are trained in, and the log-probs of a "
    "frozen role would jump",
    "use_distributed_optimizer": "optimizer states are saved in another form with it than without it",
}


@dataclass(frozen=True)
class Change:
    """A setting of the saved run that is another one now."""

    key: str
    before: Any
    after: Any
    rule: Rule

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.after)}"


def rule_of(key: str) -> Rule:
    """The rule of the longest prefix of ``key`` that has one. KeyError when there is none."""
    prefix = key
    while prefix not in RULES:
        prefix, dot, _ = prefix.rpartition(".")
        if not dot:
            raise KeyError(f"{key} has no rule in aligner/config/consent.py")
    return RULES[prefix]


def why_fixed(key: str) -> str:
    """Why a key that is ``FIXED`` cannot change."""
    return WHY_FIXED[key.rpartition(".")[2]]


def changed_keys(command: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The settings of ``command`` that differ between two configurations (nested plain values), in the schema's order.

    A key that follows another (``actor.model.dtype`` follows ``model.dtype``) and changed as that one did is left out.
    A key that the saved configuration lacks (of an older release) had the value that is its default now; one that no
    longer exists counts for nothing.
    """
    followed, defaults = followed_keys(command), _leaves(_defaults(command))
    before, after = _leaves(saved, defaults), _leaves(now, defaults)
    changes: dict[str, Change] = {}
    for key, value in after.items():
        default = before.get(followed[key]) if key in followed else defaults.get(key)
        old = before.get(key, default)
        if old != value:
            changes[key] = Change(key, old, value, rule_of(key))
    return [change for change in changes.values() if not _follows(change, changes.get(followed.get(change.key, "")))]


def followed_keys(command: str) -> dict[str, str]:
    """Key -> the key that it follows unless the user sets it."""
    values = _leaves(_defaults(command)).items()
    return {key: value[2:-1] for key, value in values if isinstance(value, str) and value.startswith("${")}


def _defaults(command: str) -> dict[str, Any]:
    """The schema's own values; what follows another key is ``${key}``."""
    values: dict[str, Any] = to_container(ROOTS[command]())
    return values


def _follows(change: Change, leader: Change | None) -> bool:
    return leader is not None and (change.before, change.after) == (leader.before, leader.after)


def _leaves(values: Mapping[str, Any], whole: Container[str] = (), prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value. Mappings whose names the user chooses are values: at a key in ``whole``, and empty ones."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}.{name}" if prefix else name
        if isinstance(value, Mapping) and value and key not in whole:
            found |= _leaves(value, whole, key)
        else:
            found[key] = value
    return found


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)

"""Values that this run would not look at are refused, not ignored. Imports without torch.

A role's field that follows another section (``${model.path}``) counts as given when it differs from that section.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from aligner.config import schema
from aligner.config.keys import nearest
from aligner.config.phases import PHASES
from aligner.config.section import Section
from aligner.errors import ConfigError

_DROPOUTS = ("hidden_dropout", "attention_dropout")


def check_effects(root: Any) -> None:
    """Raise ConfigError for the first value of ``root`` that is given and would have no effect."""
    for name in ("reference", "reward"):
        role = getattr(root, name, None)
        if isinstance(role, schema.FrozenRoleConfig):
            _refuse_given(f"{name}.model", role.model, root.model, _DROPOUTS, f"{name} is not trained")
    if isinstance(root, schema.EvaluateRoot):
        _check_compared(root)
    if isinstance(root, (schema.GenerateRoot, schema.EvaluateRoot)):
        _check_untrained(root)
    if isinstance(root, schema.PPORoot):
        _check_critic(root)
    reward = getattr(root, "reward", None)
    if isinstance(reward, schema.RewardConfig) and not reward.init_from:
        _check_no_reward_model(root, reward)
    for name in ("actor", "reference", "reward"):
        _check_model_path(root, name)
    _check_validation(root)
    _check_phases(root)


def _check_compared(root: schema.EvaluateRoot) -> None:
    compared = "the compared policies are those of evaluation.checkpoints"
    if root.actor.init_from:
        raise ConfigError(f"actor.init_from={root.actor.init_from} has no effect: {compared}; leave it out")
    _refuse_given("actor.model", root.actor.model, root.model, ("path",), compared)


def _check_untrained(root: schema.GenerateRoot | schema.EvaluateRoot) -> None:
    for key in _DROPOUTS:
        if value := getattr(root.model, key):
            raise ConfigError(f"model.{key}={value} has no effect: nothing is trained; leave it out")
    _refuse_given("actor.model", root.actor.model, root.model, _DROPOUTS, "nothing is trained")


def _check_critic(root: schema.PPORoot) -> None:
    critic = root.critic
    if not critic.init_from:
        raise ConfigError("critic.init_from is empty; set it to reward, actor, or a directory")
    if critic.model.path != root.model.path:
        raise ConfigError(
            f"critic.model.path={critic.model.path} has no effect: the critic starts from critic.init_from="
            f"{critic.init_from}; set critic.init_from={critic.model.path} or leave critic.model.path out"
        )
    if critic.init_from in ("reward", "actor"):
        why = f"with critic.init_from={critic.init_from} the tokenizer is that of {critic.init_from}"
        _refuse_given("critic.model", critic.model, root.model, ("tokenizer",), why)


def _check_no_reward_model(root: Any, reward: schema.RewardConfig) -> None:
    what = f"reward.function={reward.function}" if reward.function else "no reward.init_from"
    why = f"there is no reward model ({what})"
    _refuse_given("reward.model", reward.model, root.model, _names(reward.model), why)
    _refuse_given("reward.parallel", reward.parallel, root.actor.parallel, _names(reward.parallel), why)


def _check_model_path(root: Any, name: str) -> None:
    role = getattr(root, name, None)
    if role is None or not role.init_from or role.model.path == root.model.path:
        return
    raise ConfigError(
        f"{name}.model.path={role.model.path} has no effect: {name} starts from {name}.init_from={role.init_from}; "
        f"leave one of them out"
    )


def _check_validation(root: Any) -> None:
    """Without rows to validate on there is no validation; the reward model then validates on its training pairs."""
    if isinstance(root, schema.SFTRoot) and not root.data.validation:
        missing, give = "data.validation", "data.validation=<file.jsonl>"
    elif isinstance(root, schema.PPORoot) and not root.data.validation_prompts:
        missing, give = "data.validation_prompts", "data.validation_prompts=<file.jsonl>"
    elif isinstance(root, schema.PPORoot) and not root.ppo.validation_prompts:
        missing, give = "ppo.validation_prompts", "ppo.validation_prompts=<number>"
    else:
        return
    if root.trainer.val_check_interval:
        raise ConfigError(
            f"trainer.val_check_interval={root.trainer.val_check_interval} has no effect without {missing}; "
            f"give {give} or leave trainer.val_check_interval out"
        )


def _check_phases(root: Any) -> None:
    """Time-outs of phases that this command does not have are never looked at."""
    if not isinstance(root.trainer, schema.TrainerConfig):
        return
    known = next(PHASES[command] for command, kind in schema.ROOTS.items() if type(root) is kind)
    for phase in root.trainer.phase_timeouts:
        if phase not in known:
            raise ConfigError(
                f"trainer.phase_timeouts.{phase} has no effect: there is no such phase; "
                f"{nearest(phase, known)}there are {', '.join(known)}"
            )


def _refuse_given(prefix: str, section: Section, followed: Section, names: tuple[str, ...], why: str) -> None:
    """Refuse what differs in ``section`` from the section that it follows."""
    for name in names:
        value = getattr(section, name)
        if value != getattr(followed, name):
            raise ConfigError(f"{prefix}.{name}={value} has no effect: {why}; leave it out")


def _names(section: Section) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(section))  # type: ignore[arg-type]

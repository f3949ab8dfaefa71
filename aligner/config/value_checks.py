"""Rules for the values of one section: choices, ranges, keys that only act together. Imports without torch.

Every rule is one line of a table: section class, key, what holds, and the words for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from aligner.config import schema
from aligner.config.duration import parse_duration
from aligner.config.section import Section
from aligner.errors import ConfigError

CHOICES: dict[tuple[type[Section], str], tuple[str, ...]] = {
    (schema.ModelConfig, "dtype"): ("bfloat16", "float32"),
    (schema.RoleModelConfig, "dtype"): ("bfloat16", "float32"),
    (schema.OptimizerConfig, "schedule"): ("cosine", "linear", "constant"),
    (schema.GenerationConfig, "engine"): ("megatron",),
    (schema.TextDataConfig, "too_long"): ("drop", "truncate"),
    (schema.PromptDataConfig, "too_long"): ("drop", "truncate"),
    (schema.KLConfig, "controller"): ("fixed", "adaptive"),
    (schema.CheckpointConfig, "best_mode"): ("max", "min"),
    (schema.PPOConfig, "truncation"): ("bootstrap", "penalize", "mask"),
    (schema.FrozenRoleConfig, "placement"): ("all",),
    (schema.PolicyConfig, "placement"): ("all",),
    (schema.CriticConfig, "placement"): ("all",),
    (schema.TrainedRewardConfig, "placement"): ("all",),
    (schema.FrozenRoleConfig, "offload"): ("none",),
    (schema.PolicyConfig, "offload"): ("none",),
    (schema.CriticConfig, "offload"): ("none",),
    (schema.TrainedRewardConfig, "offload"): ("none",),
}

Rule = tuple[Callable[[Any], bool], str]
POSITIVE: Rule = (lambda value: 0 < value < math.inf, "a number above 0")
NOT_NEGATIVE: Rule = (lambda value: 0 <= value < math.inf, "0 or more")
AT_LEAST_ONE: Rule = (lambda value: value >= 1, "1 or more")
PROBABILITY: Rule = (lambda value: 0 <= value <= 1, "between 0 and 1")
POSITIVE_PROBABILITY: Rule = (lambda value: 0 < value <= 1, "above 0 and at most 1")
BELOW_ONE: Rule = (lambda value: 0 <= value < 1, "0 or more and below 1")
BETWEEN: Rule = (lambda value: 0 < value < 1, "above 0 and below 1")
SEED: Rule = (lambda value: 0 <= value < 2**63, "between 0 and 2^63 - 1")

RANGES: dict[type[Section], dict[str, Rule]] = {
    schema.ProcessesConfig: {"devices": AT_LEAST_ONE, "threads": AT_LEAST_ONE, "seed": SEED},
    schema.TrainerConfig: {
        "max_steps": AT_LEAST_ONE,
        "val_check_interval": NOT_NEGATIVE,
        "save_interval": NOT_NEGATIVE,
        "stop_grace": POSITIVE,
        "max_restarts": NOT_NEGATIVE,
        "restart_window": POSITIVE,
        "hang_timeout": POSITIVE,
    },
    schema.CheckpointConfig: {"keep_last": AT_LEAST_ONE, "keep_every": NOT_NEGATIVE},
    schema.ModelConfig: {"hidden_dropout": BELOW_ONE, "attention_dropout": BELOW_ONE},
    schema.RoleModelConfig: {"hidden_dropout": BELOW_ONE, "attention_dropout": BELOW_ONE},
    schema.OptimizerConfig: {
        "lr": POSITIVE,
        "min_lr": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE,
        "adam_beta1": BELOW_ONE,
        "adam_beta2": BELOW_ONE,
        "adam_eps": POSITIVE,
        "clip_grad": NOT_NEGATIVE,
        "warmup_steps": NOT_NEGATIVE,
        "decay_steps": AT_LEAST_ONE,
    },
    schema.SamplingConfig: {
        "temperature": NOT_NEGATIVE,
        "top_k": NOT_NEGATIVE,
        "top_p": POSITIVE_PROBABILITY,
        "max_new_tokens": AT_LEAST_ONE,
        "min_new_tokens": NOT_NEGATIVE,
    },
    schema.GenerationConfig: {"max_batch_size": AT_LEAST_ONE, "poll_interval": AT_LEAST_ONE},
    schema.TextDataConfig: {
        "sequence_length": AT_LEAST_ONE,
        "pack_length": AT_LEAST_ONE,
        "global_batch_size": AT_LEAST_ONE,
    },
    schema.PromptDataConfig: {"max_prompt_length": AT_LEAST_ONE},
    schema.ScoredPromptDataConfig: {"pack_length": AT_LEAST_ONE},
    schema.KLConfig: {"coef": NOT_NEGATIVE, "target": POSITIVE, "horizon": AT_LEAST_ONE},
    schema.PPOConfig: {
        "rollout_batch_size": AT_LEAST_ONE,
        "samples_per_prompt": AT_LEAST_ONE,
        "rollout_chunk_size": AT_LEAST_ONE,
        "mini_batch_size": AT_LEAST_ONE,
        "ppo_epochs": AT_LEAST_ONE,
        "clip_ratio": POSITIVE,
        "value_clip": POSITIVE,
        "entropy_coef": NOT_NEGATIVE,
        "discount": POSITIVE_PROBABILITY,
        "gae_lambda": PROBABILITY,
        "critic_warmup_steps": NOT_NEGATIVE,
        "truncation_penalty": NOT_NEGATIVE,
        "validation_prompts": NOT_NEGATIVE,
        "self_check_tolerance": POSITIVE,
    },
    schema.GenerateRoot: {"limit": AT_LEAST_ONE, "samples_per_prompt": AT_LEAST_ONE},
    schema.EvaluationConfig: {"limit": AT_LEAST_ONE, "bootstrap_samples": AT_LEAST_ONE, "confidence": BETWEEN},
}

# (section, key, switch, value): a changed ``key`` acts only when ``switch`` has that value
ONLY_WITH: tuple[tuple[type[Section], str, str, str], ...] = (
    (schema.KLConfig, "target", "controller", "adaptive"),
    (schema.KLConfig, "horizon", "controller", "adaptive"),
    (schema.PPOConfig, "truncation_penalty", "truncation", "penalize"),
)


def check_values(root: Section) -> None:
    """Raise ConfigError for the first value in ``root`` that breaks a rule of its own section."""
    for prefix, section in sections(root):
        for (owner, name), allowed in CHOICES.items():
            if isinstance(section, owner) and getattr(section, name) not in allowed:
                value = getattr(section, name)
                raise ConfigError(f"{prefix}{name}={value}: must be {_alternatives(allowed)}")
        for owner, rules in RANGES.items():
            if isinstance(section, owner):
                _check_ranges(prefix, section, rules)
        for owner, name, switch, wanted in ONLY_WITH:
            if isinstance(section, owner) and getattr(section, switch) != wanted and _is_changed(section, name):
                raise ConfigError(
                    f"{prefix}{name}={getattr(section, name)} has no effect with {prefix}{switch}="
                    f"{getattr(section, switch)}; set {prefix}{switch}={wanted} or leave {prefix}{name} out"
                )
        if isinstance(section, schema.OptimizerConfig):
            _check_optimizer(prefix, section)
        if isinstance(section, schema.SamplingConfig):
            _check_sampling(prefix, section)
        if isinstance(section, schema.TrainerConfig):
            if section.max_time is not None:
                parse_duration(section.max_time, f"{prefix}max_time")
            for phase, seconds in section.phase_timeouts.items():
                if not POSITIVE[0](seconds):
                    raise ConfigError(f"{prefix}phase_timeouts.{phase}={seconds}: must be {POSITIVE[1]}")


def sections(root: Section, prefix: str = "") -> Iterator[tuple[str, Section]]:
    """``root`` and every section below it, each with its dotted prefix (``"actor.optimizer."``)."""
    yield prefix, root
    for field in dataclasses.fields(root):  # type: ignore[arg-type]
        value = getattr(root, field.name)
        if isinstance(value, Section):
            yield from sections(value, f"{prefix}{field.name}.")


def _check_ranges(prefix: str, section: Section, rules: dict[str, Rule]) -> None:
    for name, (holds, words) in rules.items():
        value = getattr(section, name)
        if value is not None and not holds(value):
            raise ConfigError(f"{prefix}{name}={value}: must be {words}")


def _is_changed(section: Section, name: str) -> bool:
    default = next(f.default for f in dataclasses.fields(section) if f.name == name)  # type: ignore[arg-type]
    return bool(getattr(section, name) != default)


def _check_optimizer(prefix: str, section: schema.OptimizerConfig) -> None:
    if section.min_lr > section.lr:
        raise ConfigError(f"{prefix}min_lr={section.min_lr} is above {prefix}lr={section.lr}; it must be at most that")
    if section.decay_steps is not None and section.warmup_steps >= section.decay_steps:
        raise ConfigError(
            f"{prefix}warmup_steps={section.warmup_steps} must be below {prefix}decay_steps={section.decay_steps}"
        )


def _check_sampling(prefix: str, section: schema.SamplingConfig) -> None:
    if section.min_new_tokens > section.max_new_tokens:
        raise ConfigError(
            f"{prefix}min_new_tokens={section.min_new_tokens} is above {prefix}max_new_tokens="
            f"{section.max_new_tokens}; it must be at most that"
        )
    if "" in section.stop_strings:
        raise ConfigError(f"{prefix}stop_strings holds an empty string, which ends every response; remove it")
    if any(token < 0 for token in section.stop_token_ids):
        raise ConfigError(f"{prefix}stop_token_ids={list(section.stop_token_ids)}: token ids are 0 or more")


def _alternatives(values: tuple[str, ...]) -> str:
    if len(values) == 1:
        return f"{values[0]} (nothing else is built yet)"
    return f"{', '.join(values[:-1])} or {values[-1]}"

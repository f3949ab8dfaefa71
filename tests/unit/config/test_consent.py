"""The table of what may change when a run is continued: every key of the schema has a rule, no rule is dead."""

from __future__ import annotations

from typing import Any

import pytest

from aligner.config.compose import compose
from aligner.config.consent import (
    CONSENT,
    FIXED,
    FREE,
    RESUMABLE,
    RULES,
    changed_keys,
    followed_keys,
    rule_of,
    why_fixed,
)
from aligner.config.keys import schema_keys
from aligner.config.schema import ROOTS, ResumableRunConfig
from aligner.config.section import Section, to_container

KEYS = {command: schema_keys(ROOTS[command]) for command in RESUMABLE}


def config(*words: str) -> dict[str, Any]:
    plain: dict[str, Any] = to_container(compose("ppo", ["model.path=m", "reward.init_from=r", *words]))
    return plain


def told(before: dict[str, Any], *words: str) -> list[str]:
    return [str(change) for change in changed_keys("ppo", before, config(*words))]


def test_the_commands_are_those_whose_runs_can_be_continued() -> None:
    assert set(RESUMABLE) == {name for name, root in ROOTS.items() if isinstance(root().run, ResumableRunConfig)}


@pytest.mark.parametrize("command", RESUMABLE)
def test_every_key_has_a_rule(command: str) -> None:
    without = []
    for key, kind in KEYS[command].items():
        if isinstance(kind, type) and issubclass(kind, Section):
            continue
        try:
            rule = rule_of(key)
        except KeyError:
            without.append(key)
        else:
            assert rule is not FIXED or why_fixed(key)
    assert not without, "give these keys a rule in aligner/config/consent.py"


def test_every_rule_is_about_a_key() -> None:
    known = {key for keys in KEYS.values() for key in keys}
    assert [key for key in RULES if key not in known] == []


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("trainer.devices", FREE),
        ("trainer.phase_timeouts", FREE),
        ("trainer.seed", CONSENT),
        ("actor.parallel.tensor_model_parallel_size", FREE),
        ("actor.optimizer.lr", CONSENT),
        ("critic.optimizer.use_distributed_optimizer", FIXED),
        ("model.dtype", FIXED),
        ("reference.model.dtype", FIXED),
        ("data.too_long", CONSENT),
        ("data.train", FREE),
        ("generation.sampling.top_p", CONSENT),
        ("generation.max_batch_size", FREE),
        ("ppo.kl.coef", CONSENT),
    ],
)
def test_the_longest_prefix_decides(key: str, rule: Any) -> None:
    assert rule_of(key) is rule


def test_a_new_section_needs_rules() -> None:
    with pytest.raises(KeyError, match=r"memory.limit has no rule"):
        rule_of("memory.limit")


def test_changes_name_key_before_and_after_in_the_schema_s_order() -> None:
    before = config()
    assert told(before) == []
    assert told(before, "ppo.kl.coef=0.1", "trainer.max_steps=7", "critic.optimizer.decay_steps=9") == [
        "trainer.max_steps: 100 -> 7",
        "ppo.kl.coef: 0.05 -> 0.1",
        "critic.optimizer.decay_steps: null -> 9",
    ]
    assert told(before, "reward.standardize=false", "generation.sampling.stop_strings=[a,b]") == [
        "generation.sampling.stop_strings: [] -> ['a', 'b']",
        "reward.standardize: true -> false",
    ]


def test_what_follows_another_key_is_told_once() -> None:
    follows = followed_keys("ppo")
    assert follows["actor.model.dtype"] == "model.dtype"
    assert follows["critic.parallel.sequence_parallel"] == "actor.parallel.sequence_parallel"
    before = config()
    assert told(before, "model.dtype=float32") == ["model.dtype: bfloat16 -> float32"]
    assert told(before, "actor.parallel.tensor_model_parallel_size=2") == [
        "actor.parallel.tensor_model_parallel_size: 1 -> 2"
    ]
    # one that no longer follows is a change of its own
    assert told(before, "model.dtype=float32", "critic.model.dtype=bfloat16")[0] == "model.dtype: bfloat16 -> float32"
    assert told(config("critic.model.dtype=float32"), "model.dtype=float32", "critic.model.dtype=float32") == [
        "model.dtype: bfloat16 -> float32"
    ]
    assert told(before, "critic.model.dtype=float32") == ["critic.model.dtype: bfloat16 -> float32"]


def test_mappings_with_names_of_the_user_are_one_value() -> None:
    before = config("trainer.phase_timeouts.rollout=10")
    assert told(before) == ["trainer.phase_timeouts: {'rollout': 10.0} -> {}"]
    assert told(before, "trainer.phase_timeouts.rollout=20", "trainer.phase_timeouts.train=5") == [
        "trainer.phase_timeouts: {'rollout': 10.0} -> {'rollout': 20.0, 'train': 5.0}"
    ]


def test_keys_of_other_releases() -> None:
    """A key that the saved configuration lacks had its default; one that is gone counts for nothing."""
    before = config("model.dtype=float32")
    del before["ppo"]["discount"], before["critic"]["model"]["dtype"]
    before["ppo"]["gone"] = 3
    assert told(before, "model.dtype=float32") == []
    assert told(before, "model.dtype=float32", "ppo.discount=0.9") == ["ppo.discount: 1.0 -> 0.9"]

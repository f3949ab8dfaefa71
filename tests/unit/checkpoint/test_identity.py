"""Which lives may continue a run: what is refused, what needs the user's word, what is only said."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from aligner.checkpoint.identity import check_identity
from aligner.config.compose import compose
from aligner.config.section import to_container
from aligner.errors import CheckpointError, ConfigError

SUM = {letter: letter * 64 for letter in "abcdef"}


def model(architecture: str = "a", tokenizer: str = "b", template: str = "c", layers: int = 2) -> dict[str, Any]:
    return {
        "architecture": SUM[architecture],
        "tokenizer": SUM[tokenizer],
        "chat_template": SUM[template],
        "fields": {"num_layers": layers, "hidden_size": 8},
    }


def data(path: str, content: str = "d", kept: str = "e", rows: int = 10) -> dict[str, Any]:
    return {"path": path, "rows": rows, "sha256": SUM[content], "kept": rows, "kept_sha256": SUM[kept]}


def identity(*words: str) -> dict[str, Any]:
    return {
        "command": "ppo",
        "config": to_container(compose("ppo", ["model.path=m", "reward.init_from=r", *words])),
        "models": {role: model() for role in ("actor", "critic", "reference", "reward")},
        "sources": {
            "reference": {"kind": "hf", "path": "/m", "sha256": SUM["a"]},
            "reward": {"kind": "checkpoint", "path": "/r/checkpoints/step_00000002", "sha256": SUM["b"]},
        },
        "data": {"data.prompts": data("p.jsonl"), "data.validation_prompts": data("v.jsonl")},
    }


SAVED = identity()


def check(now: dict[str, Any], *accepted: str, finished: bool = False, saved: dict[str, Any] = SAVED) -> list[str]:
    return check_identity(saved, now, accepted, finished=finished)


def changed(**parts: dict[str, Any]) -> dict[str, Any]:
    now = copy.deepcopy(SAVED)
    for part, values in parts.items():
        now[part] |= values
    return now


def test_nothing_changed() -> None:
    before = copy.deepcopy(SAVED)
    assert check(identity()) == [] and before == SAVED
    assert check(identity(), finished=True) == []
    assert check({}, saved={}) == []
    assert check(identity(), saved={}) == ["the checkpoint does not say what its run was, so nothing is compared"]


def test_free_changes_are_said_and_need_nothing() -> None:
    now = identity("trainer.max_steps=200", "trainer.devices=4", "run.dir=/there", "run.accept_changes=[ppo.kl.coef]")
    said = ["changed: trainer.devices: 1 -> 4, trainer.max_steps: 100 -> 200"]
    assert check(now) == said
    assert check(now, finished=True) == said


def test_paths_may_move() -> None:
    now = identity("model.path=/else/m", "data.prompts=/else/p.jsonl")
    now["data"]["data.prompts"]["path"] = "/else/p.jsonl"
    now["sources"]["reference"]["path"] = "/else/m"
    assert check(now) == [
        "changed: model.path: m -> /else/m, data.prompts: builtin:prompts_train.jsonl -> /else/p.jsonl"
    ]


def test_changes_need_consent_key_by_key() -> None:
    now = identity("actor.optimizer.lr=3e-6", "ppo.kl.coef=0.1", "trainer.devices=2")
    with pytest.raises(ConfigError) as refused:
        check(now)
    assert str(refused.value).split("\n") == [
        "the run began with other settings (before -> now):",
        "  ppo.kl.coef: 0.05 -> 0.1",
        "  actor.optimizer.lr: 1e-05 -> 3e-06",
        "give run.accept_changes=[ppo.kl.coef,actor.optimizer.lr] to continue with the new ones, leave them as they "
        "were, or start a new run.dir",
    ]
    with pytest.raises(ConfigError, match=r"=\[actor.optimizer.lr\] to continue") as rest:
        check(now, "ppo.kl.coef")
    assert "ppo.kl.coef" not in str(rest.value)
    expected = [
        "changed from here on: ppo.kl.coef: 0.05 -> 0.1",
        "changed from here on: actor.optimizer.lr: 1e-05 -> 3e-06",
        "changed: trainer.devices: 1 -> 2",
    ]
    for accepted in (["ppo.kl.coef", "actor.optimizer.lr"], ["all"], ["ppo", "actor.optimizer"]):
        assert check(now, *accepted) == expected
    with pytest.raises(ConfigError, match=r"ppo\.kl\.coef"):
        check(now, "actor.optimizer.lr", "ppo.k")  # a prefix is a whole section


def test_consent_that_is_not_needed_is_said() -> None:
    assert check(identity(), "ppo.kl.coef", "all") == ["run.accept_changes names ppo.kl.coef, which has not changed"]


def test_other_rows_need_consent_and_are_read_from_their_beginning() -> None:
    more = changed(data={"data.prompts": data("p.jsonl", content="f", rows=12)})
    with pytest.raises(ConfigError, match=r"data.prompts: p.jsonl \(10 of 10 rows; .*\) -> p.jsonl \(12 of 12 rows"):
        check(more)
    remarks = check(more, "data.prompts")
    assert len(remarks) == 2 and "the new order of samples is read from its beginning" in remarks[1]
    held_out = changed(data={"data.validation_prompts": data("v.jsonl", kept="f")})
    with pytest.raises(ConfigError, match=r"accept_changes=\[data.validation_prompts\]"):
        check(held_out)
    assert len(check(held_out, "data")) == 1
    gone = copy.deepcopy(SAVED)
    del gone["data"]["data.validation_prompts"]
    with pytest.raises(ConfigError, match=r"data.validation_prompts: v.jsonl -> null"):
        check(gone)


def test_another_seed_is_another_order() -> None:
    assert "read from its beginning" in check(identity("trainer.seed=5"), "trainer.seed")[1]


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (
            changed(models={"critic": model(architecture="f", layers=4)}),
            r"critic: its architecture .*: num_layers 2 -> 4$",
        ),
        (
            changed(models={"actor": model(tokenizer="f")}),
            r"actor: its tokenizer is another one \(sha256 bbbbbbbbbbbb -> f",
        ),
        (changed(models={"reward": model(template="f")}), r"reward: its chat template is another one"),
        (identity("model.dtype=float32"), r"model.dtype: bfloat16 -> float32: weights and optimizer states"),
        (identity("critic.optimizer.use_distributed_optimizer=false"), r"true -> false: optimizer states are saved in"),
        (
            changed(sources={"reference": {"kind": "hf", "path": "/m", "sha256": SUM["f"]}}),
            r"reference: /m holds other weights than /m did \(sha256 aaaaaaaaaaaa -> ffffffffffff\)",
        ),
        (
            changed(sources={"reward": {"kind": "function", "path": "f.py:g", "sha256": SUM["f"]}}),
            r"reward: began as the checkpoint /r/checkpoints/step_00000002, is now the function f.py:g",
        ),
    ],
)
def test_another_run_is_refused_whatever_is_accepted(now: dict[str, Any], message: str) -> None:
    for accepted in ([], ["all"]):
        with pytest.raises(CheckpointError, match="(?m)" + message) as refused:
            check(now, *accepted)
        assert str(refused.value).startswith("this is another run than the one that was saved:\n")
        assert str(refused.value).endswith("\nrestore what it began with, or start a new run.dir")


def test_all_reasons_stand_in_one_message() -> None:
    now = changed(models={"actor": model(tokenizer="f"), "critic": model(tokenizer="f")})
    with pytest.raises(CheckpointError, match=r"actor: its tokenizer.*\n  critic: its tokenizer"):
        check(now)


def test_the_code_of_a_reward_may_change_with_consent() -> None:
    def scored_by(digest: str) -> dict[str, Any]:
        scored = copy.deepcopy(SAVED)
        del scored["models"]["reward"]
        scored["sources"]["reward"] = {"kind": "function", "path": "f.py:g", "sha256": SUM[digest]}
        return scored

    with pytest.raises(ConfigError, match=r"reward.function: f.py:g \(sha256 aaaaaaaaaaaa\) -> f.py:g \(sha256 bbbb"):
        check(scored_by("b"), saved=scored_by("a"))
    assert len(check(scored_by("b"), "reward.function", saved=scored_by("a"))) == 1


def test_a_finished_run_refuses_what_no_step_is_left_for() -> None:
    now = identity("actor.optimizer.lr=3e-6")
    for accepted in ([], ["all"]):
        with pytest.raises(ConfigError, match=r"(?s)finished.*lr: 1e-05 -> 3e-06\ngive a larger trainer.max_steps"):
            check(now, *accepted, finished=True)

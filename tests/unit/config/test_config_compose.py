"""Composition: what a command line becomes, and the one-line errors of command lines that cannot."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from aligner.config.compose import (
    compose,
    compose_unresolved,
    conf_directory,
    config_groups,
    quote_override,
    recipes,
    to_yaml,
)
from aligner.config.keys import ALL_ROOTS
from aligner.config.schema import ROOTS
from aligner.errors import ConfigError

REQUIRED = {
    "sft": ["model.path=m", "data.train=t.jsonl"],
    "rm": ["model.path=m", "data.train=t.jsonl"],
    "ppo": ["model.path=m"],
    "generate": ["model.path=m", "output=o.jsonl"],
    "evaluate": ["model.path=m"],
}


def refusal(command: str, *overrides: str, config_dirs: tuple[Path, ...] = ()) -> str:
    """The message of the ConfigError, which must be one line."""
    with pytest.raises(ConfigError) as caught:
        compose(command, overrides, config_dirs)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


@pytest.mark.parametrize("command", ROOTS)
def test_every_command_composes_to_its_frozen_root(command: str) -> None:
    root = compose(command, REQUIRED[command])
    assert type(root) is ROOTS[command]
    with pytest.raises(AttributeError, match="frozen"):
        root.trainer.seed = 2
    with pytest.raises(AttributeError, match="frozen"):
        root.model.path = "other"


def test_every_model_preset_composes_with_every_command() -> None:
    presets = config_groups()["model"]
    assert {path.stem for path in (conf_directory() / "model").glob("*.yaml")} == set(presets)
    for command in ROOTS:
        needed = [text for text in REQUIRED[command] if not text.startswith("model.")]
        for preset in presets:
            assert compose(command, [f"model={preset}", *needed]).model.path


@pytest.mark.parametrize(("recipe", "command"), recipes().items())
def test_every_recipe_composes_with_its_command(recipe: str, command: str) -> None:
    assert command in ROOTS, f"conf/recipe/{recipe}.yaml must begin with the comment: # For `aligner <command>`."
    needed = [text for text in REQUIRED[command] if text.startswith(("data.", "output"))]
    compose(command, [f"+recipe={recipe}", *needed])


def test_every_conf_file_is_composed_by_a_test() -> None:
    """A new group or primary configuration must be added to the tests above."""
    files = {str(path.relative_to(conf_directory()).parent) for path in conf_directory().rglob("*.yaml")}
    assert files == {".", "cluster", "model", "recipe"}
    assert {path.stem for path in conf_directory().glob("*.yaml")} == set(ALL_ROOTS)


def test_roles_follow_the_model_and_the_actor_unless_overridden() -> None:
    root = compose(
        "ppo",
        [
            "model.path=m",
            "model.dtype=float32",
            "actor.parallel.tensor_model_parallel_size=4",
            "critic.parallel.tensor_model_parallel_size=2",
            "reward.model.path=r",
            "actor.init_from=runs/sft/a",
        ],
    )
    assert root.critic.model.path == "m" and root.critic.model.dtype == "float32" and root.reward.model.path == "r"
    assert root.reference.parallel.tensor_model_parallel_size == 4
    assert root.critic.parallel.tensor_model_parallel_size == 2
    assert root.reference.init_from == "runs/sft/a"


def test_later_overrides_win_over_recipes_and_presets() -> None:
    root = compose("ppo", ["+recipe=ppo_llama3_8b", "ppo.kl.coef=0.5", "model=qwen3_8b"])
    assert root.ppo.kl.coef == 0.5 and root.model.path == "Qwen/Qwen3-8B"
    assert root.ppo.rollout_batch_size == 256


def test_lists_and_mappings_are_read_only() -> None:
    root = compose("ppo", ["model.path=m", "generation.sampling.stop_strings=[a,'b c']"])
    assert root.generation.sampling.stop_strings == ("a", "b c")
    root = compose(
        "evaluate",
        ["model.path=m", "evaluation.checkpoints.base=models/x", "+evaluation.checkpoints.ppo=runs/ppo/1"],
    )
    assert dict(root.evaluation.checkpoints) == {"base": "models/x", "ppo": "runs/ppo/1"}
    with pytest.raises(TypeError):
        root.evaluation.checkpoints["sft"] = "x"  # type: ignore[index]
    root = compose("evaluate", ["model.path=m", "evaluation.checkpoints={b: c}"])
    assert dict(root.evaluation.checkpoints) == {"b": "c"}


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_unknown_keys_are_refused_in_every_form(prefix: str) -> None:
    message = refusal("ppo", "model.path=m", f"{prefix}actor.parallel.tensor_model_paralel_size=2")
    assert "actor.parallel.tensor_model_paralel_size: unknown key" in message
    assert "nearest key: actor.parallel.tensor_model_parallel_size" in message
    message = refusal("ppo", "model.path=m", f"{prefix}actor.lr=1")
    assert "nearest key: actor.optimizer.lr" in message


def test_unknown_keys_inside_a_mapping_are_refused() -> None:
    message = refusal("ppo", "model.path=m", "actor.optimizer={learning_rate: 1}")
    assert "actor.optimizer.learning_rate: unknown key" in message


def test_keys_of_another_command_are_named() -> None:
    assert "a key of aligner sft, rm" in refusal("ppo", "model.path=m", "data.train=x")


@pytest.mark.parametrize(
    ("override", "needed"),
    [
        ("trainer.devices=two", "needs an integer"),
        ("trainer.devices=1.5", "needs an integer"),
        ("trainer.devices=true", "needs an integer"),
        ("trainer.devices=null", "needs an integer"),
        ("trainer.threads=many", "needs an integer or null"),
        ("actor.optimizer.lr=small", "needs a number"),
        ("ppo.whiten_advantages=maybe", "needs true or false"),
        ("generation.sampling.stop_strings=stop", "needs a list, each a string"),
        ("generation.sampling.stop_token_ids=[1,a]", "needs a list, each an integer"),
        ("actor.optimizer=adam", "needs a section with the keys lr, min_lr"),
    ],
)
def test_wrong_types(override: str, needed: str) -> None:
    message = refusal("ppo", "model.path=m", override)
    assert message.startswith(override.partition("=")[0]) and needed in message


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model=smollm"], "no such model; nearest: smollm2_135m; available: llama3_70b"),
        (["+recipe=ppo_llama3_7b", "model.path=m"], "no such recipe; nearest: ppo_llama3_"),
        (["model.path=m", "trainer.seed=1,2"], "a sweep"),
        (["model.path=m", "hydra.run.dir=x"], "use run.dir"),
        (["model.path=m", "~trainer.seed"], "cannot be removed"),
        (["model.path=m", "trainer"], "key=value"),
        (["model.path=m", "run.dir=a=b"], "quote"),
        (
            ["model.path=m", "generation.sampling.stop_strings=['${']"],
            "cannot be read: no viable alternative at input '${'",
        ),
        (["model.path=${oc.env:ALIGNER_NOT_SET}"], "ALIGNER_NOT_SET"),
        (["model.path=${nowhere}"], "nowhere"),
        ([], "needs model.path; give model=<preset> or model.path="),
    ],
)
def test_refusals(overrides: list[str], expected: str) -> None:
    assert expected in refusal("ppo", *overrides)


def test_missing_values_are_listed_together() -> None:
    message = refusal("sft")
    assert "model.path" in message and "data.train=<file.jsonl>" in message


def test_a_key_given_with_plus_that_exists() -> None:
    assert "ppo.clip_ratio" in refusal("ppo", "model.path=m", "+ppo.clip_ratio=0.3")
    assert compose("ppo", ["model.path=m", "++ppo.clip_ratio=0.3"]).ppo.clip_ratio == 0.3


def test_own_config_directory(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine_ppo.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: llama3_8b\nppo:\n  clip_ratio: 0.1\n"
    )
    assert "mine_ppo" in config_groups([tmp_path])["recipe"]
    root = compose("ppo", ["+recipe=mine_ppo"], [tmp_path])
    assert root.ppo.clip_ratio == 0.1 and root.model.path == "meta-llama/Llama-3.1-8B-Instruct"
    (tmp_path / "recipe" / "bad_ppo.yaml").write_text("# @package _global_\nppo:\n  clip_ration: 0.1\n")
    assert "nearest key: ppo.clip_ratio" in refusal("ppo", "+recipe=bad_ppo", config_dirs=(tmp_path,))
    (tmp_path / "recipe" / "typed_ppo.yaml").write_text("# @package _global_\nppo:\n  clip_ratio: high\n")
    assert "needs a number" in refusal("ppo", "+recipe=typed_ppo", config_dirs=(tmp_path,))
    (tmp_path / "recipe" / "broken_ppo.yaml").write_text("# @package _global_\nppo: [\n")
    assert "broken_ppo.yaml" in refusal("ppo", "+recipe=broken_ppo", config_dirs=(tmp_path,))
    assert "no such directory" in refusal("ppo", "model.path=m", config_dirs=(tmp_path / "none",))


def test_yaml_holds_every_value_and_composes_again() -> None:
    root = compose("ppo", ["model.path=m", "generation.sampling.stop_strings=['$1']"])
    values = yaml.safe_load(to_yaml("ppo", root))
    assert values.pop("command") == "ppo"
    assert set(values) == {field.name for field in dataclasses.fields(root)}
    assert values["generation"]["sampling"]["stop_strings"] == ["$1"]
    assert values["critic"]["model"]["path"] == "m"


@pytest.mark.parametrize("value", ["runs/a=b", "it's here", "a,b c", "x y/z"])
def test_quoted_overrides_come_through(value: str) -> None:
    assert compose("sft", [*REQUIRED["sft"], quote_override("run.dir", value)]).run.dir == value


def test_interpolations_stay_in_the_unresolved_form() -> None:
    config = compose_unresolved("ppo", ["model=smollm2_135m"])
    text = str(config._get_node("model")._get_node("path")._value())  # type: ignore[union-attr]
    assert text.startswith("${oc.env:ALIGNER_MODELS")

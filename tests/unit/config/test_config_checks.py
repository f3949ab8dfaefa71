"""Checks across sections: every message has the numbers that clash and values that work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner.config.checks import check, divisors, looks_like_hub_id
from aligner.config.compose import compose, recipes
from aligner.errors import AlignerError, ConfigError, DataError, ModelError, TopologyError

TRAIN = "data.train=builtin:demonstrations"
HUB = "some-organisation/some-model"  # never looked up: a hub model's files are not on this machine


def refusal(command: str, *overrides: str, world_size: int = 1, kind: type[AlignerError] = ConfigError) -> str:
    """The message of the error that ``check`` raises, which must be one line of class ``kind``."""
    needed = {
        "sft": [TRAIN],
        "rm": [TRAIN],
        "ppo": ["reward.init_from=some-organisation/some-reward", "reward.standardize=false"],
        "generate": ["output=/nonexistent/out.jsonl"],
        "evaluate": ["evaluation.checkpoints.base=some-organisation/some-model"],
    }[command]
    root = compose(command, [f"model.path={HUB}", *needed, *overrides])
    with pytest.raises(kind) as caught:
        check(root, world_size)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory with 8 heads, 4 KV heads, 6 layers and a context of 512."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 6,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 512,
    }
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(("recipe", "command"), recipes().items())
def test_recipes_pass_the_checks(recipe: str, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With hub models in place of what earlier stages leave; large recipes on 64 ranks."""
    monkeypatch.chdir(tmp_path)  # no models/ or runs/ here
    own = {
        "sft": [TRAIN, "data.validation=builtin:demonstrations_validation"],
        "rm": [TRAIN, "data.validation=null", "reward.init_from=null"],
        "ppo": ["reward.init_from=o/rm", "reward.standardize=false", "actor.init_from=null"],
        "generate": ["output=out.jsonl", "actor.init_from=null"],
        "evaluate": [
            "evaluation.checkpoints={base: o/a, sft: o/b, ppo: o/c}",
            "reward.init_from=o/rm",
            "reward.standardize=false",
        ],
    }
    root = compose(command, [f"+recipe={recipe}", "model=llama3_70b", *own[command]])
    check(root, 1 if recipe.startswith("demo") else 64)


@pytest.mark.parametrize(
    ("command", "override", "expected"),
    [
        ("sft", "trainer.max_steps=0", "trainer.max_steps=0: must be 1 or more"),
        ("sft", "trainer.devices=0", "must be 1 or more"),
        ("sft", "trainer.seed=-1", "between 0 and"),
        ("sft", "trainer.save_interval=-5", "must be 0 or more"),
        ("sft", "trainer.max_time=soon", "trainer.max_time='soon' must be seconds, [HH:]MM:SS or D-HH[:MM[:SS]]"),
        ("ppo", "trainer.max_time=1:75:00", "must have fewer than 24 hours, 60 minutes and 60 seconds"),
        ("sft", "model.dtype=float16", "must be bfloat16 or float32"),
        ("rm", "reward.model.dtype=int8", "reward.model.dtype=int8: must be bfloat16 or float32"),
        ("sft", "actor.optimizer.lr=0", "actor.optimizer.lr=0.0: must be a number above 0"),
        ("sft", "actor.optimizer.lr=nan", "must be a number above 0"),
        ("sft", "actor.optimizer.lr=inf", "must be a number above 0"),
        ("sft", "actor.optimizer.min_lr=1", "it must be at most that"),
        ("sft", "actor.optimizer.adam_beta2=1", "below 1"),
        ("sft", "actor.optimizer.schedule=cosin", "must be cosine, linear or constant"),
        ("sft", "actor.optimizer={warmup_steps: 5, decay_steps: 5}", "must be below"),
        ("sft", "model.hidden_dropout=1", "below 1"),
        ("sft", "data.too_long=cut", "must be drop or truncate"),
        ("sft", "data.pack_length=512", "data.pack_length=512 is below data.sequence_length=1024"),
        ("rm", "data.pack_length=2047", "below 2 x data.sequence_length=1024"),
        ("rm", "data.pack_length=1000", "give 2048 or more"),
        ("sft", "trainer.val_check_interval=5", "trainer.val_check_interval=5 has no effect without data.validation"),
        ("sft", "actor.placement=0-3", "must be all (nothing else is built yet)"),
        ("ppo", "reference.offload=cpu", "must be none (nothing else is built yet)"),
        ("ppo", "generation.engine=vllm", "must be megatron (nothing else is built yet)"),
        ("ppo", "generation.sampling.top_p=0", "above 0 and at most 1"),
        ("ppo", "generation.sampling.min_new_tokens=999", "is above generation.sampling.max_new_tokens=128"),
        ("ppo", "generation.sampling.stop_strings=['']", "empty string"),
        ("ppo", "generation.sampling.stop_token_ids=[-1]", "0 or more"),
        ("ppo", "ppo.truncation=cut", "must be bootstrap, penalize or mask"),
        ("ppo", "ppo.truncation_penalty=2", "has no effect with ppo.truncation=bootstrap; set ppo.truncation=penalize"),
        ("ppo", "ppo.kl.controller=adaptiv", "must be fixed or adaptive"),
        ("ppo", "ppo.kl.target=3", "has no effect with ppo.kl.controller=fixed"),
        ("ppo", "ppo.kl.coef=-1", "0 or more"),
        ("ppo", "ppo.kl={controller: adaptive, coef: 0}", "ppo.kl.coef=0.0: ppo.kl.controller=adaptive multiplies"),
        ("ppo", "ppo.kl={controller: adaptive, horizon: 3}", "0.2 x the 16 samples of a step = 3.2"),
        ("ppo", "ppo.kl={controller: adaptive, horizon: 3}", "ppo.kl.horizon=3 is not above"),
        ("ppo", "model.hidden_dropout=0.1", "model.hidden_dropout=0.1: PPO compares"),
        ("ppo", "actor.model.attention_dropout=0.1", "set actor.model.attention_dropout=0"),
        ("ppo", "critic.model.hidden_dropout=0.1", "set critic.model.hidden_dropout=0"),
        ("ppo", "critic.model.path=o/other", "set critic.init_from=o/other"),
        ("ppo", "critic.model.tokenizer=o/other", "with critic.init_from=reward the tokenizer is that of reward"),
        ("ppo", "critic.init_from=''", "critic.init_from is empty"),
        ("ppo", "reward.model.path=o/other", "reward.model.path=o/other has no effect: reward starts from"),
        ("ppo", "ppo.gae_lambda=1.5", "between 0 and 1"),
        ("ppo", "ppo.critic_warmup_steps=100", "the policy never learns in trainer.max_steps=100 steps"),
        ("ppo", "reference.model.hidden_dropout=0.1", "reference is not trained"),
        ("ppo", "data.pack_length=300", "256 + generation.sampling.max_new_tokens 128 = 384"),
        ("generate", "samples_per_prompt=0", "1 or more"),
        ("generate", "model.hidden_dropout=0.1", "model.hidden_dropout=0.1 has no effect: nothing is trained"),
        ("generate", "actor.model.attention_dropout=0.1", "actor.model.attention_dropout=0.1 has no effect"),
        ("evaluate", "model.attention_dropout=0.1", "model.attention_dropout=0.1 has no effect"),
        ("evaluate", "actor.init_from=o/policy", "actor.init_from=o/policy has no effect: the compared policies"),
        ("evaluate", "actor.model.path=o/policy", "actor.model.path=o/policy has no effect: the compared policies"),
        ("evaluate", "reward.model.dtype=float32", "there is no reward model (no reward.init_from)"),
        ("evaluate", "evaluation.confidence=1", "above 0 and below 1"),
        ("evaluate", "evaluation.baseline=ppo", "choose one of base"),
    ],
)
def test_values(command: str, override: str, expected: str) -> None:
    assert expected in refusal(command, override)


def test_adaptive_and_penalize_take_their_keys() -> None:
    root = compose(
        "ppo",
        [
            f"model.path={HUB}",
            f"reward.init_from={HUB}",
            "reward.standardize=false",
            "ppo.kl={controller: adaptive, target: 3}",
            "ppo.truncation=penalize",
            "ppo.truncation_penalty=2",
        ],
    )
    check(root, 1)


def test_rewards(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("def f(requests):\n    return [0.0 for _ in requests]\n")
    function = f"{file}:f"
    assert "no reward: set reward.init_from" in refusal("ppo", "reward.init_from=null")
    assert "only one can score" in refusal("ppo", f"reward.function={function}")
    message = refusal("ppo", "reward.init_from=null", f"reward.function={function}")
    assert "set critic.init_from=actor" in message
    root = compose("ppo", [f"model.path={HUB}", f"reward.function={function}", "critic.init_from=actor"])
    check(root, 1)
    assert "set reward.standardize=false" in refusal("ppo", "reward.standardize=true")


def test_a_reward_function_has_no_model(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("def f(requests):\n    return [0.0 for _ in requests]\n")
    given = ["reward.init_from=null", f"reward.function={file}:f", "critic.init_from=actor"]
    message = refusal("ppo", *given, "reward.model.dtype=float32")
    assert message.startswith("reward.model.dtype=float32 has no effect: there is no reward model (reward.function=")
    message = refusal("ppo", *given, "reward.parallel.tensor_model_parallel_size=2", world_size=2)
    assert message.startswith("reward.parallel.tensor_model_parallel_size=2 has no effect")


def test_validations_need_prompts() -> None:
    interval = "trainer.val_check_interval=5"
    assert "without ppo.validation_prompts" in refusal("ppo", interval, "ppo.validation_prompts=0")
    assert "without data.validation_prompts" in refusal("ppo", interval, "data.validation_prompts=null")
    check(compose("rm", [f"model.path={HUB}", TRAIN, interval]), 1)  # validates on its training pairs


def test_sft_and_rm_keep_dropout_and_a_critic_of_its_own_its_tokenizer() -> None:
    for command in ("sft", "rm"):
        check(compose(command, [f"model.path={HUB}", TRAIN, "model.hidden_dropout=0.1"]), 1)
    words = [f"model.path={HUB}", f"reward.init_from={HUB}", "reward.standardize=false"]
    check(compose("ppo", [*words, "critic.init_from=o/critic", "critic.model.tokenizer=o/tokenizer"]), 1)


def test_warm_up_against_the_length_of_the_schedule() -> None:
    message = refusal("sft", "trainer.max_steps=20", "actor.optimizer.warmup_steps=20")
    assert message.startswith("actor.optimizer.warmup_steps=20, but actor makes 20 optimizer steps")
    assert "give at most 19, or set actor.optimizer.decay_steps" in message
    message = refusal("rm", "trainer.max_steps=20", "reward.optimizer.warmup_steps=20")
    assert message.startswith("reward.optimizer.warmup_steps=20")
    ppo = ["trainer.max_steps=5", "ppo.critic_warmup_steps=2", "ppo.ppo_epochs=2", "ppo.mini_batch_size=4"]
    message = refusal("ppo", *ppo, "actor.optimizer.warmup_steps=24")  # (5 - 2) x 2 epochs x 16 / 4
    assert message.startswith("actor.optimizer.warmup_steps=24") and "give at most 23" in message
    message = refusal("ppo", *ppo, "critic.optimizer.warmup_steps=40")
    assert message.startswith("critic.optimizer.warmup_steps=40") and "give at most 39" in message
    fits = ["actor.optimizer={warmup_steps: 40, decay_steps: 50}", "critic.optimizer.warmup_steps=39"]
    needed = [f"model.path={HUB}", f"reward.init_from={HUB}", "reward.standardize=false"]
    check(compose("ppo", [*needed, *ppo, *fits]), 1)


def test_the_smallest_adaptive_horizon_passes() -> None:
    needed = [f"model.path={HUB}", f"reward.init_from={HUB}", "reward.standardize=false"]
    check(compose("ppo", [*needed, "ppo.kl={controller: adaptive, horizon: 4}"]), 1)  # 0.2 x 16 = 3.2
    assert "give 4 or more" in refusal("ppo", "ppo.kl={controller: adaptive, horizon: 3}")


def test_files_exist(tmp_path: Path) -> None:
    message = refusal("sft", f"data.train={tmp_path}/none.jsonl", kind=DataError)
    assert message.startswith(f"data.train={tmp_path}/none.jsonl: no such file")
    assert "available: demonstrations" in refusal("sft", "data.validation=builtin:nothing", kind=DataError)
    assert refusal("ppo", "data.validation_prompts=none.jsonl", kind=DataError).startswith("data.validation_prompts=")
    assert "no file none.py" in refusal("sft", "data.filter=none.py:keep")
    assert "not of the form" in refusal("sft", "data.filter=none.py")
    alone = ["reward.init_from=null", "critic.init_from=actor"]
    assert "no file none.py" in refusal("ppo", *alone, "reward.function=none.py:score")


def test_evaluation_needs_checkpoints_and_generation_a_new_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="evaluation.checkpoints is empty"):
        check(compose("evaluate", [f"model.path={HUB}"]), 1)
    output = tmp_path / "out.jsonl"
    output.touch()
    assert "set overwrite=true" in refusal("generate", f"output={output}")
    check(compose("generate", [f"model.path={HUB}", f"output={output}", "overwrite=true"]), 1)


def test_degrees_and_world_size() -> None:
    parallel = "actor.parallel={tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}"
    message = refusal("ppo", parallel, world_size=6, kind=TopologyError)
    assert "tensor 2 x pipeline 2 = 4 does not divide the 6 ranks" in message
    assert "start 4, 8, 12, ... ranks" in message and "one of 1, 2, 3, 6" in message
    message = refusal("ppo", "critic.parallel.tensor_model_parallel_size=3", world_size=4, kind=TopologyError)
    assert message.startswith("critic.parallel")
    for key in ("context_parallel_size", "expert_model_parallel_size", "virtual_pipeline_model_parallel_size"):
        assert "is not built yet" in refusal("sft", f"actor.parallel.{key}=2", world_size=2, kind=TopologyError)
    assert "must be 1 or more" in refusal("sft", "actor.parallel.tensor_model_parallel_size=0", kind=TopologyError)
    message = refusal("sft", "actor.parallel.sequence_parallel=true", kind=TopologyError)
    assert "needs tensor parallelism" in message
    parallel = "actor.parallel={tensor_model_parallel_size: 2, sequence_parallel: true}"
    needed = [f"model.path={HUB}", f"reward.init_from={HUB}", "reward.standardize=false"]
    check(compose("ppo", [*needed, parallel, "critic.parallel.tensor_model_parallel_size=1"]), 2)  # off for the critic


def test_batches_and_data_parallel_ranks() -> None:
    message = refusal("sft", "data.global_batch_size=3", world_size=4)
    assert "data.global_batch_size = 3 is less than the 4 data-parallel ranks of actor" in message
    message = refusal("ppo", "ppo.mini_batch_size=2", world_size=4)
    assert "ppo.mini_batch_size = 2 is less than the 4 data-parallel ranks" in message
    message = refusal("ppo", "ppo.rollout_batch_size=1", "ppo.samples_per_prompt=3", world_size=4)
    assert "= 3 is less than the 4" in message
    message = refusal("ppo", "ppo.rollout_batch_size=6", "ppo.samples_per_prompt=2", "ppo.mini_batch_size=5")
    assert "does not divide the 12 samples of a step" in message and "values that work: 1, 2, 3, 4, 6, 12" in message


def test_lengths_against_the_model(model: Path) -> None:
    message = refusal("sft", f"model.path={model}")
    assert "data.sequence_length=1024 is above the context of actor's model, 512 tokens; give 512 or less" in message
    message = refusal("ppo", f"model.path={model}", "data.max_prompt_length=500")
    assert "500 + generation.sampling.max_new_tokens 128 = 628" in message
    assert "data.max_prompt_length=384 works" in message
    message = refusal("ppo", f"model.path={model}", "generation.sampling.max_new_tokens=600")
    assert "max_new_tokens must be below 512" in message
    message = refusal("ppo", f"reward.init_from={model}", "data.max_prompt_length=500")
    assert "reward's model" in message or "critic's model" in message


def test_heads_and_layers_against_degrees(model: Path) -> None:
    fits = ["data.sequence_length=512", f"model.path={model}"]
    message = refusal("sft", *fits, "actor.parallel.tensor_model_parallel_size=8", world_size=8, kind=TopologyError)
    assert message.startswith("actor.parallel") and "values that work for this model: 1, 2, 4" in message
    message = refusal("sft", *fits, "actor.parallel.pipeline_model_parallel_size=4", world_size=4, kind=TopologyError)
    assert "6 layers" in message and "1, 2, 3, 6" in message


def test_model_directories(model: Path, tmp_path: Path) -> None:
    message = refusal("sft", f"model.path={tmp_path}/none", kind=ModelError)
    assert message.startswith("actor.model.path=") and "no such directory" in message
    message = refusal("ppo", f"actor.init_from={tmp_path}/none", kind=ModelError)
    assert message.startswith("actor.init_from=")
    (model / "config.json").write_text("{")
    refusal("sft", f"model.path={model}", kind=ModelError)


def test_the_reference_shares_the_vocabulary(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((model / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 1024}))
    message = refusal("ppo", f"model.path={model}", f"reference.init_from={other}")
    assert "actor.model.path has 512, reference.init_from has 1024" in message
    message = refusal("evaluate", "data.max_prompt_length=128", f"evaluation.checkpoints={{a: {model}, b: {other}}}")
    assert "evaluation.checkpoints.a has 512, evaluation.checkpoints.b has 1024" in message


def test_a_run_directory_brings_its_architecture(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step_00000001").mkdir(parents=True)
    model.rename(run / "model")
    for source in (run, run / "checkpoints" / "step_00000001"):
        message = refusal("ppo", f"actor.init_from={source}", "data.max_prompt_length=500")
        assert "context of actor's model, 512 tokens" in message


def test_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert looks_like_hub_id("meta-llama/Llama-3.1-8B")
    assert not any(map(looks_like_hub_id, ("./models/x", "/models/x", "runs/missing", "a/b/c", "plain", "../a")))


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]

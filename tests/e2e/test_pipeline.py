"""All commands one after the other on a tiny model, on one rank and through the real command line on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from aligner.cli.main import main
from aligner.rollout.batch import RolloutBatch
from tests.chat_tokenizers import KINDS, write_tokenizer
from tests.distributed.spawn import RankError, run_ranks
from tests.e2e.pipeline import metrics, overrides, run_command, write_chat_model, write_data

PPO_METRICS = {
    "train_rollouts": [
        "rewards_mean",
        "rewards_with_kl_mean",
        "init_policy_kl",
        "init_policy_kl_k3",
        "kl_coef",
        "entropy",
        "response_length_mean",
        "response_length_min",
        "response_length_max",
        "truncation_rate",
        "eos_rate",
        "advantages_mean",
        "advantages_std",
        "returns_mean",
        "returns_std",
        "explained_variance",
        "engine_logprob_diff_mean",
    ],
    "train_optim": [
        "ppo_ratio",
        "clip_fraction",
        "approx_kl",
        "entropy",
        "critic_loss",
        "actor_grad_norm",
        "critic_grad_norm",
        "actor_lr",
        "critic_lr",
    ],
    "throughput": ["tokens_per_second", "rollout_tokens_per_second"],
    "timers": ["rollout", "reward", "logprobs", "values", "train_critic", "train_policy", "step"],
    "memory": ["peak_gib"],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``model`` and ``data``, and the runs ``sft``, ``rm`` (from sft) and ``ppo`` (from both)."""
    base = tmp_path_factory.mktemp("pipeline")
    model, data = write_chat_model(base / "model"), write_data(base / "data")

    def run(command: str, *more: str) -> None:
        run_ranks(1, run_command, command, overrides(command, base / command, model, data, *more))

    run("sft", "trainer.max_steps=3", "trainer.val_check_interval=2")
    run("rm", "trainer.max_steps=2", f"reward.init_from={base}/sft")
    run("ppo", "trainer.max_steps=2", "trainer.val_check_interval=1", *ppo_sources(base))
    return base


def ppo_sources(base: Path) -> list[str]:
    return [f"actor.init_from={base}/sft", f"reward.init_from={base}/rm"]


def test_every_promised_metric_is_logged(base: Path) -> None:
    rows = [json.loads(line) for line in (base / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        missing = [
            f"{group}/{name}" for group in PPO_METRICS for name in PPO_METRICS[group] if f"{group}/{name}" not in row
        ]
        assert not missing
        assert "val_rollouts/rewards_mean" in row
        assert row["consumed_samples"] == 4 * row["step"]
        # of the policy that the first update starts from: training sees the same distributions
        assert 0.0 < row["train_rollouts/entropy"] == pytest.approx(row["train_optim/entropy"], rel=0.05)
    assert list((base / "ppo" / "tensorboard").iterdir())
    assert (base / "ppo" / "samples" / "step_00000002.jsonl").is_file()
    validation = [row for row in metrics(base / "sft") if "val/loss" in row]
    assert [row["step"] for row in validation] == [2, 3]


def test_training_lowers_the_loss_and_the_reward_model_learns(base: Path) -> None:
    losses = [row["val/loss"] for row in metrics(base / "sft") if "val/loss" in row]
    assert losses[-1] < losses[0]
    state = json.loads((base / "rm" / "checkpoints" / "step_00000002" / "state.json").read_text())
    last = metrics(base / "rm")[-1]
    assert state["reward_statistics"]["mean"] == last["val/reward_mean"]
    assert state["reward_statistics"]["count"] == 24


def test_generate_pairs_evaluate_convert_and_report(base: Path) -> None:
    words = overrides("evaluate", base / "generate", base / "model", base / "data")
    words = [word for word in words if "pack_length" not in word]
    samples = base / "samples.jsonl"
    run_ranks(
        1, run_command, "generate", [*words, f"actor.init_from={base}/ppo", f"output={samples}", "samples_per_prompt=3"]
    )
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(rows) == 30 and {row["sample"] for row in rows} == {0, 1, 2} and rows[0]["domain"] == "d"
    assert main(["pairs", str(samples), str(base / "made.jsonl"), "--min-margin", "0.001"]) == 0
    pairs = [json.loads(line) for line in (base / "made.jsonl").read_text().splitlines()]
    assert all(pair["chosen_score"] > pair["rejected_score"] for pair in pairs)

    checkpoints = [f"evaluation.checkpoints.{name}={base}/{name}" for name in ("model", "sft", "ppo")]
    words = overrides("evaluate", base / "evaluation", base / "model", base / "data", *checkpoints)
    run_ranks(1, run_command, "evaluate", [*words, f"reward.init_from={base}/rm", "evaluation.baseline=sft"])
    results = json.loads((base / "evaluation" / "results.json").read_text())["rows"]
    assert results["model"]["kl_to_model"] == 0.0 and results["ppo"]["kl_to_model"] > 0.0
    assert results["sft"]["win_rate_vs_sft"] == 0.5 and "rule_score_mean" in results["ppo"]

    assert main(["convert", str(base / "ppo"), str(base / "exported")]) == 0
    assert main(["convert", str(base / "ppo"), str(base / "exported")]) == 2  # never overwrites
    exported, first = (load_file(base / name / "model.safetensors") for name in ("exported", "model"))
    assert exported.keys() == first.keys()
    assert any((exported[name] != first[name]).any() for name in first)
    assert main(["report", str(base / "ppo")]) == 0
    page = (base / "ppo" / "report.html").read_text()
    for words in (["report", str(base / "ppo"), "--output"], ["convert", str(base / "ppo")], ["pairs", str(samples)]):
        assert main([*words, str(samples / "below-a-file")]) in (2, 5)  # one line, not a bug
    assert "rewards_mean" in page and "http://" not in page.replace("http://www.w3.org", "")


def test_the_command_line_on_two_ranks_and_critic_from_the_policy(base: Path) -> None:
    words = overrides("ppo", base / "cli", base / "model", base / "data", *ppo_sources(base))
    words += ["trainer.devices=2", "actor.parallel.pipeline_model_parallel_size=2", "trainer.max_steps=1"]
    command = [sys.executable, "-m", "aligner", "ppo", *words, "critic.init_from=actor"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert (base / "cli" / "checkpoints" / "step_00000001" / "manifest.json").is_file()


def test_a_reward_function_and_masked_truncation(base: Path, tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text("def length(requests):\n    return [float(r.num_tokens) for r in requests]\n")
    words = overrides(
        "ppo", tmp_path / "run", base / "model", base / "data", f"reward.function={tmp_path}/score.py:length"
    )
    words += ["critic.init_from=actor", "ppo.truncation=mask", "trainer.max_steps=1", "ppo.samples_per_prompt=2"]
    run_ranks(1, run_command, "ppo", words)
    row = metrics(tmp_path / "run")[0]
    assert row["train_rollouts/rewards_mean"] == row["train_rollouts/response_length_mean"]


def test_a_diverged_critic_stops_all_ranks_and_leaves_the_steps_data(base: Path, tmp_path: Path) -> None:
    words = overrides("ppo", tmp_path / "run", base / "model", base / "data", *ppo_sources(base))
    words += ["critic.optimizer.lr=1e30", "critic.optimizer.schedule=constant", "trainer.max_steps=3"]
    with pytest.raises(RankError, match="TrainingError") as caught:
        run_ranks(2, run_command, "ppo", words)
    assert "the step's data is kept in" in str(caught.value)
    (step,) = (tmp_path / "run" / "errors").iterdir()
    batch = RolloutBatch.load(step / "rank_0")
    assert len(batch) == 4 and batch.scores_B is not None


def test_a_critic_with_another_tokenizer_is_refused(base: Path, tmp_path: Path) -> None:
    other = write_tokenizer(write_chat_model(tmp_path / "other"), *KINDS["llama3"])
    words = overrides("ppo", tmp_path / "run", base / "model", base / "data", *ppo_sources(base))
    with pytest.raises(RankError, match="same tokenizer"):
        run_ranks(1, run_command, "ppo", [*words, f"critic.init_from={other}", "trainer.max_steps=1"])


def test_a_reward_model_without_a_head_is_refused(base: Path, tmp_path: Path) -> None:
    words = overrides("ppo", tmp_path / "run", base / "model", base / "data", f"reward.init_from={base}/model")
    with pytest.raises(RankError, match="would score at random"):
        run_ranks(1, run_command, "ppo", [*words, "reward.standardize=false", "trainer.max_steps=1"])


def test_an_exported_reward_model_scores_like_its_run(base: Path, tmp_path: Path) -> None:
    """And a critic given by path absorbs the run's standardisation, as one that starts from ``reward`` does."""
    assert main(["convert", str(base / "rm"), str(tmp_path / "exported")]) == 0
    assert "score.weight" in load_file(tmp_path / "exported" / "model.safetensors")
    common = ["trainer.max_steps=1", f"actor.init_from={base}/sft"]

    def first_row(name: str, *words: str) -> dict[str, float]:
        words = (*overrides("ppo", tmp_path / name, base / "model", base / "data", *common), *words)
        run_ranks(1, run_command, "ppo", words)
        return metrics(tmp_path / name)[0]

    run = first_row("run", f"reward.init_from={base}/rm")
    path = first_row("path", f"reward.init_from={base}/rm", f"critic.init_from={base}/rm")
    assert run == path
    exported = first_row("hf", f"reward.init_from={tmp_path}/exported", "reward.standardize=false")
    raw = run["train_rollouts/reward_unstandardized"]
    assert exported["train_rollouts/rewards_mean"] == pytest.approx(raw, abs=1e-5)


def test_a_resumed_run_keeps_the_sources_of_its_first_life(base: Path, tmp_path: Path) -> None:
    words = overrides("ppo", tmp_path / "run", base / "model", base / "data", *ppo_sources(base))
    run_ranks(1, run_command, "ppo", [*words, "trainer.max_steps=1"])
    sources = json.loads((tmp_path / "run" / "sources.json").read_text())
    assert sources["reference"]["path"] == str(base / "sft" / "checkpoints" / "step_00000003")
    assert sources["critic"]["path"] == sources["reward"]["path"] == str(base / "rm" / "checkpoints" / "step_00000002")
    with pytest.raises(RankError, match="began with reference from"):
        run_ranks(1, run_command, "ppo", [*words, "trainer.max_steps=2", f"reference.init_from={base}/model"])


def test_the_runs_own_config_is_kept_beside_a_tokenizer_from_elsewhere(base: Path, tmp_path: Path) -> None:
    other = write_chat_model(tmp_path / "other", num_hidden_layers=1)
    words = overrides("sft", tmp_path / "run", base / "model", base / "data", f"model.tokenizer={other}")
    run_ranks(1, run_command, "sft", [*words, "trainer.max_steps=1"])
    kept = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert kept["num_hidden_layers"] == 2

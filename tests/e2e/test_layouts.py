"""One step of every method gives the same parameters for every layout (fp32)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.spawn import run_ranks
from tests.e2e.pipeline import checkpoint_tensors, metrics, overrides, run_command, write_chat_model, write_data

TENSOR = "actor.parallel.tensor_model_parallel_size"
PIPELINE = "actor.parallel.pipeline_model_parallel_size"
LAYOUTS = {
    "tp2": (2, [f"{TENSOR}=2"]),
    "tp2_sp": (2, [f"{TENSOR}=2", "actor.parallel.sequence_parallel=true"]),
    "pp2": (2, [f"{PIPELINE}=2"]),
    "dp2": (2, []),
    "critic_dp2": (2, [f"{TENSOR}=2", "critic.parallel.tensor_model_parallel_size=1"]),
}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A PPO run of one step on one rank, and what it started from."""
    base = tmp_path_factory.mktemp("layouts")
    paths = {"model": write_chat_model(base / "model"), "data": write_data(base / "data"), "rm": base / "rm"}
    run_ranks(1, run_command, "rm", overrides("rm", paths["rm"], paths["model"], paths["data"], "trainer.max_steps=2"))
    paths["ppo"] = base / "ppo"
    run_ranks(1, run_command, "ppo", ppo_words(paths, paths["ppo"]))
    return paths


def ppo_words(paths: dict[str, Path], run_dir: Path, *more: str) -> list[str]:
    rates = [
        f"{role}.optimizer.lr=1e-4" for role in ("actor", "critic")
    ]  # a first Adam step moves a weight by about lr
    words = [f"reward.init_from={paths['rm']}", "trainer.max_steps=1", *rates, *more]
    return overrides("ppo", run_dir, paths["model"], paths["data"], *words)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_ppo_step_gives_the_same_parameters(layout: str, single: dict[str, Path], tmp_path: Path) -> None:
    ranks, extra = LAYOUTS[layout]
    run_ranks(ranks, run_command, "ppo", ppo_words(single, tmp_path / "run", *extra))
    expected = checkpoint_tensors(single["ppo"] / "checkpoints/step_00000001")
    found = checkpoint_tensors(tmp_path / "run/checkpoints/step_00000001")
    weights = [name for name in expected if ".optimizer." not in name and "exp_avg" not in name]
    assert len(weights) >= 16
    for name in weights:
        difference = (expected[name].float() - found[name].float()).abs().max()
        assert difference < 1e-5, (name, difference)
    moments = [tensor for name, tensor in found.items() if name.startswith("actor") and "exp_avg" in name]
    assert moments and any(moment.abs().max() > 0 for moment in moments)  # it did take a step
    one, other = metrics(single["ppo"])[0], metrics(tmp_path / "run")[0]
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert other[key] == pytest.approx(value, rel=2e-3, abs=2e-4), key

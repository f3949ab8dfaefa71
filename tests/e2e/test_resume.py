"""N steps straight equal k steps + restart + N-k steps, bit for bit, in new processes: sft, rm and ppo.

The first life goes on after its checkpoint at step k and is lost there, as when a machine dies.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch

from tests.distributed.spawn import run_ranks
from tests.e2e.pipeline import checkpoint_tensors, metrics, overrides, run_command, write_chat_model, write_data

STEPS, LOST_AT, SAVED_AT = 5, 4, 2  # 5 steps of 4 samples cross the end of an epoch of 12 (sft, rm) and of 10 (ppo)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Model, data, and the reward model's run."""
    base = tmp_path_factory.mktemp("resume")
    model, data = write_chat_model(base / "model"), write_data(base / "data")
    run_ranks(1, run_command, "rm", overrides("rm", base / "rm", model, data, "trainer.max_steps=2"))
    return model, data, base / "rm"


CASES = {
    "sft": ("sft", 1, ["actor.optimizer.decay_steps=5"]),
    "sft_dropout_bf16": (
        "sft",
        1,
        [
            "actor.optimizer.decay_steps=5",
            "model.hidden_dropout=0.1",
            "model.attention_dropout=0.1",
            "model.dtype=bfloat16",
        ],
    ),
    "sft_dropout_dp2": (
        "sft",
        2,
        ["actor.optimizer.decay_steps=5", "model.hidden_dropout=0.1", "model.attention_dropout=0.1"],
    ),
    "rm_dp2": ("rm", 2, ["reward.optimizer.decay_steps=5"]),
    "rm_dropout_bf16": (
        "rm",
        1,
        ["reward.optimizer.decay_steps=5", "model.hidden_dropout=0.1", "model.dtype=bfloat16"],
    ),
    "ppo_warmup_adaptive": (
        "ppo",
        1,
        [
            "actor.optimizer.decay_steps=10",
            "critic.optimizer.decay_steps=10",
            "ppo.critic_warmup_steps=3",
            "ppo.kl.controller=adaptive",
            "ppo.kl.target=0.1",
            "ppo.kl.horizon=20",
        ],
    ),
    "ppo_bf16": (
        "ppo",
        1,
        ["actor.optimizer.decay_steps=10", "critic.optimizer.decay_steps=10", "model.dtype=bfloat16"],
    ),
    "ppo_dp2": ("ppo", 2, ["actor.optimizer.decay_steps=10", "critic.optimizer.decay_steps=10"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_restarted_run_equals_an_uninterrupted_one(name: str, files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    command, ranks, extra = CASES[name]
    model, data, reward = files
    extra = [*extra, "trainer.val_check_interval=2"]
    if command == "ppo":
        extra.append(f"reward.init_from={reward}")

    def run(run_dir: Path, steps: int) -> None:
        words = overrides(command, run_dir, model, data, *extra, f"trainer.max_steps={steps}")
        run_ranks(ranks, run_command, command, words)

    run(tmp_path / "straight", STEPS)
    extra.append(f"trainer.save_interval={SAVED_AT}")
    run(tmp_path / "restarted", LOST_AT)
    shutil.rmtree(tmp_path / f"restarted/checkpoints/step_{LOST_AT:08d}")
    run(tmp_path / "restarted", STEPS)

    straight, restarted = metrics(tmp_path / "straight"), metrics(tmp_path / "restarted")
    assert [row["step"] for row in restarted] == list(range(1, STEPS + 1))
    for one, other in zip(straight, restarted, strict=True):
        shared = one.keys() & other.keys()
        assert len(shared) >= 5
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in one.values())
        assert {key: one[key] for key in shared} == {key: other[key] for key in shared}
    assert straight[-1].keys() == restarted[-1].keys()
    last = f"checkpoints/step_{STEPS:08d}"
    tensors = checkpoint_tensors(tmp_path / "straight" / last)
    others = checkpoint_tensors(tmp_path / "restarted" / last)
    assert tensors.keys() == others.keys()
    assert any("exp_avg" in tensor for tensor in tensors)
    for key, tensor in tensors.items():
        assert torch.equal(tensor, others[key]), key


def test_a_longer_run_keeps_its_learning_rate_schedule(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """``max_steps`` may grow: steps after the saved horizon stay at ``min_lr``, those before it do not change."""
    model, data, _ = files
    for steps in (2, 4):
        words = overrides("sft", tmp_path / "run", model, data, f"trainer.max_steps={steps}")
        run_ranks(1, run_command, "sft", words)
    rates = [row["train/lr"] for row in metrics(tmp_path / "run")]
    assert rates[0] == pytest.approx(1e-3) and 0 < rates[1] < rates[0] and rates[2:] == [0.0, 0.0]

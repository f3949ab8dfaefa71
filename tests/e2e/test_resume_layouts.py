"""A run continued at another layout, twice, is the run at one layout: metrics, samples, weights, optimizer (fp32)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.spawn import run_ranks
from tests.e2e.pipeline import checkpoint_tensors, metrics, overrides, run_command, write_chat_model, write_data

STEPS = 6  # of 4 samples: past the end of two epochs of 12 rows (sft) and of 10 prompts (ppo)
TENSOR = "actor.parallel.tensor_model_parallel_size"
PIPELINE = "actor.parallel.pipeline_model_parallel_size"
LIVES: list[tuple[int, int, list[str]]] = [  # last step, ranks, layout as TP x PP x DP
    (2, 4, [f"{TENSOR}=2"]),  # 2 x 1 x 2
    (4, 2, [f"{PIPELINE}=2"]),  # 1 x 2 x 1
    (6, 1, []),  # 1 x 1 x 1
]
TOLERANCE = 1e-5


def run_recorded(command: str, words: Sequence[str], record: str) -> None:
    """``run_command``; the first rank adds the row numbers of each batch to ``record``."""
    import torch.distributed as dist

    from aligner.data.loader import ShardedOrder

    draw = ShardedOrder.next_batch

    def next_batch(self: ShardedOrder) -> list[int]:
        rows = draw(self)
        if dist.get_rank() == 0:
            with Path(record).open("a") as file:
                file.write(json.dumps(rows) + "\n")
        return rows

    ShardedOrder.next_batch = next_batch  # type: ignore[method-assign]
    run_command(command, words)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Model, data, and the reward model's run."""
    base = tmp_path_factory.mktemp("resume_layouts")
    model, data = write_chat_model(base / "model"), write_data(base / "data")
    run_ranks(1, run_command, "rm", overrides("rm", base / "rm", model, data, "trainer.max_steps=2"))
    return model, data, base / "rm"


@pytest.mark.parametrize("command", ["sft", "ppo"])
def test_a_run_goes_on_at_other_layouts(command: str, files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    model, data, reward = files
    extra = ["actor.optimizer.lr=1e-4", "actor.optimizer.decay_steps=12", "trainer.val_check_interval=2"]
    if command == "ppo":
        extra += [f"reward.init_from={reward}", "critic.optimizer.lr=1e-4", "critic.optimizer.decay_steps=12"]

    def run(name: str, steps: int, ranks: int, layout: list[str]) -> None:
        words = overrides(command, tmp_path / name, model, data, *extra, *layout, f"trainer.max_steps={steps}")
        run_ranks(ranks, run_recorded, command, words, str(tmp_path / f"{name}.rows"))

    run("straight", STEPS, 1, [])
    for steps, ranks, layout in LIVES:
        run("moved", steps, ranks, layout)

    straight, moved = metrics(tmp_path / "straight"), metrics(tmp_path / "moved")
    assert [row["step"] for row in moved] == list(range(1, STEPS + 1))
    for one, other in zip(straight, moved, strict=True):
        assert one.keys() <= other.keys() | {key for key in one if key.startswith("val/")}
        for key in one.keys() & other.keys():
            assert other[key] == pytest.approx(one[key], rel=TOLERANCE, abs=TOLERANCE), (one["step"], key)
    assert rows_of(tmp_path / "moved.rows") == rows_of(tmp_path / "straight.rows")
    assert_same_tensors(tmp_path / "straight", tmp_path / "moved")


def rows_of(record: Path) -> list[list[int]]:
    """The batches, none of them twice or left out."""
    batches = [json.loads(line) for line in record.read_text().splitlines()]
    assert len(batches) == STEPS and all(len(batch) == 4 for batch in batches)
    return batches


def assert_same_tensors(straight: Path, moved: Path) -> None:
    last = f"checkpoints/step_{STEPS:08d}"
    expected, found = checkpoint_tensors(straight / last), checkpoint_tensors(moved / last)
    assert expected.keys() == found.keys()
    compared: dict[str, Any] = {}
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            compared[name] = float((tensor.float() - found[name].float()).abs().max())
    assert max(compared.values()) < TOLERANCE, max(compared.items(), key=lambda item: item[1])
    assert any("exp_avg_sq" in name for name in compared)

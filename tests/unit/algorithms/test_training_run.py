"""Finishing steps on two ranks: what is logged, in which order, and what happens when a disk is full."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aligner.algorithms.micro_batches import count_tokens
from aligner.algorithms.run import TrainingRun
from aligner.checkpoint.checkpointer import SaveReport
from aligner.config.schema import CheckpointConfig, ResumableRunConfig, TrainerConfig
from aligner.data.packing import build_pack
from aligner.distributed.context import RunContext
from aligner.distributed.platform import current
from aligner.distributed.topology import Degrees, build_topology
from aligner.errors import TrainingError
from aligner.monitoring.logger import read_metrics
from aligner.monitoring.writing import write_on_first_rank
from tests.distributed.spawn import run_ranks

SAVING_S = 0.1


def open_run(run_dir: Path, steps: int = 3) -> TrainingRun:
    import torch.distributed as dist

    context = RunContext(run_dir, dist.get_rank(), dist.get_world_size(), current())
    root = SimpleNamespace(
        trainer=TrainerConfig(max_steps=steps, save_interval=1), checkpoint=CheckpointConfig(), run=ResumableRunConfig()
    )
    return TrainingRun("test", root, context, {}, {})


def finish_steps(run_dir: Path) -> list[int]:
    """Three steps, the newest logged step at each save."""
    logged_at_save = []
    with open_run(run_dir) as training:

        def slow_save(step: int, *state: Any, **options: Any) -> SaveReport:
            logged_at_save.append(read_metrics(run_dir / "metrics.jsonl")[-1]["step"])
            time.sleep(SAVING_S)
            return SaveReport(step, run_dir / "checkpoints", SAVING_S, SAVING_S, 0, None)

        training._saver.checkpointer.save = slow_save  # type: ignore[method-assign]
        for step in training.steps():
            with training.timers("train"):
                time.sleep(0.02)
            training.finish_step(step, {"train/loss": 1.0}, samples=4, tokens=100, tokens_in="train")
        assert (training.counters.samples, training.counters.tokens) == (12, 300)
    return logged_at_save


def test_a_step_is_logged_before_it_is_saved(tmp_path: Path) -> None:
    for logged_at_save in run_ranks(2, finish_steps, tmp_path):
        assert logged_at_save == [1, 2, 3]
    first, second, third = read_metrics(tmp_path / "metrics.jsonl")
    assert "timers/checkpoint" not in first
    for row in (second, third):  # the save of the step before, in both numbers
        assert row["timers/step"] > row["timers/checkpoint"] > SAVING_S
    assert [row["consumed_samples"] for row in (first, second, third)] == [4, 8, 12]
    for row in (first, second, third):
        assert row["throughput/tokens_per_second"] == pytest.approx(100 / row["timers/train"])
        assert row["memory/peak_gib"] > 0 and "memory/device_peak_gib" not in row  # a CPU


def outcome(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def full_disks(directory: Path) -> dict[str, str]:
    """What each rank meets where rank 0 alone cannot write."""
    found = {}
    with open_run(directory / "run") as training:
        if training.context.rank == 0:
            training.logger._file = Path("/dev/full").open("a")  # noqa: SIM115
        found["log"] = outcome(lambda: training.finish_step(1, {}, samples=1, tokens=1))
        training.logger._file = training.logger._writer = None
    (directory / "file").touch()
    found["open"] = outcome(lambda: open_run(directory / "file"))
    path = directory / "file" / "samples.jsonl"
    found["write"] = outcome(lambda: write_on_first_rank(path, lambda: path.parent.mkdir(parents=True)))
    found["no error"] = outcome(lambda: write_on_first_rank(directory / "new", (directory / "new").touch))
    found["other error"] = outcome(lambda: write_on_first_rank(path, lambda: [].pop()))
    return found


def test_what_the_first_rank_cannot_write_stops_all_ranks_with_one_error(tmp_path: Path) -> None:
    first, second = run_ranks(2, full_disks, tmp_path)
    for place, path in (("log", "run/metrics.jsonl"), ("write", "file/samples.jsonl")):
        assert first[place].startswith(f"CheckpointError: {tmp_path / path} cannot be written (")
        assert "then start the command again" in first[place]
        assert second[place].startswith("RankFailure: rank 0 failed, so this rank stops too: CheckpointError")
    assert "No space left on device" in first["log"]
    assert first["open"].startswith("CheckpointError: ") and second["open"].startswith("RankFailure: ")
    assert first["no error"] == second["no error"] == "went on" and (tmp_path / "new").exists()
    assert first["other error"].startswith("IndexError")  # a bug stays one


def diverge(run_dir: Path, writable: bool) -> str:
    def save(directory: Path) -> None:
        if not writable:
            raise OSError(28, "No space left on device")
        directory.mkdir(parents=True)

    with open_run(run_dir) as training, pytest.raises(TrainingError) as caught, training.dump_on_failure(2, save):
        raise TrainingError("the loss is nan")
    return str(caught.value)


@pytest.mark.parametrize("writable", [True, False])
def test_a_full_disk_does_not_hide_why_training_stops(writable: bool, tmp_path: Path) -> None:
    (message,) = run_ranks(1, diverge, tmp_path, writable)
    assert message.startswith("step 2: the loss is nan; the step's data ")
    expected = "is kept in" if writable else "could not be kept in"
    assert f"{expected} {tmp_path}/errors/step_00000002" in message
    assert (tmp_path / "errors" / "step_00000002" / "rank_0").is_dir() == writable


def counted() -> int:
    import torch.distributed as dist

    topology = build_topology(Degrees())
    sequences = [torch.arange(5), torch.arange(2 + dist.get_rank())]
    return count_tokens([build_pack(sequences, [0], 8), build_pack(sequences, [1])], topology)


def test_tokens_are_counted_over_data_parallel_ranks_without_padding() -> None:
    assert run_ranks(2, counted) == [15, 15]  # 5 + 2 and 5 + 3

"""metrics.jsonl and TensorBoard: one line a step, strict JSON, clean after a resume, rank 0 alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from aligner.errors import CheckpointError
from aligner.monitoring.logger import METRICS_FILE, MetricsLogger, read_metrics
from aligner.monitoring.numbers import decode_tree, encode_tree
from aligner.monitoring.samples import read_samples, step_samples_path, write_samples


def no_constants(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def write_steps(run_dir: Path, steps: range, value: float = 1.0, resumed_step: int | None = None) -> None:
    with MetricsLogger(run_dir, rank=0, resumed_step=resumed_step) as logger:
        for step in steps:
            logger.log(step, {"train/loss": value * step})


def tensorboard_scalars(run_dir: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("train/loss")]


def test_one_strict_json_object_a_step_with_non_finite_values_as_strings(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, rank=0) as logger:
        logger.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 2, "e": torch.tensor(1.5)})  # type: ignore[dict-item]
    (line,) = (tmp_path / METRICS_FILE).read_text().splitlines()
    row = json.loads(line, parse_constant=no_constants)
    assert row["step"] == 1 and row["time"] > 1e9
    assert (row["a"], row["b"], row["c"], row["d"], row["e"]) == ("NaN", "Infinity", "-Infinity", 2, 1.5)
    (read,) = read_metrics(tmp_path / METRICS_FILE)
    assert math.isnan(read["a"]) and read["b"] == math.inf and read["c"] == -math.inf


def test_lines_are_on_disk_at_once(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, rank=0) as logger:
        logger.log(0, {"train/loss": 1.0})
        assert len(read_metrics(tmp_path / METRICS_FILE)) == 1


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with MetricsLogger(run_dir, rank=1) as logger:
        logger.log(1, {"train/loss": 1.0})
    assert not run_dir.exists()


def test_steps_must_increase(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, rank=0) as logger:
        logger.log(2, {"train/loss": 1.0})
        with pytest.raises(ValueError, match="step 2 logged after step 2"):
            logger.log(2, {"train/loss": 1.0})


def test_a_resumed_run_drops_what_lies_beyond_its_checkpoint(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 6))
    for step in (2, 4):
        write_samples(step_samples_path(tmp_path, step), [{"prompt": "p", "response": "r", "step": step}])
    write_steps(tmp_path, range(4, 7), value=10.0, resumed_step=3)
    rows = read_metrics(tmp_path / METRICS_FILE)
    assert [(row["step"], row["train/loss"]) for row in rows] == [
        (1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 60.0)
    ]  # fmt: skip
    assert tensorboard_scalars(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 60.0)]
    assert [path.name for path in sorted((tmp_path / "samples").iterdir())] == ["step_00000002.jsonl"]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_run_without_checkpoint_starts_anew(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4))
    write_steps(tmp_path, range(1, 2), value=7.0)
    assert [row["train/loss"] for row in read_metrics(tmp_path / METRICS_FILE)] == [7.0]
    assert tensorboard_scalars(tmp_path) == [(1, 7.0)]


def test_a_torn_last_line_is_left_out_and_gone_after_a_resume(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4))
    path = tmp_path / METRICS_FILE
    path.write_bytes(path.read_bytes() + '{"step": 4, "train/loss": "é'.encode()[:-1])
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    write_steps(tmp_path, range(4, 5), resumed_step=3)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("line", ['{"step": 1,', "[1]", '{"train/loss": 1.0}'])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / METRICS_FILE
    path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl:2: "):
        read_metrics(path)


def test_samples_round_trip(tmp_path: Path) -> None:
    rows = [{"prompt": "é\n\u2028", "response": "", "step": 0, "reward": math.inf, "tokens": 3}]
    path = step_samples_path(tmp_path, 0)
    write_samples(path, rows)
    assert read_samples(path) == rows
    path.write_text('{"prompt": "p"}\n')
    with pytest.raises(CheckpointError, match=r"step_00000000\.jsonl:1: field 'response' must be a string"):
        read_samples(path)


def test_trees_round_trip() -> None:
    tree = {"a": [1, -math.inf, {"b": True, "c": None}], "d": "text"}
    assert decode_tree(json.loads(json.dumps(encode_tree(tree), allow_nan=False))) == tree

"""Which checkpoints stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aligner.checkpoint import manifest
from aligner.checkpoint.deletion import apply_retention, best_so_far, remove
from aligner.checkpoint.pins import pin
from aligner.checkpoint.retention import Retention, best_of, to_delete
from tests.checkpoint.fake import fake_checkpoint, wait_for_deletions

STEPS = range(1, 11)


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "best", "protected", "kept"),
    [
        (None, 0, None, [], [*STEPS]),
        (3, 0, None, [], [8, 9, 10]),
        (1, 4, None, [], [4, 8, 10]),
        (1, None, 2, [], [2, 10]),
        (2, 5, 3, [1, 7], [1, 3, 5, 7, 9, 10]),
        (0, 0, None, [], [10]),  # the newest always stays
        (1, 0, 99, [88], [10]),  # protected steps that are not there
        (20, 0, None, [], [*STEPS]),
    ],
)
def test_what_may_go(
    keep_last: int | None, keep_every: int | None, best: int | None, protected: list[int], kept: list[int]
) -> None:
    gone = to_delete(list(STEPS)[::-1], keep_last, keep_every, best, protected)
    assert gone == [step for step in STEPS if step not in kept]


def test_nothing_is_deleted_of_nothing_and_the_only_one_stays() -> None:
    assert to_delete([], 1, 0, None, []) == []
    assert to_delete([7], 1, 0, None, []) == []


@pytest.mark.parametrize(
    ("metrics", "mode", "step"),
    [
        ({1: 0.5, 2: 0.75, 3: 0.5}, "max", 2),
        ({1: 0.5, 2: 0.75, 3: 0.5}, "min", 1),  # of equal ones the first
        ({1: float("nan"), 2: float("inf"), 3: 0.25}, "max", 3),
        ({1: None, 2: -1.0}, "max", 2),
        ({1: None}, "max", None),
    ],
)
def test_the_best(metrics: dict[int, Any], mode: str, step: int | None) -> None:
    rows = {number: {} if value is None else {"val/loss": value} for number, value in metrics.items()}
    best = best_of(rows, Retention(1, 0, "val/loss", mode))
    assert best == (
        None if step is None else {"metric": "val/loss", "mode": mode, "step": step, "value": metrics[step]}
    )
    assert best_of(rows, Retention(1)) is None


def _steps(directory: Path) -> list[int]:
    return [manifest.parse(path).step for path in manifest.published(directory)]


def test_a_directory_is_thinned(tmp_path: Path) -> None:
    directory, run = tmp_path / "checkpoints", tmp_path / "run"
    run.mkdir()
    paths = {step: fake_checkpoint(directory, step, metrics={"reward": float(-abs(step - 4))}) for step in range(1, 10)}
    (paths[2] / "state.json").unlink()  # damaged: neither counted nor deleted
    (paths[9] / "actor" / ".metadata").write_bytes(b"")
    pin(paths[3], by=str(run))
    retention = Retention(keep_last=2, keep_every=5, best_metric="reward")
    assert best_so_far(directory, retention, 10, {"reward": 1.0}) == {
        "metric": "reward",
        "mode": "max",
        "step": 10,
        "value": 1.0,
    }
    apply_retention(directory, retention, protected={6})
    #      damaged 2 9, pinned 3, best 4, every 5, protected 6, last 7 8
    assert sorted(int(path.name[5:]) for path in directory.glob("step_*")) == [2, 3, 4, 5, 6, 7, 8, 9]
    apply_retention(directory, Retention(keep_last=1), protected=())
    assert _steps(directory) == [2, 3, 8, 9]
    run.rmdir()  # the pin holds while its run exists
    apply_retention(directory, Retention(keep_last=1), protected=())
    assert _steps(directory) == [2, 8, 9]
    wait_for_deletions()
    assert not list(directory.glob(".tmp-*"))


def test_one_that_is_pinned_while_it_is_deleted_stays(tmp_path: Path) -> None:
    paths = [fake_checkpoint(tmp_path, step) for step in (1, 2)]
    with pin(paths[0], by="an evaluation", heartbeat=True):
        assert not remove(tmp_path, 1)
        assert _steps(tmp_path) == [1, 2]
    assert remove(tmp_path, 1)
    assert _steps(tmp_path) == [2]


def test_what_cannot_be_deleted_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        fake_checkpoint(tmp_path, step)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.rename", refuse)
    apply_retention(tmp_path, Retention(keep_last=1), protected=())
    assert "step_00000001 cannot be deleted" in capsys.readouterr().out
    assert _steps(tmp_path) == [1, 2]

"""Saves that cannot be written are reported to all ranks, end nothing, and leave what was there before."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aligner.checkpoint import manifest
from aligner.checkpoint.async_write import HeldTensors, Staging
from aligner.checkpoint.checkpointer import Checkpointer, SaveReport
from aligner.distributed import faults, platform
from aligner.distributed.collectives import all_gather_objects, barrier
from aligner.errors import CheckpointError
from aligner.models.role_model import RoleModel
from tests.checkpoint.small import ONE, Counter, all_bytes, fill, small_model, start, states, take_step
from tests.distributed.spawn import RankError, run_ranks


def _begin(directory: str, is_async: bool) -> tuple[Checkpointer, dict[str, RoleModel]]:
    start(ONE)
    models = {"actor": small_model("actor", ONE)}
    fill(models["actor"], 3)
    return Checkpointer(Path(directory), async_save=is_async), models


def _report(checkpointer: Checkpointer, step: int, models: dict[str, RoleModel]) -> SaveReport:
    """Save and wait, as one that is asynchronous is told to the run; the report is the same on every rank."""
    report = checkpointer.save(step, models, states({"counter": Counter(step)}))
    report = report if report is not None else checkpointer.finish()
    assert report is not None and not checkpointer.in_flight
    errors = all_gather_objects((report.step, report.error, report.bytes))
    assert len(set(errors)) == 1, errors
    return report


def _names(checkpointer: Checkpointer) -> list[str]:
    barrier()
    found = sorted(path.name for path in checkpointer.directory.iterdir())
    barrier()
    return found


@contextmanager
def _fault(directory: str, spec: str) -> Iterator[None]:
    os.environ[faults.VARIABLE] = spec
    try:
        faults.configure(Path(directory), platform.rank())
        yield
    finally:
        del os.environ[faults.VARIABLE]
        faults.configure(Path(directory), platform.rank())


@contextmanager
def _small_files(rank: int, size: int) -> Iterator[None]:
    """On ``rank`` no file may be larger than ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if platform.rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _full_disks(directory: str, is_async: bool) -> None:
    checkpointer, models = _begin(directory, is_async)
    assert _report(checkpointer, 1, models).error is None
    expected, sound = all_bytes(models), ["latest", "step_00000001"]
    take_step(models["actor"], 1)
    for rank, size in ((1, 1000), (0, 10)):  # in the middle of the shards; in the first small file
        with _small_files(rank, size):
            report = _report(checkpointer, 2, models)
        assert report.error == f"rank {rank}: OSError: [Errno 27] File too large" and report.bytes == 0
        assert _names(checkpointer) == sound, "the unfinished files stayed"
    for place, rank, kind in (
        ("save", 0, "disk_full"),
        ("save", 1, "disk_full"),
        ("write", 1, "disk_full"),
        ("write", "*", "disk_full"),
        ("write", 1, "exception"),
        ("publish", 0, "disk_full"),
        ("publish", 0, "exception"),
    ):
        with _fault(directory, f"{place}:*:{rank}:{kind}"):
            report = _report(checkpointer, 2, models)
        wanted = "No space left on device" if kind == "disk_full" else "RuntimeError: injected fault"
        assert report.error is not None and wanted in report.error, (place, rank, kind)
        assert report.error.startswith(f"rank {0 if rank == '*' else rank}: ")
        assert _names(checkpointer) == sound, (place, rank, kind)
    newest = checkpointer.newest()
    assert newest is not None and newest.name == "step_00000001"
    assert checkpointer.load(newest, models, {"counter": Counter()}) == 1 and all_bytes(models) == expected
    assert _report(checkpointer, 2, models).error is None, "the next save works"
    assert _names(checkpointer) == [*sound, "step_00000002"]
    _no_place(Path(directory) / "other", models, is_async)


def _no_place(run: Path, models: dict[str, RoleModel], is_async: bool) -> None:
    if platform.rank() == 0:
        run.mkdir()
        (run / "checkpoints").write_text("in the way")
    barrier()
    report = _report(Checkpointer(run, async_save=is_async), 2, models)
    assert report.error is not None and "File exists" in report.error


@pytest.mark.parametrize("is_async", [False, True])
def test_full_disks(tmp_path: Path, is_async: bool) -> None:
    run_ranks(2, _full_disks, str(tmp_path), is_async)


def _not_savable(directory: str) -> None:
    checkpointer, models = _begin(directory, True)
    for state, identity, reason in (
        ({"bad": {"seen": {1: "key"}}}, {}, "state.bad.seen has the key 1"),
        ({"bad": {"seen": (1, 2)}}, {}, "state.bad.seen is a tuple"),
        ({"bad": {"rank": platform.rank()}}, {}, "differs between ranks"),
        ({}, {"command": Path("x")}, "identity.command is a PosixPath"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            checkpointer.save(1, models, state, identity=identity)
    assert checkpointer.newest() is None and not checkpointer.in_flight


def test_states_that_cannot_be_saved(tmp_path: Path) -> None:
    run_ranks(2, _not_savable, str(tmp_path))


def _no_memory(directory: str) -> None:
    """A rank that has no memory for copies writes its part at once, the other one in the background."""
    checkpointer, models = _begin(directory, True)
    if platform.rank() == 1:

        def no_room(self: Staging, tensors: object) -> HeldTensors:
            raise MemoryError("none left")

        Staging.hold = no_room  # type: ignore[method-assign,assignment]
    assert _report(checkpointer, 1, models).error is None
    newest = checkpointer.newest()
    assert newest is not None and newest.name == "step_00000001"


def test_no_memory_for_copies(tmp_path: Path) -> None:
    run_ranks(2, _no_memory, str(tmp_path))


# ------------------------------------------------------------------ killed


def _life_that_dies(directory: str, is_async: bool, spec: str) -> None:
    checkpointer, models = _begin(directory, is_async)
    assert checkpointer.newest() is None
    assert _report(checkpointer, 1, models).error is None
    take_step(models["actor"], 1)
    with _fault(directory, spec):
        _report(checkpointer, 2, models)


def _life_after(directory: str, is_async: bool) -> None:
    checkpointer, models = _begin(directory, is_async)
    if platform.rank() == 0:
        (checkpointer.directory / "step_00000009").mkdir()  # not a checkpoint
    barrier()
    before = _names(checkpointer)
    newest = checkpointer.newest()
    assert newest is not None and newest.name == "step_00000001" and _names(checkpointer) == before
    counter = Counter()
    assert checkpointer.load(newest, models, {"counter": counter}) == counter.seen == 1
    take_step(models["actor"], 1)
    expected = all_bytes(models)
    assert _report(checkpointer, 2, models).error is None
    assert _names(checkpointer) == ["latest", "step_00000001", "step_00000002", "step_00000009"], "leftovers stayed"
    fill(models["actor"], 88)
    found = checkpointer.newest()
    assert found is not None and checkpointer.load(found, models, {"counter": counter}) == 2
    assert all_bytes(models) == expected


@pytest.mark.parametrize(
    ("is_async", "spec"),
    [(False, "save:*:1:kill"), (False, "write:*:1:kill"), (True, "write:*:0:kill"), (True, "publish:*:0:kill")],
)
def test_a_rank_killed_while_saving(tmp_path: Path, is_async: bool, spec: str) -> None:
    with pytest.raises(RankError):
        run_ranks(2, _life_that_dies, str(tmp_path), is_async, spec)
    names = [path.name for path in manifest.published(tmp_path / "checkpoints")]
    assert names == ["step_00000001"], "the killed save counts, or took another along"
    run_ranks(2, _life_after, str(tmp_path), is_async)


def _taken_over(directory: str) -> None:
    _, models = _begin(directory, True)
    checkpointer = Checkpointer(Path(directory), async_save=True, may_publish=lambda: platform.rank() != 0)
    report = _report(checkpointer, 1, models)
    assert report.error == "another process took over the run directory"
    assert _names(checkpointer) == []


def test_a_run_that_lost_its_directory_publishes_nothing(tmp_path: Path) -> None:
    run_ranks(2, _taken_over, str(tmp_path))

"""A damaged checkpoint is never loaded: all ranks fall back to the newest sound one, and nothing is deleted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from aligner.checkpoint import manifest, verify
from aligner.checkpoint.checkpointer import Checkpointer, load_weights, read_extra
from aligner.distributed import platform
from aligner.distributed.collectives import barrier
from aligner.errors import CheckpointError, RankFailure
from aligner.models.role_model import RoleModel
from tests.checkpoint.small import ONE, TP2, Counter, fill, small_model, start, states
from tests.distributed.spawn import run_ranks

FILES = (
    "actor/__0_0.distcp",
    "actor/__1_0.distcp",
    "actor/.metadata",
    "actor/common.pt",
    "actor/metadata.json",
    "state.json",
    "rng_00001.pt",
    "manifest.json",
)


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


DAMAGES: tuple[tuple[Callable[[Path], None], str], ...] = (
    (_flip, "has changed"),
    (_cut, "bytes instead of"),
    (_empty, "has 0 bytes instead of"),
    (Path.unlink, "is missing"),
)


def _on_first(action: Callable[[], object]) -> None:
    barrier()
    if platform.rank() == 0:
        action()
    barrier()


def _damages(directory: str) -> None:
    start(TP2)
    models = {"actor": small_model("actor", TP2)}
    fill(models["actor"], 3)
    checkpointer = Checkpointer(Path(directory))
    for step in (1, 2):
        checkpointer.save(step, models, states({"counter": Counter(step)}))
    older, newest = manifest.published(checkpointer.directory)
    copy = Path(directory) / "copy"
    _on_first(lambda: shutil.copytree(newest, copy))
    for name in FILES:
        for damage, reason in DAMAGES:
            if name == "manifest.json":
                if damage is _flip:
                    continue  # it may be in the digits of a metric
                reason = "not a complete checkpoint"
            _on_first(lambda damage=damage, name=name: damage(newest / name))
            before = sorted(str(path) for path in checkpointer.directory.rglob("*"))
            assert checkpointer.newest() == older
            assert sorted(str(path) for path in checkpointer.directory.rglob("*")) == before, "something was deleted"
            with pytest.raises(CheckpointError, match=reason) as refused:
                checkpointer.load(newest, models, {"counter": Counter()})
            assert str(newest) in str(refused.value)
            _on_first(lambda: (shutil.rmtree(newest), shutil.copytree(copy, newest)))
    assert checkpointer.newest() == newest
    assert checkpointer.load(newest, models, {"counter": Counter()}) == 2
    _weights_and_extras(newest, models["actor"])
    _all_damaged(checkpointer, older, newest)


def _weights_and_extras(path: Path, model: RoleModel) -> None:
    _on_first(lambda: _flip(path / "state.json"))
    with pytest.raises(CheckpointError, match="'state.json' has changed"):
        read_extra(path, "counter")
    verify._sound.clear()
    assert load_weights(path, "actor", model) == [], "the weights themselves are sound"
    _on_first(lambda: _flip(path / "actor" / "__1_0.distcp"))
    verify._sound.clear()
    with pytest.raises(CheckpointError, match="'actor/__1_0.distcp' has changed"):
        load_weights(path, "actor", model)


def _all_damaged(checkpointer: Checkpointer, older: Path, newest: Path) -> None:
    _on_first(lambda: _cut(older / "state.json"))
    with pytest.raises(CheckpointError, match="all 2 checkpoints .* damaged .*step_00000002: .* move the directory"):
        checkpointer.newest()
    assert older.is_dir() and newest.is_dir()


def test_every_kind_of_damage(tmp_path: Path) -> None:
    run_ranks(2, _damages, str(tmp_path), timeout=300)


def _refusals(directory: str) -> None:
    start(ONE)
    actor = small_model("actor", ONE)
    frozen = small_model("frozen", ONE, frozen=True)
    for seed, model in enumerate((actor, frozen)):
        fill(model, seed)
    checkpointer = Checkpointer(Path(directory))
    report = checkpointer.save(1, {"actor": actor, "frozen": frozen}, {"counter": {}})
    assert report is not None and report.error is None
    critic, trained = small_model("critic", ONE, head="scalar"), small_model("frozen", ONE)
    for models, stateful, reason in (
        ({"critic": critic}, {}, "the roles .*, but this run trains 'critic' too"),
        ({"frozen": trained}, {}, "'frozen' was saved without its optimizer"),
        ({"actor": actor}, {"cursor": Counter()}, "no state of 'cursor'"),
    ):
        with pytest.raises((CheckpointError, RankFailure), match=reason):
            checkpointer.load(report.path, models, stateful)
    _on_first(lambda: report.path.chmod(0o777))
    with pytest.raises(CheckpointError, match="writable for everybody"):
        checkpointer.load(report.path, {"actor": actor}, {})


def test_what_a_run_needs_and_a_checkpoint_lacks(tmp_path: Path) -> None:
    run_ranks(2, _refusals, str(tmp_path))


def _counted(directory: str) -> None:
    """Files are read for their checksums once in a process, and each by one rank."""
    start(ONE)
    models = {"actor": small_model("actor", ONE)}
    checkpointer = Checkpointer(Path(directory))
    report = checkpointer.save(1, models, {})
    assert report is not None
    read: list[str] = []
    real = manifest.file_problem

    def counting(path: Path, name: str, entry: manifest.Entry) -> str:
        read.append(name)
        return real(path, name, entry)

    manifest.file_problem = counting
    for _ in range(2):
        assert Checkpointer(Path(directory)).newest() == report.path
        Checkpointer(Path(directory)).load(report.path, models, {})
    from aligner.distributed.collectives import all_gather_objects

    by_rank = all_gather_objects(read)
    assert sorted(sum(by_rank, [])) == sorted(manifest.read(report.path).files)
    assert all(by_rank), "one rank read everything"


def test_checksums_are_split_over_ranks_and_taken_once(tmp_path: Path) -> None:
    run_ranks(2, _counted, str(tmp_path))

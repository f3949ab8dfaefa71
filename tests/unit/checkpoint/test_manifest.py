"""The manifest: what is damaged is found, by sizes at once, by checksums file by file."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from aligner.checkpoint import manifest
from aligner.checkpoint.checkpointer import newest_complete
from aligner.errors import CheckpointError
from tests.checkpoint.fake import fake_checkpoint


def test_the_newest_sound_checkpoint_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert newest_complete(tmp_path / "nothing") is None
    paths = [fake_checkpoint(tmp_path, step) for step in (1, 2, 3, 4)]
    assert newest_complete(tmp_path) == paths[3] and capsys.readouterr().out == ""
    (paths[3] / "actor" / "__0_0.distcp").write_bytes(b"")
    (paths[2] / "state.json").unlink()
    (paths[1] / manifest.FILE).write_text("")
    assert newest_complete(tmp_path) == paths[0]
    lines = capsys.readouterr().out.splitlines()
    reasons = (
        "'actor/__0_0.distcp' has 0 bytes instead of 104",
        "'state.json' is missing",
        "not a complete checkpoint",
    )
    for line, path, reason in zip(lines, paths[:0:-1], reasons, strict=True):
        assert line.startswith(f"passed over the damaged checkpoint {path}: ") and reason in line
    assert all(path.is_dir() for path in paths)


def test_steps_are_ordered_as_numbers_and_one_without_a_manifest_is_damaged(tmp_path: Path) -> None:
    paths = [fake_checkpoint(tmp_path, step) for step in (99_999_999, 100_000_000, 5)]
    for name in ("step_00000007", ".tmp-step_00000008.abc", "step_x"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000009").touch()
    lost = tmp_path / "step_00000007"
    assert manifest.published(tmp_path) == [paths[2], lost, paths[0], paths[1]]
    assert manifest.damage(lost).endswith("is not a complete checkpoint: manifest.json is missing")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "JSONDecodeError"),
        (b"[]", "TypeError"),
        (b"{}", "KeyError: 'format'"),
        (b'{"format": 1}', "format 1, this release reads 2"),
        (b'{"format": 2, "step": 1, "world_size": 1, "layouts": {"actor": {}}}', "TypeError"),
        (b"\xff\xfe", "UnicodeDecodeError"),
    ],
)
def test_manifests_that_are_none(tmp_path: Path, content: bytes, reason: str) -> None:
    path = fake_checkpoint(tmp_path, 1)
    (path / manifest.FILE).write_bytes(content)
    assert reason in manifest.damage(path)
    with pytest.raises(CheckpointError, match=reason.replace("'", ".")):
        manifest.read(path)


def test_every_field_comes_back(tmp_path: Path) -> None:
    path = fake_checkpoint(tmp_path, 3, identity={"command": "sft"}, metrics={"a": 0.1}, fingerprint={"torch": "2"})
    found = manifest.read(path)
    assert (found.step, found.world_size, found.identity) == (3, 1, {"command": "sft"})
    assert (found.metrics, found.fingerprint, found.best, found.time) == ({"a": 0.1}, {"torch": "2"}, None, 1.7e9 + 3)
    assert found.roles == {"actor": manifest.RoleEntry(1, 1, False, True)}
    names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert found.files.keys() == names - {manifest.FILE}, "every file is summed"
    assert found.bytes == sum((path / name).stat().st_size for name in found.files)
    assert manifest.digest(path) == hashlib.sha256((path / manifest.FILE).read_bytes()).hexdigest()
    assert not any(manifest.file_problem(path, name, entry) for name, entry in found.files.items())


def test_files_outside_the_checkpoint_are_refused(tmp_path: Path) -> None:
    path = fake_checkpoint(tmp_path, 3)
    content = json.loads((path / manifest.FILE).read_text())
    (tmp_path / "other").write_bytes(b"x")
    content["files"]["../other"] = [1, xxhash.xxh3_128_hexdigest(b"x")]
    (path / manifest.FILE).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="'../other' is missing"):
        manifest.read(path)


def test_others_may_not_write_it(tmp_path: Path) -> None:
    path = fake_checkpoint(tmp_path, 3)
    path.chmod(0o777)
    with pytest.raises(CheckpointError, match="writable for everybody"):
        manifest.read(path)


def test_a_changed_byte_is_found_by_its_checksum(tmp_path: Path) -> None:
    path = fake_checkpoint(tmp_path, 3)
    for name, entry in manifest.read(path).files.items():
        data = bytearray((path / name).read_bytes())
        data[-1] ^= 1
        (path / name).write_bytes(data)
        assert manifest.damage(path) == "" and "has changed" in manifest.file_problem(path, name, entry)


def test_a_file_is_summed_while_it_is_written(tmp_path: Path) -> None:
    parts = [b"head", bytes(3 << 20), memoryview(b"tail"), b""]
    with manifest.SummedFile(tmp_path / "file") as file:
        for part in parts:
            file.write(part)
        assert file.tell() == sum(len(part) for part in parts)
    content = b"".join(parts)
    assert (tmp_path / "file").read_bytes() == content
    assert file.entry == (len(content), xxhash.xxh3_128_hexdigest(content)) == manifest.file_entry(tmp_path / "file")


@pytest.mark.parametrize("size", [10, 5 << 20])
def test_a_full_disk_is_an_error_at_the_latest_at_the_end(size: int) -> None:
    with pytest.raises(OSError) as caught, manifest.SummedFile(Path("/dev/full")) as file:
        file.write(bytes(size))
    assert caught.value.errno == errno.ENOSPC


def test_what_changed_since_the_checkpoint_is_named() -> None:
    saved = manifest.fingerprint()
    assert manifest.changed_since(saved) == ""
    changed = saved | {"threads": "77", "torch": "1.0"}
    assert manifest.changed_since(changed) == f"torch 1.0 -> {saved['torch']}, threads 77 -> {saved['threads']}"
    assert manifest.changed_since(changed | {"device": "quantum"}).endswith("device quantum -> cpu")


def test_what_people_ask_answers_without_torch() -> None:
    program = (
        "import sys; from aligner.checkpoint import deletion, manifest, pins, retention; "
        "from aligner.cli import checkpoint; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], env=os.environ, timeout=60).returncode == 0

"""Writing in the background: what is written does not change, a thread that gives way, errors that come back."""

from __future__ import annotations

import io
import os
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import xxhash
from torch.distributed.checkpoint.metadata import MetadataIndex

from aligner.checkpoint import manifest, shard_file
from aligner.checkpoint.async_write import BackgroundWriter, DoneHere, HeldTensors, Staging
from aligner.checkpoint.shard_file import ShardFile, TensorSource
from aligner.checkpoint.torch_dist import Item, Planner, Shards, _frame

KINDS = [
    (torch.float32, (3, 5)),
    (torch.bfloat16, (7,)),
    (torch.int64, ()),
    (torch.float32, (0, 4)),
    (torch.uint8, (2, 3, 4)),
    (torch.bool, (5,)),
    (torch.float32, (1500, 1000)),
]


def test_background_work_gives_way_and_returns() -> None:
    def work() -> tuple[int, int, str]:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), os.sched_getscheduler(0), "done"

    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert BackgroundWriter(work).result() == (19, os.SCHED_BATCH, "done")
    assert os.getpriority(os.PRIO_PROCESS, 0) == before and os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.parametrize("kind", [BackgroundWriter, DoneHere])
def test_an_error_comes_back(kind: type[BackgroundWriter] | type[DoneHere]) -> None:
    def work() -> None:
        raise OSError(28, "No space left on device")

    writer = kind(work)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            writer.result()
    assert writer.done()


def test_it_is_done_when_it_is_done() -> None:
    go = threading.Event()
    writer = BackgroundWriter(go.wait)
    assert not writer.done()
    go.set()
    assert writer.result() is True and writer.done()


def _tensors(*sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]


def _read(held: HeldTensors, tensor: torch.Tensor, size: int | None = None) -> bytes:
    """What ``tensor`` held, the first ``size`` bytes of it; in two parts."""
    source = held.source(tensor)
    target = np.zeros(source.nbytes if size is None else size, np.uint8)
    half = target.size // 2
    for start, part in ((0, target[:half]), (half, target[half:])):
        source.copy_to(part, start)
    return target.tobytes()


@pytest.mark.parametrize("read_before", [0, 1, 2, 4])
def test_tensors_are_read_as_they_were(read_before: int) -> None:
    tensors = _tensors(5, 0, 4000, 1)
    before = [tensor.numpy().tobytes() for tensor in tensors]
    held = Staging().hold(tensors)
    found = [_read(held, tensor) for tensor in tensors[:read_before]]
    for _ in range(2):
        held.keep()
        for tensor in tensors:
            tensor.add_(1)
    found += [_read(held, tensor) for tensor in tensors[read_before:]]
    assert found == before


def test_a_tensor_that_is_half_read_when_it_changes() -> None:
    (tensor,) = _tensors(4000)
    before = tensor.numpy().tobytes()
    held = Staging().hold([tensor])
    first = _read(held, tensor, 1000)
    held.keep()
    tensor.zero_()
    assert first == before[:1000] and _read(held, tensor) == before


def test_only_what_is_unread_is_copied_and_what_stands_twice_once() -> None:
    tensors = _tensors(100, 200, 300)
    twice = [tensors[0], tensors[1], tensors[1].view(2, 100).reshape(-1), tensors[2]]
    staging = Staging()
    held = staging.hold(twice)
    assert staging._buffer.numel() == 600
    staging._buffer.zero_()
    for tensor in twice[:2]:
        _read(held, tensor)
    held.keep()
    assert staging._buffer[:500].equal(torch.cat(tensors[1:])) and not staging._buffer[500:].any()


def test_reading_beside_changes(tmp_path: Path) -> None:
    """The writer reads while another thread keeps and changes: what it writes is of the moment of the save."""
    tensors = _tensors(*[3_000_000] * 8)
    staging = Staging()
    for delay in range(12):
        before = b"".join(tensor.numpy().tobytes() for tensor in tensors)
        held = staging.hold(tensors)
        started = threading.Event()

        def write(held: HeldTensors = held, started: threading.Event = started) -> None:
            with ShardFile(tmp_path / "file") as file:
                for number, tensor in enumerate(tensors):
                    file.write(held.source(tensor))
                    if number == 0:
                        started.set()

        writer = BackgroundWriter(write)
        assert started.wait(30)
        time.sleep(0.001 * delay)
        held.keep()
        for tensor in tensors:
            tensor.add_(1)
        writer.result()
        assert (tmp_path / "file").read_bytes() == before


def test_memory_is_used_again_and_can_be_taken_in_advance() -> None:
    staging, tensors = Staging(), _tensors(40, 24)
    staging.reserve(tensors)
    assert staging._reserving is not None
    reserved = staging._reserving.result()
    assert reserved.nbytes == 64
    for _ in range(2):
        staging.hold(tensors)
        assert staging._buffer is reserved


def test_memory_that_training_wants_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class _Little:
        available = 1000

    monkeypatch.setattr(psutil, "virtual_memory", lambda: _Little)
    staging = Staging()
    staging.reserve(_tensors(501))
    with pytest.raises(MemoryError, match="GiB are available"):
        staging.hold(_tensors(501))
    with pytest.raises(MemoryError, match="GiB are available"):
        Staging().hold(_tensors(501))
    Staging().hold(_tensors(500))


@pytest.mark.parametrize("sizes", [(), (10,), (8 << 20,), (5_000_001, 3, 9_999_999, 0, 1 << 20)])
@pytest.mark.parametrize("direct", [True, False])
def test_large_files_are_summed_while_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], direct: bool
) -> None:
    if not direct:
        monkeypatch.setattr(shard_file, "_DIRECT", 0)
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
    with ShardFile(tmp_path / "file") as file:
        for part in parts:
            file.write(TensorSource(part))
    content = b"".join(part.numpy().tobytes() for part in parts)
    assert (tmp_path / "file").read_bytes() == content and file.tell() == len(content)
    assert file.entry == (len(content), xxhash.xxh3_128_hexdigest(content))


@pytest.mark.parametrize("size", [10, 30_000_000])
def test_a_large_file_on_a_full_disk(size: int) -> None:
    with pytest.raises(OSError, match="No space left"), ShardFile(Path("/dev/full")) as file:
        file.write(TensorSource(torch.zeros(size, dtype=torch.uint8)))


@pytest.mark.parametrize(("dtype", "shape"), KINDS)
def test_a_tensor_between_its_frame_is_what_torch_loads(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    head, tail = _frame(dtype, torch.Size(shape))
    data = torch.cat([head, tensor.reshape(-1).view(torch.uint8), tail]).numpy().tobytes()
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert loaded.dtype == dtype and loaded.equal(tensor) and loaded.shape == tensor.shape
    assert torch.serialization.get_crc32_options(), "the setting of the process changed"


def test_parts_and_strides_of_tensors_are_written_as_they_look(tmp_path: Path) -> None:
    whole = torch.arange(40.0).view(5, 8)
    cases = [whole[1:3], whole.t(), whole[:, ::2], whole[4, 7]]
    planner = Planner()
    items: list[Item] = [planner._item(MetadataIndex(str(n), torch.Size()), case) for n, case in enumerate(cases)]
    written = Shards(0, items, {}, None).write(tmp_path / "role")
    data = (tmp_path / "role" / "__0_0.distcp").read_bytes()
    assert written.files["__0_0.distcp"] == manifest.write_file(tmp_path / "again", data)
    for item, case in zip(items, cases, strict=True):
        place = written.storage[item.index]
        part = data[place.offset : place.offset + place.length]
        assert torch.load(io.BytesIO(part), weights_only=True).equal(case)
        assert place.length < 4000, "a part was written with its whole"

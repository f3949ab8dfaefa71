"""Writing in the background: copies that do not change, a thread that gives way, errors that come back."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from aligner.checkpoint import manifest, shard_file
from aligner.checkpoint.async_write import BackgroundWriter, DoneHere, Staging
from aligner.checkpoint.shard_file import ShardFile
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


def test_copies_do_not_change_and_their_memory_is_used_again() -> None:
    staging = Staging()
    tensors = [torch.arange(5), torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(0), torch.tensor(7.0)]
    before = [tensor.clone() for tensor in tensors]
    copies = staging.copies(tensors)
    for tensor in tensors:
        tensor.fill_(99)
    for copy, old in zip(copies, before, strict=True):
        assert copy.view(old.dtype).view(old.shape).equal(old)
    again = staging.copies(tensors[:2])
    assert again[0].data_ptr() == copies[0].data_ptr()
    twice = staging.copies([tensors[0], tensors[0].view(1, 5), tensors[0][:4]])
    assert [copy.nbytes for copy in twice] == [40, 40, 32] and twice[0] is twice[1]


def test_memory_can_be_taken_in_advance() -> None:
    staging, tensors = Staging(), [torch.arange(5), torch.ones(2, 3)]
    staging.reserve(tensors)
    assert staging._reserving is not None
    reserved = staging._reserving.result()
    copies = staging.copies(tensors)
    assert copies[0].data_ptr() == reserved.data_ptr() and reserved.nbytes == 64
    assert copies[1].view(torch.float32).view(2, 3).equal(tensors[1])


def test_memory_that_training_wants_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class _Little:
        available = 1000

    monkeypatch.setattr(psutil, "virtual_memory", lambda: _Little)
    staging = Staging()
    staging.reserve([torch.zeros(126)])
    with pytest.raises(MemoryError, match="GiB are available"):
        staging.copies([torch.zeros(126)])
    with pytest.raises(MemoryError, match="GiB are available"):
        Staging().copies([torch.zeros(126)])
    assert len(Staging().copies([torch.zeros(100)])) == 1


@pytest.mark.parametrize("sizes", [(), (10,), (8 << 20,), (5_000_001, 3, 9_999_999, 0, 1 << 20)])
@pytest.mark.parametrize("direct", [True, False])
def test_large_files_are_summed_while_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], direct: bool
) -> None:
    if not direct:
        monkeypatch.setattr(shard_file, "_DIRECT", 0)
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).numpy() for size in sizes]
    with ShardFile(tmp_path / "file") as file:
        for part in parts:
            file.write(part)
    content = b"".join(part.tobytes() for part in parts)
    assert (tmp_path / "file").read_bytes() == content and file.tell() == len(content)
    assert file.entry == (len(content), hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("size", [10, 30_000_000])
def test_a_large_file_on_a_full_disk(size: int) -> None:
    with pytest.raises(OSError, match="No space left"), ShardFile(Path("/dev/full")) as file:
        file.write(bytes(size))


@pytest.mark.parametrize(("dtype", "shape"), KINDS)
def test_a_tensor_between_its_frame_is_what_torch_loads(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    head, tail = _frame(dtype, torch.Size(shape))
    data = head + tensor.reshape(-1).view(torch.uint8).numpy().tobytes() + tail
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

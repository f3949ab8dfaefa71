"""Writing in the background: a thread of low priority writes what stands in memory; what training is about to change
before it is written is copied.

Why not a forked process, whose memory the kernel copies lazily: that costs a page fault for every 4 KiB that training
changes while the child lives, about 11 µs each on a virtual machine, 20 to 40 times the copy; and forking a process
that holds threads, devices or network cards is unsafe. The thread holds Python's lock for moments only: between
copies of megabytes, their checksums and the file system.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import psutil
import torch

from aligner.checkpoint.shard_file import copy_bytes
from aligner.distributed import platform

Place = tuple[torch.device, int, int]  # device, address, bytes

LARGEST_SHARE = 0.5  # of the memory that is available when the first copy is made


class Writer(Protocol):
    """Work whose result or error is fetched with :meth:`result` when it is :meth:`done`."""

    def done(self) -> bool:
        """Whether the work has ended; never waits."""
        ...

    def result(self) -> Any:
        """What the work returned; raises what it raised. Waits for it."""
        ...


class DoneHere:
    """``work()`` at once, in this thread."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._value, self._error = None, None
        try:
            self._value = work()
        except Exception as error:
            self._error = error

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class BackgroundWriter:
    """``work()`` in a thread that takes only what training leaves of the processor. It ends with the process."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._outcome: DoneHere | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint-writer", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        return self._outcome is not None

    def result(self) -> Any:
        self._thread.join()
        assert self._outcome is not None
        return self._outcome.result()

    def _run(self, work: Callable[[], Any]) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # of this thread
        self._outcome = DoneHere(work)


class Staging:
    """Memory for copies, kept from save to save: fresh memory costs several times the copying."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._reserving: BackgroundWriter | None = None

    def reserve(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take the memory for copies of such tensors in the background, so that the first copies are quick too."""
        needed = sum(size for _, _, size in set(map(_place, tensors)))
        self._reserving = BackgroundWriter(lambda: _touched(_allocate(needed)))

    def hold(self, tensors: Sequence[torch.Tensor]) -> HeldTensors:
        """``tensors`` (of bytes) as they are now; one set at a time. Raises MemoryError where copies have no room."""
        needed = sum(size for _, _, size in set(map(_place, tensors)))
        if self._reserving is not None:
            reserving, self._reserving = self._reserving, None
            with contextlib.suppress(MemoryError):
                self._buffer = reserving.result()
        if self._buffer.numel() < needed:
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = _allocate(needed)
        return HeldTensors(tensors, self._buffer)


class HeldTensors:
    """Tensors as they were at one moment: read where they stand, until :meth:`keep` copies what is still to be read.

    So a save copies only what cannot be written before training changes it. What stands twice (fp32 weights are their
    optimizer's masters too) is copied once.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        self._tensors = {_place(tensor): tensor for tensor in tensors}
        self._unread = Counter(_place(tensor) for tensor in tensors if tensor.nbytes)  # times it is still to be read
        self._buffer = buffer
        self._is_kept = False
        self._on_side_stream = platform.SideStream()
        self._lock = threading.Lock()

    def source(self, tensor: torch.Tensor) -> HeldBytes:
        """What ``tensor``, one of those held, held at that moment; to be read once, from begin to end."""
        return HeldBytes(self, _place(tensor), tensor.nbytes)

    def keep(self) -> None:
        """Call before a tensor changes. At the first call what is unread is copied, and from then on read there."""
        with self._lock:
            if self._is_kept:
                return
            start = 0
            for place in self._unread:
                stop = start + place[2]
                copy = self._buffer[start:stop]
                self._copy(copy.numpy(), self._tensors[place])
                self._tensors[place] = copy
                start = stop
            self._is_kept = True

    def _read(self, place: Place, start: int, target: np.ndarray) -> None:
        with self._lock:
            self._copy(target, self._tensors[place][start : start + target.size])
            if start + target.size == place[2]:
                self._unread[place] -= 1
                if not self._unread[place]:
                    del self._unread[place]

    def _copy(self, target: np.ndarray, tensor: torch.Tensor) -> None:
        with self._on_side_stream():
            copy_bytes(target, tensor)


@dataclass(frozen=True)
class HeldBytes:
    """The bytes of one held tensor; a :class:`~aligner.checkpoint.shard_file.Source`."""

    held: HeldTensors
    place: Place
    nbytes: int

    def copy_to(self, target: np.ndarray, start: int) -> None:
        self.held._read(self.place, start, target)


def _place(tensor: torch.Tensor) -> Place:
    return tensor.device, tensor.data_ptr(), tensor.nbytes


def _allocate(needed: int) -> torch.Tensor:
    """Memory, less than what training will want of it: Linux promises more than there is, and kills who takes it."""
    available = psutil.virtual_memory().available // platform.rank_environment().local_world_size
    if needed > LARGEST_SHARE * available:
        raise MemoryError(f"{needed / 1024**3:.1f} GiB, but {available / 1024**3:.1f} GiB are available")
    try:
        return torch.empty(needed, dtype=torch.uint8)
    except RuntimeError as error:
        raise MemoryError(str(error)) from None


def _touched(buffer: torch.Tensor) -> torch.Tensor:
    """``buffer``, all pages of it there; not by torch, whose threads would all be busy with it."""
    ctypes.memset(buffer.data_ptr(), 0, buffer.numel())
    return buffer

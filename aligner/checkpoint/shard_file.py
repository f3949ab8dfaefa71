"""The large files of a checkpoint: summed while they are written, past the page cache where the file system can.

Through the page cache a gigabyte cost 2.3 s of processor time beside training, past it 0.35 s, and it would push
out pages that training reads. Python's lock is free during sums, copies and writes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from aligner.checkpoint.manifest import Entry, new_checksum

_DIRECT = getattr(os, "O_DIRECT", 0)
_BUFFER = 8 << 20  # bytes of a write; a multiple of every block size
_PIECE = 1 << 20  # bytes that are copied and then summed: few enough to be in the processor's cache still


class Source(Protocol):
    """Bytes that can be copied from, once, from begin to end."""

    @property
    def nbytes(self) -> int: ...

    def copy_to(self, target: np.ndarray, start: int) -> None:
        """Copy the bytes from ``start`` on into ``target``, all of it."""
        ...


@dataclass(frozen=True)
class TensorSource:
    """The bytes of a tensor of bytes, on any device, as they are when they are copied."""

    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def copy_to(self, target: np.ndarray, start: int) -> None:
        copy_bytes(target, self.tensor[start : start + target.size])


def copy_bytes(target: np.ndarray, tensor: torch.Tensor) -> None:
    """Copy all of ``tensor`` (bytes): half as long as torch's copy, and without Python's lock."""
    np.copyto(target, tensor.cpu().numpy())


class ShardFile:
    """A new file; use as a context manager. :attr:`entry` is set at its end, when the content is on the disk."""

    def __init__(self, path: Path) -> None:
        self.entry: Entry = (0, "")
        self._sum = new_checksum()
        self._size = 0
        self._memory = memoryview(mmap.mmap(-1, _BUFFER))  # aligned to pages
        self._buffer = np.frombuffer(self._memory, np.uint8)
        self._filled = 0
        self._file = _open(path)

    def write(self, source: Source) -> None:
        """Append what ``source`` holds. Raises OSError."""
        done = 0
        while done < source.nbytes:
            size = min(source.nbytes - done, _PIECE, _BUFFER - self._filled)
            target = self._buffer[self._filled : self._filled + size]
            source.copy_to(target, done)
            self._sum.update(target.data)
            done += size
            self._filled += size
            if self._filled == _BUFFER:
                self._flush()
        self._size += done

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                _through_cache(self._file)  # the rest fills no block
                self._flush()
                os.fsync(self._file)
                self.entry = (self._size, self._sum.hexdigest())
        finally:
            os.close(self._file)

    def _flush(self) -> None:
        left = self._memory[: self._filled]
        while left:
            try:
                left = left[os.write(self._file, left) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not _through_cache(self._file):
                    raise
        self._filled = 0


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        return os.open(path, flags | _DIRECT, 0o666)
    return os.open(path, flags, 0o666)


def _through_cache(file: int) -> bool:
    """Write through the page cache from here on; False when that was so already."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    if not flags & _DIRECT:
        return False
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)
    return True

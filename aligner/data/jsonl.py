"""Row files read lazily: ``.jsonl`` through a byte-offset index, ``.json`` holding one array as a whole.

Every error is a :class:`~aligner.errors.DataError` of one line that begins with ``file:line:``. Blank lines are
skipped and keep their place in the line count.
"""

from __future__ import annotations

import hashlib
import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from aligner.errors import DataError

BUILTIN_PREFIX = "builtin:"
_CHUNK = 1 << 24  # bytes read at once while indexing
_BLANK_LIMIT = 16  # a line of at most this many bytes may be blank and is looked at


def resolve_data_path(path: str | Path) -> Path:
    """The file behind ``path``: itself, or the packaged file behind ``builtin:<name>`` (suffix optional).

    Raises DataError when it does not exist or is not a file.
    """
    text = str(path)
    if not text.startswith(BUILTIN_PREFIX):
        found = Path(text).expanduser()
        if found.is_dir():
            raise DataError(f"{text}: is a directory; give the path of a .jsonl or .json file")
        if not found.is_file():
            what = "a directory" if found.is_dir() else "no such file"
            raise DataError(f"{text}: {what}; give the path of a .jsonl or .json file, or builtin:<name>")
        return found
    name = text.removeprefix(BUILTIN_PREFIX)
    folder = Path(str(resources.files("aligner.data"))) / "builtin"
    available = sorted(p.name for p in folder.glob("*.json*")) if folder.is_dir() else []
    for candidate in (name, f"{name}.jsonl", f"{name}.json"):
        if candidate in available:
            return folder / candidate
    raise DataError(f"{text}: no built-in data set of this name; available: {', '.join(available) or 'none'}")


class IndexedJsonl:
    """Rows (dicts) of a ``.jsonl`` file, or of a ``.json`` file that holds an array of objects.

    The file is opened and indexed at the first use, not at construction: 8 bytes of memory a row for JSONL; a ``.json``
    array is parsed as a whole. ``rows[i]`` parses one row; negative and out-of-range indices raise IndexError.
    """

    def __init__(self, path: str | Path) -> None:
        self.name = str(path)
        self._file: int | None = None
        self._offsets: np.ndarray | None = None  # int64 [rows, 2] byte start and end of each row
        self._lines: np.ndarray | None = None  # int64 [rows] 1-based line numbers; None: row + 1
        self._array: list[Any] | None = None
        self._sha256 = ""

    @property
    def sha256(self) -> str:
        """Hex digest of the file's bytes, as read while it was indexed."""
        self._open()
        return self._sha256

    def __len__(self) -> int:
        """Number of rows. DataError when the file is missing, unreadable or has no rows."""
        self._open()
        return self._count()

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} in {self.name}")
        value = self._array[row] if self._array is not None else self._parse_line(row)
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise DataError(f"{self.where(row)}: a row must be a JSON object, found {kind}; write one {{...}} a row")
        return value

    def where(self, row: int) -> str:
        """``file:line`` of a row, for messages."""
        return f"{self.name}:{self.line(row)}"

    def line(self, row: int) -> int:
        """1-based line on which a row starts."""
        self._open()
        return row + 1 if self._lines is None else int(self._lines[row])

    def close(self) -> None:
        """Close the file; the next use opens and indexes it again."""
        if self._file is not None:
            os.close(self._file)
        self._file = self._offsets = self._lines = self._array = None

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()

    # ------------------------------------------------------------------ opening

    def _open(self) -> None:
        if self._offsets is not None or self._array is not None:
            return
        path = resolve_data_path(self.name)
        try:
            if path.suffix == ".json" and _first_byte(path) == b"[":
                self._read_array(path)
            else:
                self._index_lines(path)
        except OSError as error:
            raise DataError(f"{self.name}: cannot be read: {error.strerror}; check the file's permissions") from error
        if not self._count():
            self.close()
            raise DataError(f"{self.name}: empty data set: the file has no rows; write one JSON object a line")

    def _count(self) -> int:
        if self._array is not None:
            return len(self._array)
        assert self._offsets is not None
        return len(self._offsets)

    def _index_lines(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        size = os.fstat(self._file).st_size
        newlines = []
        content = hashlib.sha256()
        for base in range(0, size, _CHUNK):
            read = os.pread(self._file, min(_CHUNK, size - base), base)
            content.update(read)
            newlines.append(np.flatnonzero(np.frombuffer(read, dtype=np.uint8) == 10).astype(np.int64) + base)
        self._sha256 = content.hexdigest()
        ends = np.concatenate([*newlines, np.array([size], dtype=np.int64)])
        starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1] + 1])
        keep = ends > starts
        for i in np.flatnonzero(keep & (ends - starts <= _BLANK_LIMIT)):
            keep[i] = os.pread(self._file, int(ends[i] - starts[i]), int(starts[i])).strip() != b""
        self._offsets = np.stack([starts[keep], ends[keep]], axis=1)
        lines = np.flatnonzero(keep) + 1
        self._lines = None if len(lines) == 0 or lines[-1] == len(lines) else lines

    def _read_array(self, path: Path) -> None:
        """Parse element by element, so that every row knows the line it starts on."""
        content = path.read_bytes()
        self._sha256 = hashlib.sha256(content).hexdigest()
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{self.name}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error
        decoder = json.JSONDecoder()
        values: list[Any] = []
        starts: list[int] = []
        position = _skip_space(text, text.index("[") + 1)
        while text[position : position + 1] != "]":
            if values:
                if text[position : position + 1] != ",":
                    raise self._malformed(text, position, "expected ',' or ']' after an element")
                position = _skip_space(text, position + 1)
            try:
                value, end = decoder.raw_decode(text, position)
            except (json.JSONDecodeError, RecursionError) as error:
                at = error.pos if isinstance(error, json.JSONDecodeError) else position
                raise self._malformed(text, at, getattr(error, "msg", "nested too deeply")) from error
            values.append(value)
            starts.append(position)
            position = _skip_space(text, end)
        if text[position + 1 :].strip():
            raise self._malformed(text, _skip_space(text, position + 1), "text after the array's end")
        breaks = np.array([i for i, char in enumerate(text) if char == "\n"], dtype=np.int64)
        self._array = values
        self._lines = np.searchsorted(breaks, np.array(starts, dtype=np.int64)) + 1

    def _malformed(self, text: str, position: int, what: str) -> DataError:
        line = text.count("\n", 0, position) + 1
        return DataError(f"{self.name}:{line}: malformed JSON array: {what}; correct this place")

    def _parse_line(self, row: int) -> Any:
        assert self._file is not None and self._offsets is not None
        start, end = (int(x) for x in self._offsets[row])
        raw = os.pread(self._file, end - start, start)
        try:
            return json.loads(raw.decode("utf-8-sig" if start == 0 else "utf-8"))
        except UnicodeDecodeError as error:
            at = start + error.start
            raise DataError(f"{self.where(row)}: not UTF-8 at byte {at} of the file; save it as UTF-8") from error
        except json.JSONDecodeError as error:
            message = f"malformed JSON: {error.msg} at column {error.colno}"
            raise DataError(f"{self.where(row)}: {message}; write one complete JSON object a line") from error
        except RecursionError as error:
            raise DataError(f"{self.where(row)}: malformed JSON: nested too deeply; simplify the row") from error


def _first_byte(path: Path) -> bytes:
    """First byte that is neither white space nor part of a byte-order mark."""
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position

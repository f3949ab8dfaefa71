"""Reading rows lazily; what is wrong is named by file and line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from aligner.data import jsonl
from aligner.data.jsonl import IndexedJsonl, resolve_data_path
from aligner.errors import DataError

WriteRows = Callable[..., Path]


def test_rows_blank_lines_and_line_numbers(write_rows: WriteRows) -> None:
    rows = IndexedJsonl(write_rows('{"a": 1}', "", '{"a": "é世"}', "   \t", '{"a": 3}'))
    assert len(rows) == 3
    assert [rows[i]["a"] for i in (2, 0, 1, 2)] == [3, 1, "é世", 3]
    assert [rows.line(i) for i in range(3)] == [1, 3, 5]
    for outside in (3, -1):
        with pytest.raises(IndexError):
            rows[outside]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_line_endings_and_byte_order_mark(ending: str, last: bool, mark: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(mark + (ending.join(['{"a": 1}', '{"a": 2}']) + (ending if last else "")).encode())
    rows = IndexedJsonl(path)
    assert [rows[i] for i in range(len(rows))] == [{"a": 1}, {"a": 2}]


def test_index_over_many_chunks(write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(*({"i": i, "x": "y" * (i % 7)} for i in range(200)))
    for chunk in (1, 13, 1000):
        monkeypatch.setattr(jsonl, "_CHUNK", chunk)
        rows = IndexedJsonl(path)
        assert [rows[i]["i"] for i in range(len(rows))] == list(range(200))


def test_only_the_wanted_row_is_parsed(write_rows: WriteRows) -> None:
    rows = IndexedJsonl(write_rows({"a": 1}, "{broken", {"a": 3}))
    assert rows[2] == {"a": 3}
    with pytest.raises(DataError, match=r"rows.jsonl:2: malformed JSON: .* at column 2"):
        rows[1]


def test_array_files_know_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"a": 1, "b": 2}, {"a": 3}, 7], indent=2))
    rows = IndexedJsonl(path)
    assert len(rows) == 3 and rows[1] == {"a": 3}
    assert [rows.line(i) for i in range(3)] == [2, 6, 9]
    with pytest.raises(DataError, match=r"rows.json:9: a row must be a JSON object, found int"):
        rows[2]
    path.write_text('{"a": 1}\n{"a": 2}\n')  # JSON lines under the name .json
    assert len(IndexedJsonl(path)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[\n{"a": 1},\n{"a" 2}\n]', r"rows.json:3: malformed JSON array"),
        ('[\n{"a": 1}\n{"a": 2}\n]', r"rows.json:3: malformed JSON array: expected ','"),
        ('[\n{"a": 1},\n', r"rows.json:3: malformed JSON array"),
        ('[\n{"a": 1}\n', r"rows.json:3: malformed JSON array"),
        ('[{"a": 1}]\n[]', r"rows.json:2: malformed JSON array: text after"),
        ("[ ]", r"rows.json: empty data set"),
        ("\n \n", r"rows.json: empty data set"),
        ("", r"rows.json: empty data set"),
    ],
)
def test_malformed_arrays(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as failure:
        len(IndexedJsonl(path))
    assert "\n" not in str(failure.value)


def test_bad_bytes_and_depth(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": "\xff"}\n' + b'{"a":' * 100_000 + b"\n")
    rows = IndexedJsonl(path)
    with pytest.raises(DataError, match=r"rows.jsonl:2: not UTF-8 at byte 16 "):
        rows[1]
    with pytest.raises(DataError, match=r"rows.jsonl:3: malformed JSON"):
        rows[2]


def test_paths_that_are_no_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        resolve_data_path(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="is a directory"):
        resolve_data_path(tmp_path)
    with pytest.raises(DataError, match="builtin:nonsense: no built-in data set of this name; available: "):
        resolve_data_path("builtin:nonsense")
    with pytest.raises(DataError, match="no built-in data set"):  # no way out of the folder
        resolve_data_path("builtin:../jsonl.py")
    rows = IndexedJsonl(tmp_path / "later.jsonl")  # construction reads nothing
    with pytest.raises(DataError, match="no such file"):
        len(rows)


def test_close_gives_the_file_back(write_rows: WriteRows) -> None:
    rows = IndexedJsonl(write_rows({"a": 1}))
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(20):
        assert rows[0] == {"a": 1}
        rows.close()
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_real_files(shared_data: Path) -> None:
    counts = {"sft/gsm8k_train.jsonl": 7473, "rm/rasbt_preference_1100.json": 1100, "eval/ifeval_input_data.jsonl": 541}
    for name, count in counts.items():
        rows = IndexedJsonl(shared_data / name)
        assert len(rows) == count
        lines = (shared_data / name).read_text().splitlines()
        for i in (0, count // 2, count - 1):
            assert isinstance(rows[i], dict) and "{" in lines[rows.line(i) - 1]

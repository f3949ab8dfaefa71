"""Users' own functions, given as ``path/to/file.py:name``."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from aligner.data.plugin import load_function
from aligner.errors import ConfigError

SOURCE = '''
"""A user's file."""
from dataclasses import dataclass
import neighbour_of_mine

@dataclass
class Verdict:
    good: bool

def keep(row):
    return row["score"] > neighbour_of_mine.LIMIT

def verdict(row):
    return Verdict(True)

def two(a, b):
    return a

def with_default(row, threshold=1):
    return True

number = 3
'''


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    (tmp_path / "neighbour_of_mine.py").write_text("LIMIT = 2\n")
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def test_functions_are_loaded(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = load_function(f"{plugin}:keep", "data.filter", ["row"])
    assert keep({"score": 3}) and not keep({"score": 1})
    assert load_function(f"{plugin}:with_default", "data.filter", ["row"])({}) is True
    monkeypatch.chdir(plugin.parent)
    verdict = load_function("mine.py:verdict", "data.filter", ["row"])({})
    assert pickle.loads(pickle.dumps(verdict)).good


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.py", "not of the form path/to/file.py:name"),
        ("mine:keep", "not of the form"),
        ("mine.py:", "not of the form"),
        ("other.py:keep", "there is no file .*other.py"),
        ("mine.py:kep", "mine.py defines no kep"),
        ("mine.py:number", "number is a int, not a function"),
        ("mine.py:two", r"is called with \(row\) but takes \(a, b\)"),
        ("broken.py:keep", "importing broken.py failed: ZeroDivisionError"),
        ("syntax.py:keep", "importing syntax.py failed: SyntaxError"),
    ],
)
def test_what_cannot_be_loaded(name: str, message: str, plugin: Path) -> None:
    (plugin.parent / "broken.py").write_text("1 / 0\n")
    (plugin.parent / "syntax.py").write_text("def keep(row)\n")
    reference = f"{plugin.parent}/{name}"
    with pytest.raises(ConfigError, match=message) as failure:
        load_function(reference, "data.filter", ["row"])
    assert str(failure.value).startswith(f"data.filter={reference}: ") and "\n" not in str(failure.value)

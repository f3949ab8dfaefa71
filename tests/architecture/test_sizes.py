"""Files and functions stay small: a warning at 500 lines a file or 60 a function, a failure at 800 or 100."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("aligner", "launchers", "tests")
FILE_LINES, FILE_LIMIT = 500, 800
FUNCTION_LINES, FUNCTION_LIMIT = 60, 100


def _sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def _judge(found: list[tuple[int, str]], wanted: int, limit: int) -> None:
    for lines, name in found:
        if wanted < lines <= limit:
            warnings.warn(f"{name} has {lines} lines; aim for {wanted}", stacklevel=2)
    over = [f"{name} has {lines} lines" for lines, name in found if lines > limit]
    assert not over, f"over {limit} lines: " + "; ".join(over)


def test_files() -> None:
    found = [(path.read_text(encoding="utf-8").count("\n"), str(path.relative_to(ROOT))) for path in _sources()]
    _judge(found, FILE_LINES, FILE_LIMIT)


def test_functions() -> None:
    found = [
        (int(node.end_lineno or 0) - node.lineno + 1, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
        for path in _sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    _judge(found, FUNCTION_LINES, FUNCTION_LIMIT)

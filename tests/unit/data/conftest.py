"""Fixtures over the tokenizers of ``tests/chat_tokenizers.py``; and the optional shared data."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aligner.data.tokenizer import Tokenizer, load_tokenizer
from tests.chat_tokenizers import KINDS, write_tokenizer


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A directory with the tokenizer of a kind; ``<kind>+spaces`` for the SentencePiece-like variant."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            name, _, variant = kind.partition("+")
            made[kind] = write_tokenizer(tmp_path_factory.mktemp(kind), *KINDS[name], spaces=variant == "spaces")
        return made[kind]

    return get


@pytest.fixture(scope="session")
def tokenizer_of(tokenizer_directory: Callable[[str], Path]) -> Callable[[str], Tokenizer]:
    made: dict[str, Tokenizer] = {}

    def get(kind: str) -> Tokenizer:
        if kind not in made:
            made[kind] = load_tokenizer(tokenizer_directory(kind))
        return made[kind]

    return get


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    def write(*rows: Any, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def shared_data() -> Path:
    """The folder with real data; the test is skipped where there is none."""
    default = Path(__file__).parents[3].parent / "shared"
    folder = Path(os.environ.get("ALIGNER_SHARED", default)) / "data"
    if not folder.is_dir():
        pytest.skip("no shared data on this machine")
    return folder

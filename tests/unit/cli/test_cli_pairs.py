"""``aligner pairs``: where pairs go, and what is refused before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aligner.cli.pairs import main
from aligner.errors import AlignerError, CheckpointError, ConfigError, DataError


def write(directory: Path, prompts: int) -> Path:
    rows: list[dict[str, Any]] = []
    for prompt in range(prompts):
        row = {"messages": [{"role": "user", "content": f"Question {prompt}?"}]}
        rows.append({**row, "response": "A short answer.", "finish_reason": "stop", "tokens": 12})
        rows.append({**row, "response": "on and on and on and on", "finish_reason": "length", "tokens": 90})
    path = directory / "samples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts_in(path: Path) -> list[str]:
    return [json.loads(line)["prompt"][0]["content"][9] for line in path.read_text().splitlines()]


def test_every_nth_pair_is_held_out(tmp_path: Path) -> None:
    train, held = tmp_path / "new" / "train.jsonl", tmp_path / "held.jsonl"
    words = [str(write(tmp_path, 5)), str(train), "--held-out", str(held), "--held-out-every", "3"]
    assert main(words) == 0
    assert (prompts_in(train), prompts_in(held)) == (["1", "2", "4"], ["0", "3"])


def test_two_pairs_are_the_fewest_to_hold_one_out(tmp_path: Path) -> None:
    train, held = tmp_path / "train.jsonl", tmp_path / "held.jsonl"
    with pytest.raises(DataError, match="gives 1 pair, and --held-out takes the first one"):
        main([str(write(tmp_path, 1)), str(train), "--held-out", str(held)])
    assert not train.exists() and not held.exists()
    assert main([str(write(tmp_path, 2)), str(train), "--held-out", str(held)]) == 0
    assert (prompts_in(train), prompts_in(held)) == (["1"], ["0"])


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["out.jsonl", "--held-out", "new/../out.jsonl"], ConfigError, "--held-out is .*, and so is OUTPUT"),
        (["samples.jsonl", "--overwrite"], ConfigError, "OUTPUT is .*, and so is the samples"),
        (
            ["out.jsonl", "--held-out", "samples.jsonl", "--overwrite"],
            ConfigError,
            "--held-out is .* so is the samples",
        ),
        (["folder", "--overwrite"], ConfigError, "a directory"),
        (["there.jsonl"], ConfigError, "exists; choose another file or give --overwrite"),
        (["out.jsonl", "--held-out", "held.jsonl", "--held-out-every", "1"], ConfigError, "must be 2 or more"),
        (["there.jsonl/out.jsonl"], CheckpointError, "cannot be written"),
    ],
)
def test_refused(
    words: list[str],
    error: type[AlignerError],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    samples = write(tmp_path, 3)
    before = samples.read_text()
    (tmp_path / "folder").mkdir()
    (tmp_path / "there.jsonl").write_text("")
    with pytest.raises(error, match=message):
        main(["samples.jsonl", *words])
    assert samples.read_text() == before and not (tmp_path / "out.jsonl").exists()

"""Parts of ``evaluate`` and ``generate`` that need no ranks: loading rewards, and outputs refused before sampling."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aligner.errors import ConfigError
from aligner.evaluation import evaluate
from aligner.evaluation.generate import check_output
from aligner.rewards.protocol import RewardOutput


def test_the_reward_model_is_loaded_once_for_each_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load(config: Any, tokenizer: Any, *_: Any) -> SimpleNamespace:
        loaded.append(tokenizer.fingerprint())
        bonus = {"llama": 0.0, "qwen": 0.5}[tokenizer.fingerprint()]
        return SimpleNamespace(score=lambda requests: RewardOutput(torch.tensor(requests) + bonus))

    monkeypatch.setattr(evaluate, "load_reward", load)
    root: Any = SimpleNamespace(
        reward=SimpleNamespace(init_from="rm", function=None),
        data=SimpleNamespace(pack_length=8),
        trainer=SimpleNamespace(seed=0),
    )
    names = {"base": "llama", "other": "qwen", "ppo": "llama"}
    samples: Any = {name: SimpleNamespace(requests=[float(i)]) for i, name in enumerate(names)}
    tokenizers: Any = {name: SimpleNamespace(fingerprint=lambda kind=kind: kind) for name, kind in names.items()}
    assert evaluate._rewards(root, samples, tokenizers) == {"base": [0.0], "other": [1.5], "ppo": [2.0]}
    assert loaded == ["llama", "qwen"]


def test_an_output_that_cannot_be_written_is_found_before_sampling(tmp_path: Path) -> None:
    there = tmp_path / "there.jsonl"
    there.touch()
    for output, overwrite, message in (
        (tmp_path, True, r"is a directory; give a file in it, such as .*samples\.jsonl"),
        (there, False, "exists; choose another file or give overwrite=true"),
        (there / "samples.jsonl", True, "cannot be written: .*choose another folder"),
        (Path("/proc/samples.jsonl"), True, "cannot be written: /proc"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_output(output, overwrite, rank=0)
        check_output(output, overwrite, rank=1)  # does not look
    check_output(there, overwrite=True, rank=0)
    check_output(tmp_path / "new" / "samples.jsonl", overwrite=False, rank=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "there.jsonl"]

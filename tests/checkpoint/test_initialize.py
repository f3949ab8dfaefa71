"""What a path holds: a Hugging Face directory, a checkpoint, a run, or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from aligner.checkpoint import manifest
from aligner.checkpoint.initialize import Source, resolve_source
from aligner.errors import CheckpointError
from tests.checkpoint.fake import fake_checkpoint


def test_each_kind_of_source(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert resolve_source(model) == Source("hf", model)

    run = tmp_path / "run"
    first, second = (fake_checkpoint(run / "checkpoints", step) for step in (9, 10))
    (run / "checkpoints" / "step_00000011").mkdir()  # incomplete
    assert resolve_source(run) == Source("checkpoint", second)
    assert resolve_source(first) == Source("checkpoint", first)
    assert manifest.read(first).step == 9


def test_what_is_none_of_them_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_source(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="neither config.json"):
        resolve_source(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="no complete checkpoint yet"):
        resolve_source(tmp_path)

"""A diverged run of SFT and of the reward model keeps its micro-batches, enough to compute their loss again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from aligner.data.datasets import PreferenceDataset, TextDataset
from aligner.data.tokenizer import load_tokenizer
from tests.distributed.spawn import RankError, run_ranks
from tests.e2e.pipeline import overrides, run_command, write_chat_model, write_data


@pytest.mark.parametrize(("command", "role", "ranks"), [("sft", "actor", 2), ("rm", "reward", 1)])
def test_the_micro_batches_of_a_diverged_step_are_kept(command: str, role: str, ranks: int, tmp_path: Path) -> None:
    model, data, run_dir = write_chat_model(tmp_path / "model"), write_data(tmp_path / "data"), tmp_path / "run"
    words = overrides(command, run_dir, model, data, "trainer.max_steps=3")
    words += [f"{role}.optimizer.lr=1e30", f"{role}.optimizer.schedule=constant"]
    with pytest.raises(RankError, match=r"TrainingError: step \d: .*the step's data is kept in"):
        run_ranks(ranks, run_command, command, words)
    (step,) = (run_dir / "errors").iterdir()
    tokenizer = load_tokenizer(model)
    if command == "sft":
        texts = TextDataset(str(data / "sft.jsonl"), tokenizer, 64)
        samples = [texts[i] for i in range(len(texts))]
        sides = {sample.source: [(sample.token_ids, sample.loss_mask)] for sample in samples}
    else:
        pairs = PreferenceDataset(str(data / "pairs.jsonl"), tokenizer, 64)
        sides = {
            pair.source: [(pair.chosen_ids, None), (pair.rejected_ids, None)]
            for pair in map(pairs.__getitem__, range(12))
        }
    seen = []
    for rank in range(ranks):
        tensors = load_file(step / f"rank_{rank}" / "micro_batches.safetensors")
        for i, sources in enumerate(json.loads((step / f"rank_{rank}" / "sources.json").read_text())):
            bounds = tensors[f"{i}.cu_seqlens"].tolist()
            for segment, source in enumerate(sources):
                ids, mask = sides[source][segment % len(sides[source])]
                part = slice(bounds[segment], bounds[segment + 1])
                assert tensors[f"{i}.tokens"][part].equal(ids)
                assert mask is None or tensors[f"{i}.loss_mask"][part].equal(mask)
            seen += sources
    assert len(set(seen)) == 4 and len(seen) == (4 if command == "sft" else 8)

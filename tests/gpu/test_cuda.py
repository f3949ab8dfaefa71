"""The same code on one GPU: NCCL, Transformer Engine where installed, bfloat16. Skipped where there is no CUDA."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from aligner.checkpoint.async_write import BackgroundWriter, HeldTensors, Staging
from tests.e2e.pipeline import metrics, overrides, run_command, write_chat_model, write_data

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_log_probs_equal_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from aligner.checkpoint.initialize import initialize_role, resolve_source
    from aligner.config.hf_config import read_architecture
    from aligner.distributed import platform
    from aligner.distributed.topology import Degrees, build_topology, seed_everything
    from aligner.models.build import build_model
    from aligner.models.forward import score_logprobs
    from aligner.models.packs import pack_for

    directory = write_chat_model(tmp_path / "model")
    platform.initialize()
    try:
        topology = build_topology(Degrees(), make_global=True)
        seed_everything(0, topology)
        model = build_model("actor", read_architecture(directory), topology, head="lm", dtype=torch.bfloat16)
        initialize_role(model, resolve_source(directory), "actor")
        sequences = [torch.arange(5, 5 + length) for length in (7, 20, 33)]
        (pack,) = packs = pack_for(topology, sequences, 64)
        found = score_logprobs(model, packs)[0]
        peer = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        for row, start, end in pack.segments:
            ids = sequences[row][None]
            expected = peer(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
            assert (found[start + 1 : end] - expected).abs().mean() < 0.05
    finally:
        platform.shutdown()


def test_a_background_save_reads_what_was_there() -> None:
    tensors = [torch.full((1 << 24,), value, dtype=torch.uint8, device="cuda") for value in range(8)]
    staging = Staging()
    for change in range(4):
        held = staging.hold(tensors)

        def read(held: HeldTensors = held) -> list[list[int]]:
            found = []
            for tensor in tensors:
                target = np.empty(tensor.nbytes, np.uint8)
                held.source(tensor).copy_to(target, 0)
                found.append(np.unique(target).tolist())
            return found

        writer = BackgroundWriter(read)
        held.keep()
        for tensor in tensors:
            tensor.add_(1)
        assert writer.result() == [[value + change] for value in range(8)]


def test_the_pipeline_trains_in_bfloat16(tmp_path: Path) -> None:
    """SFT, reward model and PPO with all self-checks, generation included."""
    from aligner.distributed import platform

    model, data = write_chat_model(tmp_path / "model"), write_data(tmp_path / "data")
    sources = [f"actor.init_from={tmp_path}/sft", f"reward.init_from={tmp_path}/rm"]
    for command, more in (("sft", []), ("rm", [f"reward.init_from={tmp_path}/sft"]), ("ppo", sources)):
        words = overrides(command, tmp_path / command, model, data, "trainer.max_steps=2", *more)
        run_command(command, [*words, "model.dtype=bfloat16"])
        platform.shutdown()
    assert [row["step"] for row in metrics(tmp_path / "ppo")] == [1, 2]

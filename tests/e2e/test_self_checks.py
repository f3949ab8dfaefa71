"""The step-0 self-checks of PPO stop a run in which something that must be equal is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aligner.errors import TrainingError
from tests.distributed.spawn import run_ranks
from tests.e2e.pipeline import overrides, run_command, write_chat_model, write_data


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a one-step PPO run."""
    base = tmp_path_factory.mktemp("self-checks")
    model, data = write_chat_model(base / "model"), write_data(base / "data")
    run_ranks(1, run_command, "rm", overrides("rm", base / "rm", model, data, "trainer.max_steps=1"))
    return overrides("ppo", base / "ppo", model, data, f"reward.init_from={base}/rm", "trainer.max_steps=1")


def first_step(words: list[str], fault: str) -> str:
    """The first PPO step with a fault put in; returns the error's message (empty: none)."""
    from aligner.algorithms.ppo import build, ppo_step
    from aligner.algorithms.rollout_chunks import RolloutChunks
    from aligner.algorithms.run import TrainingRun
    from aligner.cli.start import start_rank
    from aligner.config.compose import compose

    root = compose("ppo", words)
    context = start_rank(root)
    ppo = build(root, context)
    weight = next(parameter for name, parameter in ppo.roles.actor.parameters() if "linear_fc1.weight" in name)
    if fault == "actor was not loaded like the reference":
        weight.data.add_(0.01 * torch.randn_like(weight))
    elif fault == "engine keeps other weights":
        published = ppo.engine.publish

        def publish_then_move(version: int) -> None:
            published(version)
            ppo.engine.resume()
            weight.data.add_(0.05 * torch.randn_like(weight))
            reference = dict(ppo.roles.reference.parameters())
            for name, parameter in ppo.roles.actor.parameters():
                reference[name].data.copy_(parameter.data)

        ppo.engine.publish = publish_then_move  # type: ignore[method-assign]
    elif fault == "forward pass is random":
        ppo.roles.actor.module.decoder.layers[0].register_forward_hook(
            lambda module, inputs, output: (output[0] + 1e-6 * torch.randn_like(output[0]), *output[1:])
        )
    with TrainingRun("ppo", root, context, {}, {}) as training:
        try:
            ppo_step(ppo, training, RolloutChunks(context, training, ppo.sampled_with), 1)
        except TrainingError as error:
            return str(error)
    return ""


FAULTS = {
    "none": "",
    "actor was not loaded like the reference": "policy and reference start from",
    "engine keeps other weights": "engine and trainer log-probs",
    "forward pass is random": "the ratio must be exactly 1",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_before_the_first_update(fault: str, words: list[str], tmp_path: Path) -> None:
    (message,) = run_ranks(1, first_step, [*words, f"run.dir={tmp_path}/run"], fault)
    assert FAULTS[fault] in message
    assert bool(message) == bool(FAULTS[fault])

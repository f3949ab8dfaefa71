"""A run continued with something changed: refused and named, or with consent really other from the checkpoint on.

Many lives in one process: every life of a command loads, compares and trains as in a process of its own.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from aligner.data.loader import ShardedOrder
from tests.distributed.spawn import run_ranks
from tests.e2e.pipeline import metrics, overrides, run_command, write_chat_model, write_data, write_jsonl

SAVED_AT, LENGTH, RATE = 2, 6, 1e-3
SEED = 1234


@dataclass
class Life:
    """What became of one life: the error that ended it, what it said, and the rows of the batches that it took."""

    error: str = ""
    said: list[str] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)


def live(lives: Sequence[tuple[str, list[str]]]) -> list[Life]:
    """One life after the other, each a command and its overrides."""
    from aligner.errors import AlignerError
    from aligner.monitoring.progress import StepProgress

    life = Life()
    draw, message = ShardedOrder.next_batch, StepProgress.message

    def next_batch(self: ShardedOrder) -> list[int]:
        life.rows.append(draw(self))
        return life.rows[-1]

    def say(self: StepProgress, text: str) -> None:
        life.said.append(text)
        message(self, text)

    ShardedOrder.next_batch, StepProgress.message = next_batch, say  # type: ignore[method-assign]
    found = []
    for command, words in lives:
        life = Life()
        try:
            run_command(command, words)
        except AlignerError as error:
            life.error = f"{type(error).__name__}: {error}"
        found.append(life)
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, data, and runs of sft and ppo that are finished after step 2."""
    directory = tmp_path_factory.mktemp("changes")
    model = write_chat_model(directory / "model")
    shutil.copytree(model, directory / "reference")
    write_data(directory / "data")
    (directory / "reward.py").write_text("def score(requests):\n    return [0.5 for _ in requests]\n")
    for life in run_ranks(1, live, [("sft", sft(directory, "sft", SAVED_AT)), ("ppo", ppo(directory, "ppo"))])[0]:
        assert not life.error
    return directory


def sft(base: Path, name: str, steps: int, *more: str) -> list[str]:
    schedule = f"actor.optimizer.decay_steps={LENGTH}"
    words = [schedule, f"actor.optimizer.lr={RATE}", "data.validation=null", f"trainer.max_steps={steps}", *more]
    return overrides("sft", base / name, base / "model", base / "data", *words)


def ppo(base: Path, name: str, *more: str) -> list[str]:
    words = [
        f"reference.init_from={base}/reference",
        f"reward.function={base}/reward.py:score",
        "critic.init_from=actor",
        "ppo.self_check=false",
        f"trainer.max_steps={SAVED_AT}",
        *more,
    ]
    return overrides("ppo", base / name, base / "model", base / "data", *words)


def copied(base: Path, command: str, name: str) -> Path:
    """A run that goes its own way from here."""
    shutil.copytree(base / command, base / name)
    return base / name


def rates(run_dir: Path) -> list[float]:
    return [row["train/lr"] for row in metrics(run_dir)]


def at_step(step: int, rate: float) -> float:
    """The cosine schedule without warm-up."""
    return rate * 0.5 * (1 + math.cos(math.pi * (step - 1) / LENGTH))


def test_changed_settings(base: Path) -> None:
    """The rate: refused, then accepted, then the run's own; the batch size: the cursor counts samples."""
    run = copied(base, "sft", "rate")
    config = (run / "config.yaml").read_text()
    new = "actor.optimizer.lr=1e-4"
    refused, accepted, again, larger = run_ranks(
        1,
        live,
        [
            ("sft", sft(base, "rate", 4, new)),
            ("sft", sft(base, "rate", 3, new, "run.accept_changes=[actor.optimizer.lr]", "trainer.save_interval=1")),
            ("sft", sft(base, "rate", 4, new, "run.accept_changes=[actor.optimizer.lr]")),
            ("sft", sft(base, "rate", 5, new, new, "data.global_batch_size=8", "run.accept_changes=[data]")),
        ],
    )[0]
    assert "  actor.optimizer.lr: 0.001 -> 0.0001\ngive run.accept_changes=[actor.optimizer.lr]" in refused.error
    assert "max_steps" not in refused.error and refused.rows == []
    assert "changed from here on: actor.optimizer.lr: 0.001 -> 0.0001" in accepted.said
    assert "changed: trainer.max_steps: 2 -> 3, trainer.save_interval: 0 -> 1" in accepted.said
    assert "run.accept_changes names actor.optimizer.lr, which has not changed" in again.said
    assert [life.error for life in (accepted, again, larger)] == ["", "", ""]
    expected = [at_step(step, rate) for step, rate in enumerate([RATE, RATE, 1e-4, 1e-4, 1e-4], start=1)]
    assert rates(run) == pytest.approx(expected, rel=1e-6)
    order = ShardedOrder(12, 1, SEED)
    samples = [order.next_batch()[0] for _ in range(24)]
    assert [row for life in (accepted, again, larger) for batch in life.rows for row in batch] == samples[8:24]
    assert config != (run / "config.yaml").read_text()


def test_a_refused_life_leaves_the_run_as_it_was(base: Path) -> None:
    run = copied(base, "sft", "refused")

    def content() -> dict[str, bytes]:
        kept = ("config.yaml", "sources.json", "metrics.jsonl", "checkpoints/*/*", "model/*")
        return {str(file): file.read_bytes() for pattern in kept for file in run.glob(pattern) if file.is_file()}

    before = content()
    assert len(before) > 8
    other = write_chat_model(base / "other_template")
    for file in (other / "tokenizer_config.json", other / "chat_template.jinja"):
        if file.is_file():
            file.write_text(file.read_text().replace("<|im_start|>", "<|im_start|> "))
    deeper = write_chat_model(base / "deeper", num_hidden_layers=3)
    lives = run_ranks(
        1,
        live,
        [
            ("sft", sft(base, "refused", 4, "trainer.seed=5")),
            ("sft", sft(base, "refused", 4, f"model.path={other}", "run.accept_changes=[all]")),
            ("sft", sft(base, "refused", 4, f"model.path={deeper}", "run.accept_changes=[all]")),
            ("sft", sft(base, "refused", 4, "model.dtype=bfloat16", "run.accept_changes=[all]")),
            ("sft", sft(base, "refused", SAVED_AT, "actor.optimizer.lr=1", "run.accept_changes=[all]")),
            ("sft", sft(base, "refused", SAVED_AT - 1)),
        ],
    )[0]
    reasons = [
        "trainer.seed: 1234 -> 5",
        "actor: its chat template is another one",
        "from {base}/model, not from {base}/deeper, which holds other weights",
        "model.dtype: float32 -> bfloat16: weights and optimizer states are saved in the precision",
        "the run is finished, so this would have no effect:\n  actor.optimizer.lr: 0.001 -> 1.0",
        "already at step 2",
    ]
    for life, reason in zip(lives, reasons, strict=True):
        assert reason.format(base=base) in life.error and life.rows == []
    assert content() == before


def test_other_data_is_read_from_its_beginning(base: Path) -> None:
    run = copied(base, "sft", "rows")
    rows = [json.loads(line) for line in (base / "data/sft.jsonl").read_text().splitlines()]
    write_jsonl(
        base / "more.jsonl", [*rows, {"prompt": "Say no", "response": "No."}, {"prompt": "Go", "response": "I go."}]
    )
    (base / "elsewhere").mkdir()
    shutil.copy(base / "data/sft.jsonl", base / "elsewhere/sft.jsonl")
    more = f"data.train={base}/more.jsonl"
    moved, refused, accepted, on = run_ranks(
        1,
        live,
        [
            ("sft", sft(base, "rows", 3, f"data.train={base}/elsewhere/sft.jsonl")),
            ("sft", sft(base, "rows", 4, more)),
            ("sft", sft(base, "rows", 4, more, "run.accept_changes=[data.train]")),
            ("sft", sft(base, "rows", 7, more)),
        ],
    )[0]
    before, after = ShardedOrder(12, 4, SEED), ShardedOrder(14, 4, SEED)
    expected = [before.next_batch() for _ in range(3)]
    assert moved.rows == expected[2:] and not moved.error
    assert "(12 of 12 rows;" in refused.error and "(14 of 14 rows;" in refused.error
    assert accepted.rows + on.rows == [after.next_batch() for _ in range(4)]
    assert any("read from its beginning" in text for text in accepted.said) and not on.error
    assert [row["consumed_samples"] for row in metrics(run)] == [4, 8, 12, 16, 20, 24, 28]


def test_frozen_roles_stay_what_they_were(base: Path) -> None:
    """The reference behind the same path, and the code of the reward."""
    copied(base, "ppo", "frozen")
    copied(base, "ppo", "code")
    reward = (base / "reward.py").read_text()
    weights = base / "reference/model.safetensors"
    before = weights.read_bytes()
    shutil.copytree(base / "reference", base / "moved_reference")
    moved = run_ranks(
        1, live, [("ppo", ppo(base, "code", "trainer.max_steps=3", f"reference.init_from={base}/moved_reference"))]
    )[0][0]
    assert not moved.error and any("reference.init_from" in text for text in moved.said)
    changed = bytearray(before)
    changed[-1] ^= 1
    weights.write_bytes(bytes(changed))
    (base / "reward.py").write_text(reward.replace("0.5", "0.25"))
    try:
        lives = run_ranks(
            1,
            live,
            [
                ("ppo", ppo(base, "frozen", "trainer.max_steps=3", "run.accept_changes=[all]")),
                ("ppo", ppo(base, "code", "trainer.max_steps=4", f"reference.init_from={base}/moved_reference")),
            ],
        )[0]
    finally:
        weights.write_bytes(before)
        (base / "reward.py").write_text(reward)
    assert f"reference: {base}/reference holds other weights than when the run began" in lives[0].error
    assert f"  reward.function: {base}/reward.py:score (sha256 " in lives[1].error


def test_a_run_that_outlives_its_schedule_says_so(base: Path) -> None:
    run = copied(base, "sft", "longer")
    (longer,) = run_ranks(1, live, [("sft", sft(base, "longer", LENGTH + 2))])[0]
    said = f"actor: the schedule ends after {LENGTH} of {LENGTH + 2} optimizer steps, the rest has min_lr=0"
    assert any(text.startswith(said) for text in longer.said) and not longer.error
    assert rates(run) == pytest.approx([*(at_step(step, RATE) for step in range(1, LENGTH + 1)), 0.0, 0.0])

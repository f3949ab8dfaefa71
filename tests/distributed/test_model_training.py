"""What a training step promises besides the right gradient: nothing moves on a bad step, bf16, dropout, memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from aligner.config.hf_config import read_architecture
from aligner.config.schema import OptimizerConfig
from aligner.data.packing import Pack, pack_sequences
from aligner.distributed import platform
from aligner.distributed.topology import Degrees, Topology, build_topology, seed_everything
from aligner.errors import TrainingError
from aligner.models.build import build_model
from aligner.models.forward import (
    LossTerms,
    TokenOutput,
    compute_gradients,
    score_logprobs,
    train_step,
    training_logprobs,
)
from aligner.models.role_model import RoleModel
from aligner.weights.convert import load_hf
from tests.distributed.families import Reference, reference, write_model
from tests.distributed.spawn import run_ranks

LAYOUTS = {
    1: [Degrees()],
    2: [Degrees(), Degrees(tp=2, sequence_parallel=True), Degrees(pp=2)],
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    torch.save(vars(reference(root / "llama32", "llama32", 1.0)), root / "reference.pt")
    return root / "reference.pt"


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_steps(references: Path, world_size: int) -> None:
    run_ranks(world_size, check_steps, references, timeout=240)


def check_steps(references: Path) -> None:
    ref = Reference(**torch.load(references, weights_only=True))
    for number, degrees in enumerate(LAYOUTS[platform.world_size()]):
        topology = build_topology(degrees, make_global=number == 0)
        for distributed in (True, False):
            check_bad_steps_move_nothing(ref, topology, distributed)
        check_bfloat16(ref, topology)
        for dtype in (torch.float32, torch.bfloat16):
            check_scoring_is_training(ref, topology, dtype)
        check_dropout(ref, topology)


def build(ref: Reference, topology: Topology, **options: Any) -> RoleModel:
    seed_everything(11, topology)
    options.setdefault("dtype", torch.float32)
    settings = OptimizerConfig(lr=1e-3, schedule="constant", use_distributed_optimizer=options.pop("distributed", True))
    model = build_model(
        "actor", read_architecture(ref.directory), topology, head="lm", optimizer=settings, horizon=10, **options
    )
    load_hf(model, ref.directory)
    return model


def loss_times(packs: list[Pack], factor: Callable[[torch.Tensor], torch.Tensor], count: int | None = None) -> Any:
    def loss(output: TokenOutput, index: int) -> LossTerms:
        assert output.logprobs_T is not None
        total = factor(-output.logprobs_T.sum())
        pack = packs[index]
        return LossTerms(total, pack.num_tokens - len(pack.rows) if count is None else count, {"packs": total * 0 + 1})

    return loss


def check_bad_steps_move_nothing(ref: Reference, topology: Topology, distributed: bool) -> None:
    model = build(ref, topology, distributed=distributed)
    packs = pack_sequences(ref.sequences, 64)
    before = {name: parameter.detach().clone() for name, parameter in model.parameters()}
    bad_rank = topology.dp_rank == topology.dp - 1  # only one replica sees the bad loss

    def poisoned(total: torch.Tensor) -> torch.Tensor:
        return total * math.nan if bad_rank else total

    def infinite_gradient(total: torch.Tensor) -> torch.Tensor:
        return total + ((total * 0.0).sqrt() if bad_rank else 0.0)  # 0, with an infinite slope

    with pytest.raises(TrainingError, match="actor: the loss is nan after 0 steps; no parameter was changed"):
        train_step(model, packs, loss_times(packs, poisoned))
    with pytest.raises(TrainingError, match=r"gradient norm is (nan|inf) after 0 steps \(loss \d"):
        train_step(model, packs, loss_times(packs, infinite_gradient))
    skipped = train_step(model, packs, loss_times(packs, lambda total: total * 0.0, count=0))
    assert skipped.skipped and skipped.sums["count"] == 0 and model.scheduler.num_steps == 0
    for name, parameter in model.parameters():
        assert torch.equal(parameter, before[name]), name
    result = train_step(model, packs, loss_times(packs, lambda total: total))
    assert not result.skipped and result.sums["packs"] == len(packs) * topology.dp
    assert model.scheduler.num_steps == 1
    assert any(not torch.equal(parameter, before[name]) for name, parameter in model.parameters())


def check_scoring_is_training(ref: Reference, topology: Topology, dtype: torch.dtype) -> None:
    """Scoring gives the bits that training computes on the same packs, so a first PPO ratio is exactly 1."""
    model = build(ref, topology, dtype=dtype)
    packs = pack_sequences(ref.sequences, 64, topology.tp)
    before = {name: parameter.detach().clone() for name, parameter in model.parameters()}
    scored = score_logprobs(model, packs)
    with_entropy, entropies = score_logprobs(model, packs, with_entropy=True)
    again = training_logprobs(model, packs)
    for name, parameter in model.parameters():
        assert parameter.grad is None and torch.equal(parameter, before[name]), name
    for entropy in (False, True):
        seen: dict[int, TokenOutput] = {}

        def loss(output: TokenOutput, index: int, seen: dict[int, TokenOutput] = seen) -> LossTerms:
            assert output.logprobs_T is not None
            seen[index] = output
            return LossTerms(-output.logprobs_T.sum(), packs[index].num_tokens)

        compute_gradients(model, packs, loss, with_entropy=entropy)
        assert sorted(seen) == (list(range(len(packs))) if topology.is_last_stage else [])
        for index, output in seen.items():
            assert output.logprobs_T is not None
            for found in (scored, with_entropy, again):
                assert torch.equal(output.logprobs_T.detach(), found[index]), (entropy, index)
            if entropy:
                assert output.entropy_T is not None and torch.equal(output.entropy_T.detach(), entropies[index])


def check_bfloat16(ref: Reference, topology: Topology) -> None:
    """bf16 weights and activations, fp32 gradients, optimizer and log-softmax; updates below bf16's step survive."""
    model = build(ref, topology, dtype=torch.bfloat16)
    assert {parameter.dtype for _, parameter in model.parameters()} == {torch.bfloat16}
    assert {parameter.main_grad.dtype for _, parameter in model.parameters()} == {torch.float32}
    packs = pack_sequences(ref.sequences, 64)
    for pack, got_T in zip(packs, score_logprobs(model, packs), strict=True):
        assert got_T.dtype == torch.float32
        for row, start, end in pack.segments:
            torch.testing.assert_close(got_T[start + 1 : end], ref.logprobs[row], atol=0.2, rtol=0.05)
    losses = [train_step(model, packs, loss_times(packs, lambda total: total)).sums["loss"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True)


def check_dropout(ref: Reference, topology: Topology) -> None:
    """Dropout acts in training only, follows the seed, and never in scoring."""
    packs = pack_sequences(ref.sequences, 64)
    plain = score_logprobs(build(ref, topology), packs)
    for kind in ("hidden_dropout", "attention_dropout"):
        model = build(ref, topology, **{kind: 0.3})
        for expected_T, got_T in zip(plain, score_logprobs(model, packs), strict=True):
            torch.testing.assert_close(got_T, expected_T)

        def train_loss(model: RoleModel = model) -> float:
            return compute_gradients(model, packs, loss_times(packs, lambda total: total))["loss"]

        seed_everything(3, topology)
        first, second = train_loss(), train_loss()
        seed_everything(3, topology)
        assert train_loss() == first != second


# --------------------------------------------------------------------------- loading in little memory


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of about 200 MB with no tensor above 17 MB."""
    directory = tmp_path_factory.mktemp("wide")
    write_model(
        directory, "llama2", hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, vocab_size=2000,
    )  # fmt: skip
    return directory


def test_loading_takes_the_shard_and_one_tensor(wide_model: Path, tmp_path: Path) -> None:
    write_model(tmp_path, "llama2")
    total = Path(wide_model, "model.safetensors").stat().st_size
    for shard, peak in run_ranks(4, measure_loading, str(wide_model), str(tmp_path), timeout=180):
        assert total > 3.5 * shard
        assert peak < shard + 40 * 2**20 < 0.5 * total, f"peak {peak >> 20} MiB for a shard of {shard >> 20} MiB"


class PeakMemory:
    """Highest resident memory above that at entry, in bytes, by polling. Pages of mapped files count."""

    def __enter__(self) -> PeakMemory:
        self._process, self._stop = psutil.Process(), threading.Event()
        self._start = self._highest = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()
        return self

    def _poll(self) -> None:
        while not self._stop.wait(0.001):
            self._highest = max(self._highest, self._process.memory_info().rss)

    def __exit__(self, *_exc: object) -> None:
        self._highest = max(self._highest, self._process.memory_info().rss)
        self._stop.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        return self._highest - self._start


def measure_loading(directory: str, small: str) -> tuple[int, int]:
    """(bytes of this rank's parameters, peak resident memory of building and loading them)."""
    topology = build_topology(Degrees(tp=2, pp=2))
    seed_everything(1, topology)

    def load(source: str) -> RoleModel:
        model = build_model("reference", read_architecture(source), topology, head="lm", dtype=torch.float32)
        load_hf(model, source)
        return model

    load(small)  # libraries and code are in memory now
    with PeakMemory() as memory:
        model = load(directory)
    return sum(parameter.nbytes for _, parameter in model.parameters()), memory.bytes

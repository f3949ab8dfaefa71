"""Every family in every layout against transformers: log-probs, entropy, gradients, conversion both ways.

One spawn per world size; inside it all families and all layouts of that size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aligner.config.hf_config import padded_vocab_size, read_architecture
from aligner.config.schema import OptimizerConfig
from aligner.data.loader import rows_of_rank
from aligner.data.packing import Pack, pack_sequences
from aligner.distributed import platform
from aligner.distributed.topology import Degrees, Topology, build_topology, seed_everything
from aligner.models.build import build_model
from aligner.models.forward import (
    LossTerms,
    TokenOutput,
    compute_gradients,
    score_logprobs,
    score_rewards,
    score_values,
    score_values_and_ends,
    train_step,
)
from aligner.models.role_model import RoleModel
from aligner.weights.convert import export_tensors, load_hf, save_hf
from tests.distributed.families import FAMILIES, LENGTHS, Reference, reference
from tests.distributed.spawn import run_ranks

TEMPERATURE = 0.8
LAYOUTS = {
    1: [Degrees()],
    2: [Degrees(tp=2), Degrees(tp=2, sequence_parallel=True), Degrees(pp=2), Degrees()],
    4: [Degrees(tp=2, pp=2), Degrees(tp=2, pp=2, sequence_parallel=True), Degrees(tp=2), Degrees(pp=2), Degrees()],
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the references of all families; ranks read it instead of importing transformers."""
    root = tmp_path_factory.mktemp("families")
    torch.save({family: vars(reference(root / family, family, TEMPERATURE)) for family in FAMILIES}, root / "all.pt")
    return root / "all.pt"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_families_and_layouts(references: Path, world_size: int, tmp_path: Path) -> None:
    run_ranks(world_size, check_layouts, references, tmp_path, timeout=300)


def check_layouts(references: Path, scratch: Path) -> None:
    known = {name: Reference(**fields) for name, fields in torch.load(references, weights_only=True).items()}
    for number, degrees in enumerate(LAYOUTS[platform.world_size()]):
        topology = build_topology(degrees, make_global=number == 0)
        seed_everything(5, topology)
        # data-parallel copies of all families would repeat what the smaller world has shown
        families = FAMILIES if topology.dp == 1 else ("llama32", "qwen3")
        for family in families:
            check_language_model(known[family], topology, scratch / f"{number}-{family}")
        for family in ("qwen3", "qwen25"):
            check_scalar_model(known[family], topology)
        check_training(known["smollm2"], topology)
    if platform.world_size() == 1:
        check_single(known)
    if platform.world_size() == 4:  # the last rank holds padded ids only
        topology = build_topology(Degrees(tp=4, sequence_parallel=True))
        seed_everything(5, topology)
        check_language_model(known["llama2"], topology, scratch / "wide")


# --------------------------------------------------------------------------- one family in one layout


def build(ref: Reference, topology: Topology, head: str = "lm", **options: Any) -> RoleModel:
    options.setdefault("optimizer", OptimizerConfig(lr=1e-2, schedule="constant"))
    arch = read_architecture(ref.directory)
    model = build_model("role", arch, topology, head=head, dtype=torch.float32, horizon=10, **options)
    load_hf(model, ref.directory)
    return model


def local_packs(ref: Reference, topology: Topology, capacity: int = 64) -> tuple[list[int], list[Pack]]:
    rows = list(rows_of_rank(ref.sequences, topology.dp_rank, topology.dp))
    return rows, pack_sequences([ref.sequences[row] for row in rows], capacity)


def assert_rows(expected: list[torch.Tensor], rows: list[int], packs: list[Pack], got: list[torch.Tensor]) -> None:
    for pack, got_T in zip(packs, got, strict=True):
        assert got_T.dtype == torch.float32 and got_T.shape == pack.tokens_T.shape
        for row, start, end in pack.segments:
            assert got_T[start] == 0
            torch.testing.assert_close(got_T[start + 1 : end], expected[rows[row]], atol=1e-4, rtol=1e-5)


def assert_gradients(model: RoleModel, expected: dict[str, torch.Tensor]) -> None:
    seen = set()
    for name, grad in export_tensors(model, lambda parameter: parameter.main_grad):
        if grad is not None and name in expected:
            torch.testing.assert_close(grad.view_as(expected[name]), expected[name], atol=2e-6, rtol=2e-4, msg=name)
            seen.add(name)
    if platform.rank() == 0:
        assert seen == set(expected)


def negative_logprob(packs: list[Pack]) -> Any:
    def loss(output: TokenOutput, index: int) -> LossTerms:
        assert output.logprobs_T is not None
        pack = packs[index]
        return LossTerms(-output.logprobs_T.sum(), pack.num_tokens - len(pack.rows))

    return loss


def check_language_model(ref: Reference, topology: Topology, scratch: Path) -> None:
    model = build(ref, topology)
    rows, packs = local_packs(ref, topology)
    logprobs, entropies = score_logprobs(model, packs, temperature=TEMPERATURE, with_entropy=True)
    assert_rows(ref.logprobs, rows, packs, logprobs)
    assert_rows(ref.entropies, rows, packs, entropies)
    sums = compute_gradients(model, packs, negative_logprob(packs), temperature=TEMPERATURE)
    count = sum(LENGTHS) - len(LENGTHS)
    assert sums["count"] == count
    torch.testing.assert_close(sums["loss"], -float(torch.cat(ref.logprobs).sum()), atol=1e-3, rtol=1e-5)
    assert_gradients(model, ref.gradients)
    save_hf(model, scratch, source=ref.directory)
    if platform.rank() == 0:
        assert (scratch / "model.safetensors").read_bytes() == Path(ref.directory, "model.safetensors").read_bytes()
        assert read_architecture(scratch) == model.arch


def check_scalar_model(ref: Reference, topology: Topology) -> None:
    model = build(ref, topology, head="scalar")
    assert not any("output_layer" in name for name, _ in model.parameters())
    if topology.is_last_stage:
        model.module.head.weight.data.copy_(ref.head[None])
        model.weights_changed()
    rows, packs = local_packs(ref, topology)
    values, ends = score_values_and_ends(model, packs)
    assert_rows(ref.values, rows, packs, values)
    for scores, end in zip(score_rewards(model, packs), ends, strict=True):
        assert torch.equal(scores, end)

    def loss(output: TokenOutput, index: int) -> LossTerms:
        assert output.values_T is not None
        pack = packs[index]
        return LossTerms(output.values_T.pow(2).sum(), pack.num_tokens - len(pack.rows))

    compute_gradients(model, packs, loss)
    assert_gradients(model, ref.value_gradients)
    before = torch.cat(values)
    model.absorb_affine(mean=0.7, std=2.0)
    after = torch.cat(score_values(model, packs))
    torch.testing.assert_close(after[before != 0], (before[before != 0] - 0.7) / 2.0, atol=1e-5, rtol=1e-5)


# --------------------------------------------------------------------------- training


def check_training(ref: Reference, topology: Topology) -> None:
    """Two steps of the same batch give the same weights in every layout, split into packs one way or another."""
    expected: dict[str, torch.Tensor] | None = None
    for capacity, distributed in ((1, True), (64, True), (64, False)):
        settings = OptimizerConfig(
            lr=1e-3, clip_grad=0.5, warmup_steps=1, schedule="cosine", use_distributed_optimizer=distributed
        )
        model = build(ref, topology, optimizer=settings)
        _, packs = local_packs(ref, topology, capacity)
        results = [train_step(model, packs, negative_logprob(packs), temperature=TEMPERATURE) for _ in range(2)]
        assert [result.lr for result in results] == [5e-4, 1e-3]
        assert results[1].sums["loss"] < results[0].sums["loss"]
        norm = torch.cat([grad.flatten() for grad in ref.gradients.values()]).norm()
        torch.testing.assert_close(results[0].grad_norm, float(norm), atol=1e-5, rtol=1e-4)
        weights = {name: tensor.clone() for name, tensor in export_tensors(model) if tensor is not None}
        if expected is None:
            expected = weights
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0, msg=name)
    assert expected is not None
    if topology.tp > 1:
        check_no_full_vocabulary(build(ref, topology), local_packs(ref, topology)[1])


class NoFullVocabulary(TorchDispatchMode):
    """Fails when an operation makes a tensor with a dimension of the whole vocabulary."""

    def __init__(self, model: RoleModel) -> None:
        super().__init__()
        self.forbidden = {model.arch.vocab_size, padded_vocab_size(model.arch)}
        self.largest_seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                assert not self.forbidden & set(leaf.shape), f"{func} made {tuple(leaf.shape)}"
                self.largest_seen = max(self.largest_seen, *leaf.shape, 0)
        return result


def check_no_full_vocabulary(model: RoleModel, packs: list[Pack]) -> None:
    with NoFullVocabulary(model) as mode:
        score_logprobs(model, packs, with_entropy=True)
        compute_gradients(model, packs, negative_logprob(packs))
    assert mode.largest_seen > 0


# --------------------------------------------------------------------------- one process


def check_single(known: dict[str, Reference]) -> None:
    topology = build_topology(Degrees())
    ref = known["smollm2"]
    check_packed_equals_padded(ref, topology)
    check_masks(ref, topology)
    with pytest.raises(AssertionError, match="made"):  # the check of the other layouts would notice
        check_no_full_vocabulary(build(ref, topology), local_packs(ref, topology)[1])


def check_packed_equals_padded(ref: Reference, topology: Topology) -> None:
    model = build(ref, topology, optimizer=None)
    together = pack_sequences(ref.sequences, sum(LENGTHS))
    alone = pack_sequences(ref.sequences, 1)
    assert (len(together), len(alone)) == (1, len(LENGTHS))
    [packed_T] = score_logprobs(model, together)
    by_row = {row: packed_T[start:end] for row, start, end in together[0].segments}
    for pack, lonely_T in zip(alone, score_logprobs(model, alone), strict=True):
        torch.testing.assert_close(lonely_T, by_row[pack.rows[0]], atol=1e-5, rtol=1e-5)


def check_masks(ref: Reference, topology: Topology) -> None:
    """Only the tokens asked for are computed, with the same numbers and gradients."""
    model = build(ref, topology)
    _, packs = local_packs(ref, topology)
    generator = torch.Generator().manual_seed(3)
    masks = [torch.rand(pack.tokens_T.numel(), generator=generator) < 0.4 for pack in packs]
    masks[-1][:] = False
    full, some = score_logprobs(model, packs), score_logprobs(model, packs, masks=masks)
    for full_T, some_T, mask_T in zip(full, some, masks, strict=True):
        torch.testing.assert_close(some_T, torch.where(mask_T, full_T, 0.0), atol=1e-5, rtol=1e-5)

    def loss(output: TokenOutput, index: int) -> LossTerms:
        assert output.logprobs_T is not None
        return LossTerms(-(output.logprobs_T * masks[index]).sum(), int(masks[index].sum()))

    compute_gradients(model, packs, loss)
    whole = {name: p.main_grad.clone() for name, p in model.parameters()}
    compute_gradients(model, packs, loss, masks=masks)
    for name, parameter in model.parameters():
        torch.testing.assert_close(parameter.main_grad, whole[name], atol=1e-6, rtol=1e-4, msg=name)

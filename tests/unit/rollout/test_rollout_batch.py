"""RolloutBatch: the invariants of its module docstring, one test each, and its methods."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.data.packing import gather_rows, pack_sequences
from aligner.errors import DataError, TrainingError
from aligner.rollout.batch import LogprobContract, RolloutBatch


def make(rows: int = 3, width: int = 6, *, full: bool = True, seed: int = 0) -> RolloutBatch:
    """A valid batch: prompts of 1..2 tokens, responses that differ in length, every field filled if ``full``."""
    generator = torch.Generator().manual_seed(seed)
    prompts_B = torch.tensor([1 + row % 2 for row in range(rows)])
    lengths_B = torch.tensor([min(width, 3 + row) for row in range(rows)])
    positions_T = torch.arange(width)
    loss_mask_BT = (positions_T >= prompts_B[:, None]) & (positions_T < lengths_B[:, None])

    def on_mask(sign: float = 1.0) -> torch.Tensor:
        return sign * torch.rand(rows, width, generator=generator) * loss_mask_BT

    batch = RolloutBatch(
        tokens_BT=torch.randint(0, 50, (rows, width), generator=generator),
        lengths_B=lengths_B,
        prompt_lengths_B=prompts_B,
        loss_mask_BT=loss_mask_BT,
        group_id_B=torch.arange(rows) // 2,
        weights_version_B=torch.full((rows,), 7),
        finish_reasons=tuple(("stop", "length", "abort")[row % 3] for row in range(rows)),
        metadata=tuple({"row": row, "domain": "é"} for row in range(rows)),
        logprob_contract=LogprobContract(temperature=0.7),
        engine_logprobs_BT=on_mask(-1),
    )
    if not full:
        return batch
    rewards_BT = on_mask()
    return batch.replace(
        policy_logprobs_BT=on_mask(-1),
        reference_logprobs_BT=on_mask(-1),
        values_BT=on_mask(),
        bootstrap_values_B=torch.rand(rows, generator=generator),
        scores_B=torch.rand(rows, generator=generator),
        token_rewards_BT=rewards_BT,
        rewards_B=rewards_BT.sum(dim=1),
        train_mask_BT=loss_mask_BT.clone(),
        advantages_BT=on_mask(),
        returns_BT=on_mask(),
    )


def changed(name: str, index: Any, value: Any, batch: RolloutBatch | None = None) -> RolloutBatch:
    batch = batch or make()
    tensor = getattr(batch, name).clone()
    tensor[index] = value
    return batch.replace(**{name: tensor})


def assert_equal(a: RolloutBatch, b: RolloutBatch) -> None:
    for field in dataclasses.fields(a):
        left, right = getattr(a, field.name), getattr(b, field.name)
        same = torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
        assert same, field.name


# ----------------------------------------------------------------------------------- invariants


@pytest.mark.parametrize("full", [True, False])
def test_a_valid_batch_passes(full: bool) -> None:
    batch = make(full=full)
    assert batch.validate() is batch


def test_invariant_1_shapes() -> None:
    batch = make()
    with pytest.raises(ValueError, match=r"values_BT has shape \(3, 5\), must be \(3, 6\)"):
        batch.replace(values_BT=torch.zeros(3, 5)).validate()
    with pytest.raises(ValueError, match=r"scores_B has shape \(2,\), must be \(3,\)"):
        batch.replace(scores_B=torch.zeros(2)).validate()
    with pytest.raises(ValueError, match="2 finish reasons"):
        batch.replace(finish_reasons=("stop", "stop")).validate()
    with pytest.raises(ValueError, match="1 metadata entries"):
        batch.replace(metadata=({},)).validate()
    with pytest.raises(ValueError, match="at least 1"):
        batch.select([]).validate()


def test_invariant_2_dtypes() -> None:
    batch = make()
    with pytest.raises(ValueError, match="tokens_BT is torch.int32"):
        batch.replace(tokens_BT=batch.tokens_BT.int()).validate()
    with pytest.raises(ValueError, match="loss_mask_BT is torch.int64"):
        batch.replace(loss_mask_BT=batch.loss_mask_BT.long()).validate()
    with pytest.raises(ValueError, match="values_BT is torch.float64"):
        batch.replace(values_BT=torch.zeros(3, 6, dtype=torch.float64)).validate()


@pytest.mark.parametrize(
    ("name", "value"), [("prompt_lengths_B", 0), ("prompt_lengths_B", 3), ("lengths_B", 7), ("lengths_B", 1)]
)
def test_invariant_3_lengths(name: str, value: int) -> None:
    with pytest.raises(ValueError, match="row 0: .* 1 <= prompt length < length <= width must hold"):
        changed(name, 0, value).validate()


def test_invariant_4_masks() -> None:
    with pytest.raises(ValueError, match="prompt or of the padding"):
        changed("loss_mask_BT", (0, 0), True).validate()
    with pytest.raises(ValueError, match="prompt or of the padding"):
        changed("loss_mask_BT", (0, 3), True).validate()
    with pytest.raises(ValueError, match="no token in some row"):
        changed("loss_mask_BT", 1, False).validate()
    gap = changed("loss_mask_BT", (2, 2), False, make(full=False))
    gap.validate()  # tool output inside a response
    with pytest.raises(ValueError, match="train_mask_BT marks"):
        gap.replace(train_mask_BT=make().train_mask_BT).validate()


def test_invariant_5_reasons_groups_versions() -> None:
    with pytest.raises(ValueError, match=r"\['eos'\] are not among"):
        make().replace(finish_reasons=("stop", "eos", "length")).validate()
    for name in ("group_id_B", "weights_version_B"):
        with pytest.raises(ValueError, match="must not be negative"):
            changed(name, 0, -1).validate()


@pytest.mark.parametrize("name", ["engine_logprobs_BT", "policy_logprobs_BT", "reference_logprobs_BT"])
def test_invariant_6_logprobs(name: str) -> None:
    with pytest.raises(TrainingError, match=f"{name} holds numbers that are not finite"):
        changed(name, (0, 1), -math.inf).validate()
    with pytest.raises(ValueError, match=f"{name} holds log-probabilities above 0"):
        changed(name, (0, 1), 0.5).validate()
    changed(name, (0, 0), math.nan).validate()  # the first token has no log-prob: never read


@pytest.mark.parametrize("name", ["values_BT", "token_rewards_BT", "advantages_BT", "returns_BT"])
def test_invariant_7_finite_tokens(name: str) -> None:
    with pytest.raises(TrainingError, match=f"{name} holds numbers that are not finite"):
        changed(name, (0, 1), math.nan).validate()


@pytest.mark.parametrize("name", ["scores_B", "rewards_B", "bootstrap_values_B"])
def test_invariant_7_finite_samples(name: str) -> None:
    with pytest.raises(TrainingError, match=f"{name} holds numbers that are not finite"):
        changed(name, 1, math.inf).validate()


@pytest.mark.parametrize("name", ["token_rewards_BT", "advantages_BT", "returns_BT"])
@pytest.mark.parametrize("position", [0, 5])
def test_invariant_8_zero_outside(name: str, position: int) -> None:
    with pytest.raises(ValueError, match=f"{name} is not 0 outside"):
        changed(name, (0, position), 1.0).validate()


def test_invariant_8_a_tools_reward_is_allowed_but_not_its_advantage() -> None:
    gap = changed("loss_mask_BT", (2, 2), False, make(full=False))
    tool_BT = torch.zeros(3, 6)
    tool_BT[2, 2] = 0.5
    gap.replace(token_rewards_BT=tool_BT).validate()
    with pytest.raises(ValueError, match="advantages_BT is not 0 outside"):
        gap.replace(advantages_BT=tool_BT).validate()


def test_invariant_9_rewards_are_row_sums() -> None:
    with pytest.raises(ValueError, match="rewards_B is not the row sum"):
        changed("rewards_B", 0, 9.0).validate()


# -------------------------------------------------------------------------------------- methods


def test_sequences_pack_and_come_back() -> None:
    batch = make()
    sequences = batch.sequences()
    assert [s.numel() for s in sequences] == batch.lengths_B.tolist()
    packs = pack_sequences(sequences, 8)
    rebuilt = gather_rows(packs, [pack.tokens_T for pack in packs], len(batch), 6)
    real = torch.arange(6) < batch.lengths_B[:, None]
    assert torch.equal(rebuilt, torch.where(real, batch.tokens_BT, 0))


def test_pad_ids_may_be_real_tokens() -> None:
    batch = changed("tokens_BT", (slice(None), slice(None)), 0).validate()
    assert [s.tolist() for s in batch.sequences()] == [[0] * 3, [0] * 4, [0] * 5]


def test_select_keeps_order_and_all_fields() -> None:
    batch = make()
    picked = batch.select([2, 0]).validate()
    assert torch.equal(picked.tokens_BT, batch.tokens_BT[[2, 0]])
    assert picked.finish_reasons == ("abort", "stop")
    assert [entry["row"] for entry in picked.metadata] == [2, 0]
    assert_equal(batch.select(range(3)), batch)


def test_concat_pads_to_the_widest() -> None:
    left, right = make(2, 4), make(3, 7, seed=1)
    joined = RolloutBatch.concat([left, right]).validate()
    assert joined.tokens_BT.shape == (5, 7)
    assert_equal(joined.select([2, 3, 4]), right)
    assert torch.equal(joined.values_BT[:2, :4], left.values_BT)  # type: ignore[index, arg-type]


def test_concat_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="values_BT"):
        RolloutBatch.concat([make(), make().replace(values_BT=None)])
    with pytest.raises(ValueError, match="differs from"):
        RolloutBatch.concat([make(), make().replace(logprob_contract=LogprobContract(full_softmax=False))])


@settings(deadline=None, max_examples=30)
@given(order=st.permutations(range(5)), cut=st.integers(1, 4))
def test_concat_of_selections_is_the_selection(order: list[int], cut: int) -> None:
    batch = make(5, 8)
    parts = [batch.select(order[:cut]), batch.select(order[cut:])]
    assert_equal(RolloutBatch.concat(parts), batch.select(order))


def test_lengths_and_truncation() -> None:
    batch = make()
    assert batch.response_lengths_B.tolist() == [2, 2, 4]
    assert batch.truncated_B.tolist() == [False, True, True]
    assert len(batch) == 3


@pytest.mark.parametrize("full", [True, False])
def test_save_and_load(tmp_path: Path, full: bool) -> None:
    batch = make(full=full)
    batch.save(tmp_path / "dump")
    assert_equal(RolloutBatch.load(tmp_path / "dump"), batch)
    assert json.loads((tmp_path / "dump" / "batch.json").read_text())["metadata"][1] == {"row": 1, "domain": "é"}
    assert sorted(p.name for p in (tmp_path / "dump").iterdir()) == ["batch.json", "tensors.safetensors"]


def test_a_batch_with_non_finite_numbers_can_be_dumped(tmp_path: Path) -> None:
    batch = changed("values_BT", (0, 1), math.inf)
    batch.save(tmp_path)
    assert_equal(RolloutBatch.load(tmp_path), batch)


def test_load_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a saved rollout batch"):
        RolloutBatch.load(tmp_path)
    make().save(tmp_path)
    (tmp_path / "tensors.safetensors").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="not a saved rollout batch"):
        RolloutBatch.load(tmp_path)
    make().save(tmp_path)
    (tmp_path / "batch.json").write_text("{}")
    with pytest.raises(DataError, match="finish_reasons"):
        RolloutBatch.load(tmp_path)


def test_a_batch_is_a_value() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().values_BT = None  # type: ignore[misc]

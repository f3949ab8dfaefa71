"""The losses against numbers worked out by hand, an independent loop, and properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.algorithms.losses import (
    bradley_terry_loss,
    explained_variance,
    ppo_policy_loss,
    ppo_value_loss,
    sft_loss,
)

NAN = math.nan


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mask(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


# ------------------------------------------------------------------------------------------ SFT


def test_sft_loss_by_hand() -> None:
    # tokens 1 and 3 count: 0.5 + 2.0 = 2.5; what is masked may be anything
    terms = sft_loss(t(NAN, -0.5, -7.0, -2.0), mask(0, 1, 0, 1))
    assert terms.loss_sum.item() == 2.5
    assert terms.count == 2


def test_sft_gradient_is_minus_one_on_the_mask_and_zero_elsewhere() -> None:
    logprobs_T = t(-1.0, -2.0, NAN).requires_grad_()
    sft_loss(logprobs_T, mask(0, 1, 0)).loss_sum.backward()
    assert logprobs_T.grad is not None and logprobs_T.grad.tolist() == [0.0, -1.0, 0.0]


# -------------------------------------------------------------------------------- Bradley-Terry


def test_bradley_terry_by_hand() -> None:
    # margins: 2 - 1 = 1; 0 - 3 = -3; 1 - 1 = 0
    # losses: log(1 + e^-1) = 0.313262; log(1 + e^3) = 3.048587; log 2 = 0.693147; sum 4.054996
    terms = bradley_terry_loss(t(2.0, 0.0, 1.0), t(1.0, 3.0, 1.0))
    assert terms.loss_sum.item() == pytest.approx(4.054996, abs=1e-6)
    assert terms.count == 3
    assert terms.sums["accuracy"].item() == 1.0  # the first pair only: a tie is not right
    assert terms.sums["margin"].item() == -2.0
    assert terms.sums["chosen_score"].item() == 3.0
    assert terms.sums["rejected_score"].item() == 5.0


def test_bradley_terry_gradient_by_hand() -> None:
    # d/dc -log sigmoid(c - r) = sigmoid(c - r) - 1; at c = r: -0.5, and +0.5 for r
    chosen, rejected = t(4.0).requires_grad_(), t(4.0).requires_grad_()
    bradley_terry_loss(chosen, rejected).loss_sum.backward()
    assert chosen.grad is not None and rejected.grad is not None
    assert (chosen.grad.item(), rejected.grad.item()) == (-0.5, 0.5)


def test_bradley_terry_does_not_overflow() -> None:
    # -log sigmoid(-1e4) = 1e4
    assert bradley_terry_loss(t(-1e4), t(0.0)).loss_sum.item() == pytest.approx(1e4)


# ---------------------------------------------------------------------------------- PPO policy


def test_policy_loss_by_hand() -> None:
    # clip_ratio 0.2, ratios exp(new - old):
    #   token 0: ratio 1.5,  A = +2: free -3.0, clipped -2 * 1.2 = -2.4: max -2.4, the clip binds
    #   token 1: ratio 0.5,  A = +2: free -1.0, clipped -2 * 0.8 = -1.6: max -1.0
    #   token 2: ratio 0.5,  A = -1: free +0.5, clipped +0.8:            max +0.8, the clip binds
    #   token 3: ratio 1.5,  A = -1: free +1.5, clipped +1.2:            max +1.5
    #   token 4: not in the mask
    # sum: -2.4 - 1.0 + 0.8 + 1.5 = -1.1; ratios: 1.5 + 0.5 + 0.5 + 1.5 = 4
    # k3 of KL(old || new) = ratio - 1 - log ratio: (4 - 4) - 2 * log 1.5 - 2 * log 0.5 = 0.575364
    old_T = t(-1.0, -1.0, -1.0, -1.0, NAN)
    new_T = old_T + t(1.5, 0.5, 0.5, 1.5, 1.0).log()
    terms = ppo_policy_loss(new_T, old_T, t(2.0, 2.0, -1.0, -1.0, NAN), mask(1, 1, 1, 1, 0), clip_ratio=0.2)
    assert terms.loss_sum.item() == pytest.approx(-1.1)
    assert terms.count == 4
    assert terms.sums["policy_loss"].item() == pytest.approx(-1.1)
    assert terms.sums["ratio"].item() == pytest.approx(4.0)
    assert terms.sums["clip_fraction"].item() == 2.0
    assert terms.sums["approx_kl_k3"].item() == pytest.approx(0.575364, abs=1e-6)
    assert "entropy" not in terms.sums


def test_entropy_bonus_by_hand() -> None:
    # ratio 1, A = 1 on two tokens: -2; entropies 0.5 + 1.5 = 2; -2 - 0.1 * 2 = -2.2
    zeros = t(0.0, 0.0, 0.0)
    terms = ppo_policy_loss(
        zeros, zeros, t(1.0, 1.0, 9.0), mask(1, 1, 0), clip_ratio=0.2, entropy_T=t(0.5, 1.5, NAN), entropy_coef=0.1
    )
    assert terms.loss_sum.item() == pytest.approx(-2.2)
    assert terms.sums["policy_loss"].item() == pytest.approx(-2.0)
    assert terms.sums["entropy"].item() == pytest.approx(2.0)


def test_entropy_is_reported_without_a_bonus() -> None:
    zeros = t(0.0, 0.0)
    terms = ppo_policy_loss(zeros, zeros, t(1.0, 1.0), mask(1, 1), clip_ratio=0.2, entropy_T=t(0.5, 1.5))
    assert terms.loss_sum.item() == -2.0
    assert terms.sums["entropy"].item() == 2.0


def test_entropy_bonus_needs_the_entropy() -> None:
    with pytest.raises(ValueError, match="no entropy"):
        ppo_policy_loss(t(0.0), t(0.0), t(1.0), mask(1), clip_ratio=0.2, entropy_coef=0.1)


def test_policy_gradient_by_hand() -> None:
    # d(-A r)/d logprob = -A r: at ratio 1 with A = 3: -3; where the clip binds: 0; outside the mask: 0
    old_T = t(-1.0, -1.0, NAN)
    new_T = (old_T + t(0.0, 1.0, 0.0)).requires_grad_()
    ppo_policy_loss(new_T, old_T, t(3.0, 3.0, NAN), mask(1, 1, 0), clip_ratio=0.2).loss_sum.backward()
    assert new_T.grad is not None and new_T.grad.tolist() == [-3.0, 0.0, 0.0]


# ----------------------------------------------------------------------------------- PPO value


def test_value_loss_by_hand() -> None:
    # value_clip 0.2:
    #   token 0: V 1.0, old 0.0, R 2.0: (1)^2 = 1; clipped V 0.2: (1.8)^2 = 3.24: the clip binds
    #   token 1: V 1.0, old 0.0, R 0.0: 1;         clipped V 0.2: 0.04:             1
    #   token 2: V 0.1, old 0.0, R 0.6: 0.25;      inside the range: equal:        0.25
    #   token 3: not in the mask
    # loss: 0.5 * (3.24 + 1 + 0.25) = 2.245
    terms = ppo_value_loss(
        t(1.0, 1.0, 0.1, 5.0), t(0.0, 0.0, 0.0, NAN), t(2.0, 0.0, 0.6, NAN), mask(1, 1, 1, 0), value_clip=0.2
    )
    assert terms.loss_sum.item() == pytest.approx(2.245)
    assert terms.count == 3
    assert terms.sums["value_clip_fraction"].item() == 1.0


def test_value_clip_zero_is_the_squared_error() -> None:
    # 0.5 * (1 + 1) = 1
    terms = ppo_value_loss(t(1.0, 1.0), t(0.0, 0.0), t(2.0, 0.0), mask(1, 1), value_clip=0.0)
    assert terms.loss_sum.item() == 1.0
    assert terms.sums["value_clip_fraction"].item() == 0.0


def test_value_gradient_by_hand() -> None:
    # d 0.5 (V - R)^2 / dV = V - R = -1 where the clip does not bind, 0 where it binds and outside the mask
    values_T = t(0.0, 1.0, NAN).requires_grad_()
    ppo_value_loss(values_T, t(0.0, 0.0, NAN), t(1.0, 2.0, NAN), mask(1, 1, 0), value_clip=0.2).loss_sum.backward()
    assert values_T.grad is not None and values_T.grad.tolist() == [-1.0, 0.0, 0.0]


def test_explained_variance_by_hand() -> None:
    # returns 0, 2: variance 1. values 0.5, 1.5: errors -0.5, 0.5: variance 0.25. 1 - 0.25 / 1 = 0.75
    assert explained_variance(t(0.5, 1.5), t(0.0, 2.0)) == pytest.approx(0.75)
    assert explained_variance(t(1.0, 3.0), t(0.0, 2.0)) == 1.0  # a constant error explains all of it


def test_explained_variance_of_constant_returns_is_zero() -> None:
    rounded = torch.tensor([0.1, 0.1, 0.1]) * torch.tensor([1.0, 1.0 + 2**-23, 1.0])  # single precision's last bit
    assert rounded.unique().numel() == 2
    for returns_N in (t(0.1, 0.1), t(0.1, 0.1 + 1e-9), t(), rounded):
        assert explained_variance(torch.linspace(0, 1, returns_N.numel()), returns_N) == 0.0


# ---------------------------------------------------------------- against an independent loop


def loop_policy(new: list, old: list, adv: list, keep: list, clip: float, ent: list, coef: float) -> dict[str, float]:
    out = {"loss": 0.0, "ratio": 0.0, "clip_fraction": 0.0, "approx_kl_k3": 0.0, "entropy": 0.0}
    for n, o, a, k, e in zip(new, old, adv, keep, ent, strict=True):
        if not k:
            continue
        r = math.exp(n) / math.exp(o)
        bounded = min(max(r, 1 - clip), 1 + clip)
        surrogate = min(r * a, bounded * a)
        out["loss"] -= surrogate + coef * e
        out["ratio"] += r
        out["clip_fraction"] += 1.0 if surrogate < r * a else 0.0
        out["approx_kl_k3"] += r - 1 - (n - o)
        out["entropy"] += e
    return out


def loop_value(new: list, old: list, ret: list, keep: list, clip: float) -> dict[str, float]:
    out = {"loss": 0.0, "value_clip_fraction": 0.0}
    for v, o, r, k in zip(new, old, ret, keep, strict=True):
        if k:
            near = v if abs(v - o) <= clip else o + math.copysign(clip, v - o)
            out["loss"] += 0.5 * max((v - r) ** 2, (near - r) ** 2)
            out["value_clip_fraction"] += 1.0 if (near - r) ** 2 > (v - r) ** 2 else 0.0
    return out


@pytest.mark.parametrize("seed", range(5))
def test_losses_equal_the_loops(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    new, old, adv, ent, ret = (torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(5))
    keep = torch.rand(50, generator=generator) < 0.7
    lists = [x.tolist() for x in (new, old, adv, keep, ent, ret)]
    policy = ppo_policy_loss(new, old, adv, keep, clip_ratio=0.3, entropy_T=ent, entropy_coef=0.05)
    expected = loop_policy(*lists[:4], 0.3, lists[4], 0.05)
    assert policy.loss_sum.item() == pytest.approx(expected.pop("loss"))
    for name, value in expected.items():
        assert policy.sums[name].item() == pytest.approx(value), name
    value = ppo_value_loss(new, old, ret, keep, value_clip=0.4)
    expected = loop_value(lists[0], lists[1], lists[5], lists[3], 0.4)
    assert value.loss_sum.item() == pytest.approx(expected.pop("loss"))
    assert value.sums["value_clip_fraction"].item() == expected["value_clip_fraction"]
    assert value.count == policy.count == int(keep.sum())


# ----------------------------------------------------------------------------------- properties

numbers = st.floats(-5, 5, width=32)
rows = st.lists(st.tuples(numbers, numbers, numbers, st.booleans()), min_size=2, max_size=12)


@settings(deadline=None, max_examples=50)
@given(rows=rows, cut=st.integers(0, 12))
def test_sums_of_parts_add_up_to_the_whole(rows: list, cut: int) -> None:
    columns = [t(*(row[i] for row in rows)) for i in range(3)]
    keep = torch.tensor([row[3] for row in rows])

    def both(part: slice) -> list:
        a, b, c = (column[part] for column in columns)
        return [
            ppo_policy_loss(a, b, c, keep[part], clip_ratio=0.2),
            ppo_value_loss(a, b, c, keep[part], value_clip=0.2),
            sft_loss(a, keep[part]),
        ]

    for whole, left, right in zip(both(slice(None)), both(slice(cut)), both(slice(cut, None)), strict=True):
        assert whole.count == left.count + right.count
        assert whole.loss_sum.item() == pytest.approx((left.loss_sum + right.loss_sum).item(), rel=1e-9, abs=1e-9)
        for name in whole.sums:
            parts = (left.sums[name] + right.sums[name]).item()
            assert whole.sums[name].item() == pytest.approx(parts, rel=1e-9, abs=1e-9)


@settings(deadline=None, max_examples=50)
@given(rows=rows)
def test_before_the_first_update_ratio_is_one_and_nothing_is_clipped(rows: list) -> None:
    old_T, adv_T = t(*(row[0] for row in rows)), t(*(row[1] for row in rows))
    keep = torch.tensor([row[3] for row in rows])
    terms = ppo_policy_loss(old_T, old_T, adv_T, keep, clip_ratio=0.2)
    assert terms.sums["ratio"].item() == terms.count
    assert terms.sums["clip_fraction"].item() == 0
    assert terms.sums["approx_kl_k3"].item() == 0
    assert terms.loss_sum.item() == pytest.approx(-float(adv_T[keep].sum()), abs=1e-9)


def test_sums_carry_no_gradient() -> None:
    logprobs_T = t(-1.0, -2.0).requires_grad_()
    terms = ppo_policy_loss(
        logprobs_T, t(-1.0, -1.0), t(1.0, 1.0), mask(1, 1), clip_ratio=0.2, entropy_T=-logprobs_T, entropy_coef=0.1
    )
    assert terms.loss_sum.requires_grad
    assert not any(value.requires_grad for value in terms.sums.values())

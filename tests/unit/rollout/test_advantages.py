"""KL estimators, token rewards, truncation, GAE and whitening: by hand, against independent loops, and properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.rollout.advantages import (
    Moments,
    TruncationEffect,
    apply_truncation,
    generalized_advantages,
    kl_k1,
    kl_k3,
    moment_sums,
    token_rewards,
    whiten,
    with_advantages,
)
from aligner.rollout.batch import RolloutBatch


def t(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mask(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


def close(actual: torch.Tensor, expected: list, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, t(expected).to(actual.dtype), rtol=0, atol=tolerance)


# ------------------------------------------------------------------------------------------- KL


def test_kl_estimators_by_hand() -> None:
    # p = 0.5, q = 0.25: k1 = log 2 = 0.693147; r = q/p = 0.5: k3 = -0.5 + 0.693147 = 0.193147
    # p = 0.25, q = 0.5: k1 = -0.693147;        r = 2:          k3 = 1 - 0.693147 = 0.306853
    p, q = t([0.5, 0.25]).log(), t([0.25, 0.5]).log()
    close(kl_k1(p, q), [0.693147, -0.693147], 1e-6)
    close(kl_k3(p, q), [0.193147, 0.306853], 1e-6)


def test_kl_estimators_are_unbiased() -> None:
    # the expectation over the whole vocabulary under p is the KL itself, for both
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum").item()  # KL(p || q)
    assert (p.exp() * kl_k1(p, q)).sum().item() == pytest.approx(kl)
    assert (p.exp() * kl_k3(p, q)).sum().item() == pytest.approx(kl)


@settings(deadline=None, max_examples=50)
@given(p=st.floats(-30, 0), q=st.floats(-30, 0))
def test_k3_is_never_negative_and_zero_at_equality(p: float, q: float) -> None:
    assert kl_k3(t([p]), t([q])).item() >= 0
    assert kl_k3(t([p]), t([p])).item() == 0


# -------------------------------------------------------------------------------- token rewards


def test_token_rewards_by_hand() -> None:
    # coefficient 0.1; row 0: prompt 2, length 4: KL tokens 2 and 3: 0.5 and -1.0; score 2 on token 3
    #   token 2: -0.05; token 3: +0.1 + 2 = 2.1
    # row 1: prompt 1, length 3 (padded): KL tokens 1 and 2: 1.0 and 0; score -1 on token 2
    #   token 1: -0.1; token 2: -1
    # prompt and padding hold numbers that must not matter
    policy = t([[9.0, 9.0, -1.0, -3.0], [9.0, -1.0, -2.0, 9.0]])
    reference = t([[0.0, 0.0, -1.5, -2.0], [0.0, -2.0, -2.0, 0.0]])
    loss_mask = mask([[0, 0, 1, 1], [0, 1, 1, 0]])
    rewards = token_rewards(policy, reference, loss_mask, torch.tensor([4, 3]), t([2.0, -1.0]), 0.1)
    close(rewards, [[0, 0, -0.05, 2.1], [0, -0.1, -1.0, 0]])


def test_score_is_on_the_last_real_token_even_if_a_tool_wrote_it() -> None:
    # token 2 is tool output: no KL on it, but the score
    rewards = token_rewards(t([[0, -1, -1]]), t([[0, -2, -9]]), mask([[0, 1, 0]]), torch.tensor([3]), t([5.0]), 0.5)
    close(rewards, [[0, -0.5, 5.0]])


# ---------------------------------------------------------------------------------- truncation


def truncate(rule: str, bootstrap: torch.Tensor | None = None) -> TruncationEffect:
    loss_mask = mask([[0, 1, 1], [0, 1, 1]])
    return apply_truncation(rule, t([3.0, 4.0]), mask([0, 1]), loss_mask, bootstrap_values_B=bootstrap, penalty=1.5)


def test_bootstrap_gives_the_value_in_place_of_the_score() -> None:
    effect = truncate("bootstrap", t([7.0, 0.5]))
    close(effect.scores_B, [3.0, 0.0])
    close(effect.bootstrap_values_B, [0.0, 0.5])
    assert effect.train_mask_BT.tolist() == [[False, True, True]] * 2


def test_penalize_lowers_the_score_of_cut_rows() -> None:
    effect = truncate("penalize")
    close(effect.scores_B, [3.0, 2.5])
    close(effect.bootstrap_values_B, [0.0, 0.0])
    assert effect.train_mask_BT.tolist() == [[False, True, True]] * 2


def test_mask_leaves_cut_rows_out() -> None:
    effect = truncate("mask")
    close(effect.scores_B, [3.0, 4.0])
    assert effect.train_mask_BT.tolist() == [[False, True, True], [False, False, False]]


def test_bootstrap_needs_values_and_rules_have_names() -> None:
    with pytest.raises(ValueError, match="bootstrap_values_B is None"):
        truncate("bootstrap")
    with pytest.raises(ValueError, match="'cut' is not among"):
        truncate("cut")


# ----------------------------------------------------------------------------------------- GAE


def test_gae_by_hand() -> None:
    # discount 0.9, lambda 0.5, values 1, 2, 3 on tokens 1..3, rewards 0.1, 0.2, 1.0, no bootstrap
    #   token 3: delta = 1.0 - 3 = -2;                   A = -2;                        return 1
    #   token 2: delta = 0.2 + 0.9 * 3 - 2 = 0.9;        A = 0.9 + 0.45 * -2 = 0;       return 2
    #   token 1: delta = 0.1 + 0.9 * 2 - 1 = 0.9;        A = 0.9 + 0.45 * 0 = 0.9;      return 1.9
    advantages, returns = generalized_advantages(
        t([[0, 0.1, 0.2, 1.0]]), t([[8, 1, 2, 3]]), mask([[0, 1, 1, 1]]), discount=0.9, gae_lambda=0.5
    )
    close(advantages, [[0, 0.9, 0, -2]])
    close(returns, [[0, 1.9, 2, 1]])


def test_gae_bootstraps_after_the_last_token() -> None:
    # as above, with value 4 after the last token: token 3: delta = 1 + 0.9 * 4 - 3 = 1.6
    #   token 2: 0.9 + 0.45 * 1.6 = 1.62; token 1: 0.9 + 0.45 * 1.62 = 1.629. The padding (token 4) changes nothing.
    advantages, returns = generalized_advantages(
        t([[0, 0.1, 0.2, 1.0, 0]]),
        t([[8, 1, 2, 3, 8]]),
        mask([[0, 1, 1, 1, 0]]),
        discount=0.9,
        gae_lambda=0.5,
        bootstrap_values_B=t([4.0]),
    )
    close(advantages, [[0, 1.629, 1.62, 1.6, 0]])
    close(returns, [[0, 2.629, 3.62, 4.6, 0]])


def test_gae_over_a_gap_by_hand() -> None:
    # two turns: the policy wrote tokens 1 and 4; a tool wrote 2, 3 (reward 0.3) and 5, the last (the score, 1)
    # discount 0.9, lambda 0.5, values at the policy's tokens 1 and 2
    #   token 4: reward 0.2 + 1 (from token 5) = 1.2; delta = 1.2 - 2 = -0.8; A = -0.8
    #   token 1: reward 0.1 + 0.3 (from token 3) = 0.4; delta = 0.4 + 0.9 * 2 - 1 = 1.2; A = 1.2 + 0.45 * -0.8 = 0.84
    advantages, returns = generalized_advantages(
        t([[0, 0.1, 0, 0.3, 0.2, 1.0]]),
        t([[8, 1, 8, 8, 2, 8]]),
        mask([[0, 1, 0, 0, 1, 0]]),
        discount=0.9,
        gae_lambda=0.5,
    )
    close(advantages, [[0, 0.84, 0, 0, -0.8, 0]])
    close(returns, [[0, 1.84, 0, 0, 1.2, 0]])


def steps_then_formula(
    rewards: list, values: list, keep: list, gamma: float, lam: float, bootstrap: float
) -> tuple[list, list]:
    """GAE as the paper writes it: A_k = sum over l of (gamma lambda)^l delta_{k+l}, over the list of steps."""
    steps = [i for i, k in enumerate(keep) if k]
    bounds = [*steps, len(keep)]
    r = [sum(rewards[bounds[j] : bounds[j + 1]]) for j in range(len(steps))]
    v = [values[i] for i in steps] + [bootstrap]
    delta = [r[j] + gamma * v[j + 1] - v[j] for j in range(len(steps))]
    advantages, returns = [0.0] * len(keep), [0.0] * len(keep)
    for j, i in enumerate(steps):
        advantages[i] = sum((gamma * lam) ** (m - j) * delta[m] for m in range(j, len(steps)))
        returns[i] = advantages[i] + v[j]
    return advantages, returns


unit = st.floats(0, 1)
cells = st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.booleans()), min_size=1, max_size=10)


@settings(deadline=None, max_examples=80)
@given(cells=cells, gamma=unit, lam=unit, bootstrap=st.floats(-3, 3))
def test_gae_equals_the_papers_sum_for_any_mask(cells: list, gamma: float, lam: float, bootstrap: float) -> None:
    rewards, values, keep = (list(column) for column in zip(*cells, strict=True))
    expected_advantages, expected_returns = steps_then_formula(rewards, values, keep, gamma, lam, bootstrap)
    advantages, returns = generalized_advantages(
        t([rewards]), t([values]), mask([keep]), discount=gamma, gae_lambda=lam, bootstrap_values_B=t([bootstrap])
    )
    close(advantages, [expected_advantages], 1e-7)
    close(returns, [expected_returns], 1e-7)


@settings(deadline=None, max_examples=50)
@given(cells=cells, gamma=unit)
def test_with_lambda_one_returns_are_discounted_sums_of_rewards(cells: list, gamma: float) -> None:
    rewards, values, _ = (list(column) for column in zip(*cells, strict=True))
    _, returns = generalized_advantages(
        t([rewards]), t([values]), mask([[1] * len(cells)]), discount=gamma, gae_lambda=1.0
    )
    expected = [sum(gamma ** (j - i) * rewards[j] for j in range(i, len(cells))) for i in range(len(cells))]
    close(returns, [expected], 1e-7)


# ----------------------------------------------------------------------------------- whitening


def test_whitening_by_hand() -> None:
    # valid values 1, 2, 3, 6: mean 3, variance (4 + 1 + 0 + 9) / 4 = 3.5
    values, keep = t([[1.0, 2.0, 99.0], [3.0, 6.0, 99.0]]), mask([[1, 1, 0], [1, 1, 0]])
    moments = Moments.from_sums(moment_sums(values, keep))
    assert moments.mean == pytest.approx(3.0)
    assert moments.std == pytest.approx(math.sqrt(3.5))
    s = math.sqrt(3.5)
    close(whiten(values, keep, moments), [[-2 / s, -1 / s, 0], [0, 3 / s, 0]], 1e-7)


@settings(deadline=None, max_examples=50)
@given(cells=st.lists(st.tuples(st.floats(-1e3, 1e3), st.booleans()), min_size=1, max_size=20), cut=st.integers(0, 20))
def test_moments_of_parts_are_those_of_the_whole(cells: list, cut: int) -> None:
    values, keep = t([[cell[0] for cell in cells]]), mask([[cell[1] for cell in cells]])
    left, right = moment_sums(values[:, :cut], keep[:, :cut]), moment_sums(values[:, cut:], keep[:, cut:])
    joined = Moments.from_sums({name: left[name] + right[name] for name in left})
    whole = Moments.from_sums(moment_sums(values, keep))
    assert joined.mean == pytest.approx(whole.mean, abs=1e-6)
    assert joined.std == pytest.approx(whole.std, abs=1e-3)


def test_whitening_nothing_and_constants_gives_zeros() -> None:
    values = t([[2.0, 2.0]])
    for keep in (mask([[0, 0]]), mask([[1, 1]])):
        moments = Moments.from_sums(moment_sums(values, keep))
        close(whiten(values, keep, moments), [[0.0, 0.0]])


# ----------------------------------------------------------------------------------- whole step


def make_batch(finish: tuple[str, str] = ("stop", "length")) -> RolloutBatch:
    """Row 0: prompt 1, response tokens 1 and 2. Row 1: prompt 2, response tokens 2 and 3."""
    f = lambda values: torch.tensor(values, dtype=torch.float32)  # noqa: E731
    return RolloutBatch(
        tokens_BT=torch.tensor([[5, 6, 7, 0], [5, 5, 8, 9]]),
        lengths_B=torch.tensor([3, 4]),
        prompt_lengths_B=torch.tensor([1, 2]),
        loss_mask_BT=mask([[0, 1, 1, 0], [0, 0, 1, 1]]),
        group_id_B=torch.tensor([0, 1]),
        weights_version_B=torch.tensor([3, 3]),
        finish_reasons=finish,
        metadata=({}, {}),
        policy_logprobs_BT=f([[0, -1, -1, 0], [0, -1, -1, -2]]),
        reference_logprobs_BT=f([[0, -2, -1, 0], [0, -1, -3, -2]]),
        values_BT=f([[0, 1, 2, 0], [0, 0, 1, 1]]),
        bootstrap_values_B=f([9, 4]),
        scores_B=f([3, 5]),
    )


def step(batch: RolloutBatch, truncation: str, *, whitened: bool = False) -> RolloutBatch:
    return with_advantages(
        batch,
        kl_coef=0.1,
        discount=1.0,
        gae_lambda=0.5,
        truncation=truncation,
        truncation_penalty=2.0,
        whiten_advantages=whitened,
    ).validate()


def test_whole_step_with_bootstrap_by_hand() -> None:
    # row 0: rewards -0.1, 0 + 3. token 2: 3 - 2 = 1; token 1: -0.1 + 2 - 1 + 0.5 * 1 = 1.4
    # row 1 (cut): rewards -0.2, 0, then value 4. token 3: 0 + 4 - 1 = 3; token 2: -0.2 + 1 - 1 + 0.5 * 3 = 1.3
    batch = step(make_batch(), "bootstrap")
    assert batch.advantages_BT is not None and batch.returns_BT is not None and batch.rewards_B is not None
    close(batch.advantages_BT, [[0, 1.4, 1, 0], [0, 0, 1.3, 3]], 1e-6)
    close(batch.returns_BT, [[0, 2.4, 3, 0], [0, 0, 2.3, 4]], 1e-6)
    close(batch.rewards_B, [2.9, -0.2], 1e-6)
    assert batch.scores_B is not None and batch.scores_B.tolist() == [3, 5]  # raw scores stay


def test_whole_step_with_penalty_by_hand() -> None:
    # row 1: score 5 - 2 = 3. token 3: 3 - 1 = 2; token 2: -0.2 + 1 - 1 + 0.5 * 2 = 0.8
    batch = step(make_batch(), "penalize")
    assert batch.advantages_BT is not None and batch.rewards_B is not None
    close(batch.advantages_BT, [[0, 1.4, 1, 0], [0, 0, 0.8, 2]], 1e-6)
    close(batch.rewards_B, [2.9, 2.8], 1e-6)


def test_masked_rows_do_not_enter_the_whitening() -> None:
    # only row 0 counts: advantages 1.4 and 1, mean 1.2, standard deviation 0.2: +1 and -1
    batch = step(make_batch(), "mask", whitened=True)
    assert batch.advantages_BT is not None and batch.train_mask_BT is not None
    close(batch.advantages_BT, [[0, 1, -1, 0], [0, 0, 0, 0]], 1e-5)
    assert batch.train_mask_BT.tolist() == [[False, True, True, False], [False] * 4]


def test_returns_do_not_depend_on_whitening() -> None:
    plain, whitened = step(make_batch(), "bootstrap"), step(make_batch(), "bootstrap", whitened=True)
    assert torch.equal(plain.returns_BT, whitened.returns_BT)  # type: ignore[arg-type]
    selected = whitened.advantages_BT[whitened.loss_mask_BT]  # type: ignore[index]
    assert selected.mean().item() == pytest.approx(0, abs=1e-6)
    assert selected.std(unbiased=False).item() == pytest.approx(1, abs=1e-5)


def test_finished_rows_need_no_bootstrap_values() -> None:
    batch = step(make_batch(("stop", "stop")).replace(bootstrap_values_B=None), "bootstrap")
    assert batch.rewards_B is not None
    close(batch.rewards_B, [2.9, 4.8], 1e-6)


def test_missing_fields_are_named() -> None:
    with pytest.raises(ValueError, match=r"\['scores_B', 'values_BT'\]"):
        step(make_batch().replace(values_BT=None, scores_B=None), "mask")

"""KL controllers by hand, and their state."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aligner.errors import ConfigError
from aligner.rollout.kl_controller import AdaptiveKL, FixedKL, build_kl_controller


def test_adaptive_by_hand() -> None:
    # target 6, horizon 100, 10 samples
    controller = AdaptiveKL(0.5, target=6.0, horizon=100)
    controller.update(6.6, 10)  # error 0.1: 0.5 * (1 + 0.1 * 10 / 100) = 0.505
    assert controller.coef == pytest.approx(0.505)
    controller.update(60.0, 10)  # error clipped to 0.2: 0.505 * 1.02 = 0.5151
    assert controller.coef == pytest.approx(0.5151)
    controller.update(-3.0, 10)  # error clipped to -0.2: 0.5151 * 0.98 = 0.504798
    assert controller.coef == pytest.approx(0.504798)


@given(kl=st.floats(0, 50), samples=st.integers(1, 500))
def test_adaptive_moves_towards_the_target(kl: float, samples: int) -> None:
    controller = AdaptiveKL(0.1, target=6.0, horizon=10_000)
    controller.update(kl, samples)
    assert (controller.coef > 0.1) == (kl > 6.0) or controller.coef == pytest.approx(0.1)
    assert controller.coef > 0


def test_fixed_does_not_move() -> None:
    controller = FixedKL(0.05)
    controller.update(100.0, 1000)
    assert controller.coef == 0.05


def test_adaptive_continues_bit_for_bit() -> None:
    straight, first = AdaptiveKL(0.05, 6.0, 1000), AdaptiveKL(0.05, 6.0, 1000)
    for controller in (straight, first):
        controller.update(7.1, 16)
    second = AdaptiveKL(0.05, 6.0, 1000)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for controller in (straight, second):
        controller.update(6.3, 16)
    assert second.coef == straight.coef != 0.05


def test_the_configured_coefficient_counts_after_another_controller() -> None:
    adaptive, fixed = AdaptiveKL(0.3, 6.0, 1000), FixedKL(0.1)
    saved = adaptive.state_dict()
    adaptive = AdaptiveKL(0.2, 6.0, 1000)
    adaptive.load_state_dict(fixed.state_dict())
    fixed.load_state_dict(saved)
    assert (adaptive.coef, fixed.coef) == (0.2, 0.1)


def test_another_configured_coefficient_counts_from_then_on() -> None:
    first = AdaptiveKL(0.05, 6.0, 1000)
    first.update(7.1, 16)
    changed = AdaptiveKL(0.2, 6.0, 1000)
    changed.load_state_dict(first.state_dict())
    assert changed.coef == 0.2
    changed.update(7.1, 16)
    again = AdaptiveKL(0.2, 6.0, 1000)
    again.load_state_dict(changed.state_dict())
    assert again.coef == changed.coef != 0.2


def test_build() -> None:
    assert isinstance(build_kl_controller("fixed", 0.0, 6.0, 10), FixedKL)
    assert isinstance(build_kl_controller("adaptive", 0.1, 6.0, 10), AdaptiveKL)
    with pytest.raises(ConfigError, match="'adptive'; it must be"):
        build_kl_controller("adptive", 0.1, 6.0, 10)
    with pytest.raises(ConfigError, match="above 0"):
        build_kl_controller("adaptive", 0.0, 6.0, 10)

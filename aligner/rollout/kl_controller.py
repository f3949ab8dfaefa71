"""The coefficient of the KL penalty: fixed, or adaptive (Ziegler et al. 2019, arXiv:1909.08593, section 2.2)."""

from __future__ import annotations

from typing import Any, Protocol

from aligner.errors import ConfigError

MAX_ERROR = 0.2  # the proportional error is clipped to +-this


class KLController(Protocol):
    """``coef`` is used for a step's rewards; ``update`` moves it afterwards. Saves through ``Stateful``."""

    @property
    def coef(self) -> float: ...

    def update(self, kl_per_response: float, num_samples: int) -> None:
        """``kl_per_response``: mean over the global batch of the KL summed over a response (k1), in nats."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class FixedKL:
    """A constant coefficient: the configured one, also after a resume."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl_per_response: float, num_samples: int) -> None:
        """Nothing moves."""

    def state_dict(self) -> dict[str, Any]:
        return {"controller": "fixed"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


class AdaptiveKL:
    """Moves the coefficient so that the KL of a response approaches ``target``:

    error = clip(kl / target - 1, -0.2, 0.2);  coef <- coef * (1 + error * num_samples / horizon)
    """

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        self.coef = coef
        self.initial = coef
        self.target = target
        self.horizon = horizon

    def update(self, kl_per_response: float, num_samples: int) -> None:
        error = min(max(kl_per_response / self.target - 1.0, -MAX_ERROR), MAX_ERROR)
        self.coef *= 1.0 + error * num_samples / self.horizon

    def state_dict(self) -> dict[str, Any]:
        return {"controller": "adaptive", "coef": self.coef, "initial": self.initial}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the saved coefficient; start from the configured one when that is another than it was."""
        if state["controller"] == "adaptive" and state["initial"] == self.initial:
            self.coef = float(state["coef"])


def build_kl_controller(controller: str, coef: float, target: float, horizon: int) -> KLController:
    """From the fields of ``ppo.kl``. ConfigError: another name, or numbers an adaptive controller cannot use."""
    if controller == "fixed":
        return FixedKL(coef)
    if controller != "adaptive":
        raise ConfigError(f"ppo.kl.controller is {controller!r}; it must be 'fixed' or 'adaptive'")
    if coef <= 0 or target <= 0 or horizon <= 0:
        raise ConfigError(
            f"ppo.kl: coef {coef}, target {target}, horizon {horizon}; an adaptive controller needs all three above 0 "
            "(it multiplies the coefficient, so 0 would stay 0)"
        )
    return AdaptiveKL(coef, target, horizon)

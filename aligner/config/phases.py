"""The phases of training, as timers, the progress display, the watchdog and injected faults name them."""

from __future__ import annotations

_AROUND = ("startup", "validation", "checkpoint")

#: By command: names that ``trainer.phase_timeouts`` may have.
PHASES: dict[str, tuple[str, ...]] = {
    "sft": (*_AROUND, "data", "train"),
    "rm": (*_AROUND, "data", "train"),
    "ppo": (*_AROUND, "rollout", "reward", "logprobs", "values", "train_critic", "train_policy"),
}

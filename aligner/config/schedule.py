"""How many optimizer steps a run makes, which is what learning-rate schedules count. Imports without torch."""

from __future__ import annotations

from typing import Any

from aligner.config import schema
from aligner.config.schema import PPOConfig


def updates_per_step(config: PPOConfig) -> int:
    """Optimizer steps of one PPO step."""
    samples = config.rollout_batch_size * config.samples_per_prompt
    return config.ppo_epochs * -(-samples // config.mini_batch_size)


def remaining_updates(root: Any, step: int) -> dict[str, int]:
    """Optimizer steps that each trained role still makes when ``step`` steps are done."""
    steps = root.trainer.max_steps
    if isinstance(root, schema.PPORoot):
        updates = updates_per_step(root.ppo)
        return {
            "actor": max(0, steps - max(step, root.ppo.critic_warmup_steps)) * updates,
            "critic": (steps - step) * updates,
        }
    return {"reward" if isinstance(root, schema.RMRoot) else "actor": steps - step}


def optimizer_steps(root: Any) -> dict[str, int]:
    """Optimizer steps of the whole run for each trained role: the length of a schedule without ``decay_steps``."""
    steps = root.trainer.max_steps
    if isinstance(root, schema.PPORoot):
        updates = updates_per_step(root.ppo)
        return {"actor": max(1, steps - root.ppo.critic_warmup_steps) * updates, "critic": steps * updates}
    return {"reward" if isinstance(root, schema.RMRoot) else "actor": steps}

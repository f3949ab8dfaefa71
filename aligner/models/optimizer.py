"""Adam and its learning-rate schedule, through Megatron's optimizer and parameter scheduler."""

from __future__ import annotations

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection

from aligner.config.schema import OptimizerConfig
from aligner.errors import ConfigError


def build_optimizer(
    settings: OptimizerConfig, chunks: list[torch.nn.Module], dtype: torch.dtype, pg: ProcessGroupCollection
) -> MegatronOptimizer:
    """Adam over fp32 copies of the weights (AdamW decay). A collective of all ranks.

    With ``use_distributed_optimizer`` the copies and moments are split over data-parallel ranks.
    """
    config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        clip_grad=settings.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=settings.use_distributed_optimizer,
    )
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False, pg_collection=pg)


def build_scheduler(
    settings: OptimizerConfig, optimizer: MegatronOptimizer, horizon: int | None
) -> OptimizerParamScheduler:
    """Linear warm-up, then ``schedule`` down to ``min_lr`` at ``decay_steps`` (else ``horizon``) optimizer steps.

    Step n of a warm-up of w steps has lr * (n + 1) / (w + 1), n from 0: the first step learns something.

    Raises:
        ConfigError: no length is known, or the warm-up does not fit into it.
    """
    decay_steps = settings.decay_steps or horizon
    if not decay_steps:
        raise ConfigError("optimizer.decay_steps is not set and no run length is known; set optimizer.decay_steps")
    if settings.warmup_steps >= decay_steps:
        raise ConfigError(
            f"optimizer.warmup_steps is {settings.warmup_steps}, but the schedule ends after {decay_steps} steps; "
            f"use at most {decay_steps - 1} warm-up steps"
        )
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr / (settings.warmup_steps + 1),
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
    )


def schedule_remark(name: str, scheduler: OptimizerParamScheduler, updates: int) -> str:
    """What is to be known when ``updates`` optimizer steps of role ``name`` are still to come; "" for nothing."""
    total = scheduler.num_steps + updates
    if scheduler.lr_decay_style == "constant" or total <= scheduler.lr_decay_steps:
        return ""
    return (
        f"{name}: the schedule ends after {scheduler.lr_decay_steps} of {total} optimizer steps, the rest has "
        f"min_lr={scheduler.min_lr:g}; {name}.optimizer.decay_steps changes that"
    )

"""Megatron's sharded state of an optimizer, also where bf16 and fp32 parameters share a group.

Megatron 0.16 numbers the parameters of a mixed group wrongly (an fp32 head on a bf16 trunk makes one)."""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params


def sharded_optimizer_state(
    optimizer: Any, model_state: dict[str, Any], *, is_loading: bool, metadata: dict[str, Any]
) -> dict[str, Any]:
    """The state of ``optimizer`` for a sharded checkpoint. Collective (its data-parallel shards are gathered).

    Args:
        optimizer: from ``get_megatron_optimizer``, with its state created.
        model_state: the sharded state of its model, holding the parameters themselves.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for part in parts:
        if isinstance(part, DistributedOptimizer):
            _correct_positions(part)
    if len(parts) == 1 and isinstance(parts[0], Float16OptimizerWithFloat16Params):
        return _half_precision_state(parts[0], model_state)
    return optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata)


def _correct_positions(optimizer: DistributedOptimizer) -> None:
    """Make the optimizer's map from a parameter to its place in a group true where bf16 and fp32 share a group.

    Megatron puts fp32 parameters first in a group but remembers the places of the original order, so that the state
    of one parameter would be saved as another's.
    """
    for index, (full, half) in enumerate(zip(optimizer.model_fp32_groups, optimizer.model_float16_groups, strict=True)):
        for place, parameter in enumerate([*full, *half]):
            optimizer.model_param_group_index_map[parameter] = (index, place)


def _half_precision_state(optimizer: Any, model_state: dict[str, Any]) -> dict[str, Any]:
    """As ``Float16OptimizerWithFloat16Params.sharded_state_dict``, which numbers parameters as if none were fp32.

    A bf16 trunk under an fp32 head has both kinds in one group.
    """
    state = optimizer.state_dict()
    originals = {
        id(main): original
        for group, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
        for original, main in zip(group, mains, strict=True)
    }
    tracked = [originals.get(id(p), p) for group in optimizer.optimizer.param_groups for p in group["params"]]
    sharded = get_param_id_to_sharded_param_map(model_state, tracked)
    numbers = {id(parameter): number for number, parameter in enumerate(tracked)}
    state["fp32_from_fp16_params"] = [
        [
            make_sharded_optimizer_tensor(
                sharded[numbers[id(originals[id(main)])]], main, prefix="optimizer.state.fp32_param"
            )
            for main in mains
        ]
        for mains in state["fp32_from_fp16_params"]
    ]
    optim_state_to_sharding_state(state["optimizer"], sharded, exclude_keys=("step",))
    return state

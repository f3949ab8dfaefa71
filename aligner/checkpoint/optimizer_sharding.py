"""The sharded state of a Megatron optimizer, in Megatron's ``fully_reshardable`` format.

Megatron 0.16 writes the same format, but (1) numbers parameters wrongly where bf16 and fp32 share a group (an fp32
head on a bf16 trunk), so that one parameter's state is saved as another's; (2) gathers the whole state several times
over in memory on every rank. Here each parameter is written by the data-parallel rank that owns most of it, which
fetches only what other ranks own of it, and a rank that loads reads only the parameters it owns a part of.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from aligner.distributed import collectives

STATES = ("param", "exp_avg", "exp_avg_sq")  # fp32 weights and Adam's moments

Range = tuple[int, int]  # from, to (exclusive), in the flattened parameter of this model-parallel rank


def sharded_optimizer_state(optimizer: Any, model_state: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
    """The state of ``optimizer`` for a sharded checkpoint. Collective over its data-parallel group.

    Args:
        optimizer: from ``get_megatron_optimizer``, with its state created.
        model_state: the sharded state of its model, holding the parameters themselves.
        is_loading: the tensors will be filled, then given to :func:`load_optimizer_state`.
    """
    part = _only_part(optimizer)
    if isinstance(part, DistributedOptimizer):
        return _distributed_state(part, model_state, is_loading)
    if isinstance(part, Float16OptimizerWithFloat16Params):
        return _half_precision_state(part, model_state)
    return part.sharded_state_dict(model_state, is_loading=is_loading)


@torch.no_grad()
def load_optimizer_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Continue from ``state``: what :func:`sharded_optimizer_state` gave, filled."""
    part = _only_part(optimizer)
    if not isinstance(part, DistributedOptimizer):
        part.load_state_dict(state)
        return
    tensors = state.pop("param_state")
    part.load_state_dict(state)
    ranges = _own_ranges(part)
    for number, parameter in enumerate(_parameters(part)):
        if number in tensors:
            start, end = ranges[parameter]
            part._set_main_param_and_optimizer_states(
                parameter, {name: tensors[number][name].reshape(-1)[start:end] for name in STATES}
            )


def _only_part(optimizer: Any) -> Any:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    assert len(parts) == 1, "several optimizers of one model exist only with experts"
    return parts[0]


# ------------------------------------------------------------------ distributed optimizer


def _parameters(optimizer: DistributedOptimizer) -> list[torch.nn.Parameter]:
    """All parameters of this model-parallel rank, in an order that its data-parallel peers share."""
    return [parameter for buffer in optimizer.buffers for parameter in buffer.param_index_map]


def _own_ranges(optimizer: DistributedOptimizer) -> dict[torch.nn.Parameter, Range]:
    """The part of each parameter whose state this rank holds; parameters it holds nothing of are left out."""
    ranges = {}
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, places in bucket["param_map"].items():
                    if places["param"].size > 0:
                        ranges[parameter] = (places["param"].start, places["param"].end)
    return ranges


def _correct_positions(optimizer: DistributedOptimizer) -> None:
    """Make the map from a parameter to its place in a group true: fp32 parameters come first in their group."""
    for index, (full, half) in enumerate(zip(optimizer.model_fp32_groups, optimizer.model_float16_groups, strict=True)):
        for place, parameter in enumerate([*full, *half]):
            optimizer.model_param_group_index_map[parameter] = (index, place)


def _distributed_state(
    optimizer: DistributedOptimizer, model_state: dict[str, Any], is_loading: bool
) -> dict[str, Any]:
    _correct_positions(optimizer)
    described = {id(leaf.data): leaf for leaf in nested_values(extract_sharded_tensors_and_factories(model_state)[0])}
    parameters = _parameters(optimizer)
    tensors = _tensors_to_fill(optimizer, parameters) if is_loading else _tensors_to_write(optimizer, parameters)
    state = optimizer.state_dict()
    state["param_state"] = {
        number: {
            name: _like(described[id(parameters[number])], f"optimizer.state.{name}", tensor)
            for name, tensor in by_name.items()
        }
        for number, by_name in tensors.items()
    }
    return state


def _like(described: Any, prefix: str, tensor: torch.Tensor) -> Any:
    """``tensor`` described as its parameter is, as the copy that is written."""
    changes: dict[str, Any] = {
        "key": f"{prefix}.{described.key}",
        "data": tensor.reshape(described.data.shape),
        "replica_id": (*described.replica_id[:-1], 0),  # the last entry counts data-parallel copies
    }
    if not isinstance(described, ShardedTensorFactory):
        changes["dtype"] = tensor.dtype
    return replace(described, **changes)


def _tensors_to_fill(
    optimizer: DistributedOptimizer, parameters: list[torch.nn.Parameter]
) -> dict[int, dict[str, torch.Tensor]]:
    """Number of a parameter -> state name -> the state itself where this rank holds all of it, else scratch space."""
    ranges = _own_ranges(optimizer)
    tensors = {}
    for number, parameter in enumerate(parameters):
        if parameter not in ranges:
            continue
        own = optimizer._get_main_param_and_optimizer_states(parameter)
        if ranges[parameter] == (0, parameter.numel()):
            tensors[number] = {name: own[name].detach() for name in STATES}
        else:
            tensors[number] = {name: own[name].new_empty(parameter.numel()) for name in STATES}
    return tensors


def _tensors_to_write(
    optimizer: DistributedOptimizer, parameters: list[torch.nn.Parameter]
) -> dict[int, dict[str, torch.Tensor]]:
    """Number of a parameter -> state name -> the whole state, for the parameters that this rank writes."""
    group = optimizer.data_parallel_group
    rank = group.rank()
    own_ranges = _own_ranges(optimizer)
    ranges = collectives.all_gather_objects([own_ranges.get(p, (0, 0)) for p in parameters], group)
    tensors = {}
    for number, parameter in enumerate(parameters):
        pieces = {peer: ranges[peer][number] for peer in range(group.size()) if ranges[peer][number] != (0, 0)}
        writer = max(pieces, key=lambda peer: pieces[peer][1] - pieces[peer][0])
        own = optimizer._get_main_param_and_optimizer_states(parameter) if rank in pieces else {}
        if writer != rank:
            for name in STATES if own else ():
                dist.send(own[name].detach().contiguous(), group=group, group_dst=writer)
        elif len(pieces) == 1:
            tensors[number] = {name: own[name].detach() for name in STATES}
        else:
            tensors[number] = {name: own[name].new_empty(parameter.numel()) for name in STATES}
            for peer, (start, end) in pieces.items():
                for name, whole in tensors[number].items():
                    if peer == rank:
                        whole[start:end] = own[name].detach()
                    else:
                        dist.recv(whole[start:end], group=group, group_src=peer)
    return tensors


# ------------------------------------------------------------------ bf16 without the distributed optimizer


def _half_precision_state(optimizer: Any, model_state: dict[str, Any]) -> dict[str, Any]:
    """As ``Float16OptimizerWithFloat16Params.sharded_state_dict``, but right for groups that have fp32 parameters."""
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

"""Megatron's ``torch_dist`` format: one role's sharded state in one directory.

The files are those of ``megatron.core.dist_checkpointing`` and load with it. Saving differs in two ways: this process
writes its own file itself (Megatron starts a manager process and a forked writer for every save: seconds, and a hang
where the main module is not guarded), and every step that can fail on one rank is agreed on by all ranks.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from aligner.distributed import collectives, platform
from aligner.errors import CheckpointError

METADATA_FILE = ".metadata"


def save(state: dict[str, Any], directory: Path) -> None:
    """Write ``state`` (with Megatron's ``ShardedTensor`` leaves) into the empty ``directory``. Collective.

    Raises:
        CheckpointError: on a rank that cannot write; :class:`~aligner.errors.RankFailure` on the others.
    """

    def prepare() -> dict[str, Any]:
        # The last collective inside is a gather; after it rank 0 alone checks that the shards cover each tensor once.
        sharded, common = save_preprocess(state, validate_access_integrity=True)
        TorchCommonSaveStrategy("torch", 1).save_common(common, directory)  # rank 0 writes
        return sharded

    sharded = collectives.on_all_ranks(prepare)
    tensors, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    try:
        dcp.save(
            mcore_to_pyt_state_dict(tensors, is_loading=False),
            storage_writer=dcp.FileSystemWriter(directory, single_file_per_rank=True, thread_count=1),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
    except dcp.CheckpointException as failed:  # raised on all ranks together
        raise CheckpointError(f"cannot write the checkpoint {directory}: {_first_failure(failed)}") from failed

    def describe() -> None:
        if platform.rank() == 0:
            save_config(CheckpointingConfig("torch_dist", 1), str(directory))

    collectives.on_all_ranks(describe)


def load(state: dict[str, Any], directory: Path, *, strict: bool = True) -> tuple[dict[str, Any], list[str]]:
    """Read what ``state`` asks for, in place where it holds tensors, also from another layout. Collective.

    Args:
        state: as given to :func:`save`, built for this layout.
        strict: every tensor asked for must be there; otherwise the ones that are not keep their values.

    Returns:
        The loaded state, and the names of the tensors that were left as they are (none when ``strict``).

    Raises:
        CheckpointError: tensors are missing, have another shape, or files cannot be read.
    """
    missing = collectives.on_all_ranks(lambda: _check_tensors(state, directory, strict))
    try:
        # Without access validation: its errors would be raised on rank 0 alone.
        loaded = dist_checkpointing.load(state, str(directory), validate_access_integrity=False)
    except dcp.CheckpointException as failed:  # raised on all ranks together
        raise CheckpointError(f"cannot read the checkpoint {directory}: {_first_failure(failed)}") from failed
    return loaded, missing


def _check_tensors(state: dict[str, Any], directory: Path, strict: bool) -> list[str]:
    """Compare what ``state`` asks for with what is stored; drops what is missing from ``state`` unless ``strict``."""
    try:
        stored = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
        torch.load(directory / COMMON_STATE_FNAME, map_location="cpu")
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"cannot read the checkpoint {directory}: {type(error).__name__}: {error}") from error
    wanted, _, _ = load_preprocess(state)
    tensors = [leaf for leaf in nested_values(wanted) if isinstance(leaf, ShardedTensor)]
    missing = sorted({tensor.key for tensor in tensors if tensor.key not in stored})
    if missing and strict:
        raise CheckpointError(
            f"{directory} has no tensor '{missing[0]}' ({len(missing)} of {len(tensors)} are missing); "
            "it belongs to another model: check the role's model.path and init_from"
        )
    for tensor in tensors:
        entry = stored.get(tensor.key)
        if not isinstance(entry, TensorStorageMetadata) or tensor.allow_shape_mismatch:
            continue
        if tuple(entry.size) != tuple(tensor.global_shape):
            raise CheckpointError(
                f"{directory}: tensor '{tensor.key}' has shape {tuple(entry.size)}, but the model needs "
                f"{tuple(tensor.global_shape)}; check the role's model.path and init_from"
            )
    if missing:
        _drop(state, set(missing))
    return missing


def _drop(state: dict[str, Any], keys: set[str]) -> None:
    for name, value in list(state.items()):
        if isinstance(value, dict):
            _drop(value, keys)
        elif getattr(value, "key", None) in keys:
            del state[name]


def _first_failure(failed: dcp.CheckpointException) -> str:
    rank, (cause, _) = next(iter(failed.failures.items()))
    return f"rank {rank}: {type(cause).__name__}: {cause}"

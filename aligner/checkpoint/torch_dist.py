"""Megatron's ``torch_dist`` format: one role's sharded state in one directory.

The files are those of ``megatron.core.dist_checkpointing`` and load with it. Saving is cut into three parts, so that
the middle one can run beside training: :class:`Planner` (collective) decides what each rank writes, :meth:`Shards.
write` writes it and needs nothing but memory and the file system, :func:`finish` (one rank) writes the index.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

import aligner.distributed  # noqa: F401  # isort: skip  (before megatron)
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.serialization import get_crc32_options, set_crc32_options

from aligner.checkpoint import manifest
from aligner.checkpoint.agreement import together
from aligner.checkpoint.shard_file import ShardFile, Source, TensorSource
from aligner.distributed import collectives, platform
from aligner.errors import CheckpointError

METADATA_FILE = ".metadata"

Storage = dict[MetadataIndex, _StorageInfo]  # where each shard is: file, offset, length


@dataclass
class Written:
    """What one rank wrote of a role: where its shards are, and its files (path inside the role's directory)."""

    storage: Storage = field(default_factory=dict)
    files: dict[str, manifest.Entry] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """One shard: ``data`` (its bytes, on any device) between what ``torch.save`` writes before and after them."""

    index: MetadataIndex
    head: torch.Tensor
    data: torch.Tensor
    tail: torch.Tensor


@dataclass(frozen=True)
class Shards:
    """What this rank writes of a role. ``index``: what the role consists of, on rank 0; None on the others."""

    rank: int
    items: list[Item]
    small: dict[str, bytes]
    index: Metadata | None

    def write(self, directory: Path, source_of: Callable[[torch.Tensor], Source] = TensorSource) -> Written:
        """Write this rank's files into ``directory``; ``source_of``: where the data of an item is to be read.

        Not collective; raises OSError.
        """
        directory.mkdir(parents=True, exist_ok=True)
        done = Written(files={name: manifest.write_file(directory / name, data) for name, data in self.small.items()})
        if not self.items:
            return done
        name = f"__{self.rank}_0.distcp"
        with ShardFile(directory / name) as file:
            for item in self.items:
                start = file.tell()
                file.write(TensorSource(item.head))
                file.write(source_of(item.data))
                file.write(TensorSource(item.tail))
                done.storage[item.index] = _StorageInfo(name, start, file.tell() - start)
        done.files[name] = file.entry
        return done


class Planner:
    """Plans the saves of one role; what follows from the structure of its state is computed once. Collective."""

    def __init__(self) -> None:
        self._structure: list[Any] | None = None
        self._items: list[MetadataIndex] = []
        self._index: Metadata | None = None
        self._frames: dict[tuple[torch.dtype, torch.Size], tuple[torch.Tensor, torch.Tensor]] = {}

    def plan(self, state: dict[str, Any]) -> Shards:
        """What this rank writes of ``state`` (with Megatron's ``ShardedTensor`` leaves); tensors stay where they are.

        Raises:
            CheckpointError, RankFailure: on all ranks, when the shards do not cover each tensor exactly once.
        """

        def prepare() -> tuple[Any, Any, list[Any]]:
            sharded, common = save_preprocess(state, validate_access_integrity=False)
            return sharded, common, [_structure(leaf) for leaf in nested_values(sharded)]

        sharded, common, structure = collectives.on_all_ranks(prepare)
        is_new = collectives.any_true(structure != self._structure)
        gathered = determine_global_metadata(sharded)[1] if is_new else None
        tensors, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
        mine = collectives.on_all_ranks(lambda: mcore_to_pyt_state_dict(tensors, is_loading=False))
        if is_new:
            self._plan(mine, gathered)
            self._structure = structure
        items = [self._item(index, find_state_dict_object(mine, index)) for index in self._items]
        return Shards(platform.rank(), items, _small_files(common) if platform.rank() == 0 else {}, self._index)

    def _item(self, index: MetadataIndex, data: Any) -> Item:
        if isinstance(data, io.BytesIO):
            return Item(index, _tensor(b""), _tensor(data.getvalue()), _tensor(b""))
        tensor = data.detach().contiguous()
        kind = (tensor.dtype, tensor.shape)
        if kind not in self._frames:
            self._frames[kind] = _frame(*kind)
        head, tail = self._frames[kind]
        return Item(index, head, tensor.reshape(-1).view(torch.uint8), tail)

    def _plan(self, mine: dict[str, Any], gathered: Any) -> None:
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)

        def plan_here() -> Any:
            validate_sharding_integrity(gathered)
            planner.set_up_planner(mine, None, platform.rank() == 0)
            return planner.create_local_plan()

        own = collectives.on_all_ranks(plan_here)
        plans = collectives.all_gather_objects(own)

        def plan_whole() -> Metadata | None:
            return planner.create_global_plan(plans)[1] if platform.rank() == 0 else None

        self._index = together(plan_whole)
        self._items = [item.index for item in own.items]


def _structure(leaf: Any) -> tuple[Any, ...]:
    """What a plan depends on: everything but the values."""
    return (
        leaf.key,
        getattr(leaf, "dtype", None),
        getattr(leaf, "local_shape", None),
        leaf.global_shape,
        leaf.global_offset,
        getattr(leaf, "axis_fragmentations", None),
        leaf.replica_id,
    )


def _small_files(common: Any) -> dict[str, bytes]:
    """What is not sharded: plain values, and the name of the format."""
    buffer = io.BytesIO()
    torch.save(common, buffer)
    config = json.dumps(asdict(CheckpointingConfig("torch_dist", 1)))
    return {COMMON_STATE_FNAME: buffer.getvalue(), CONFIG_FNAME: config.encode()}


class _Frame:
    """A file that keeps what is written around the bytes of one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._address = tensor.data_ptr()
        self.parts: list[list[bytes]] = [[]]

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if view.nbytes and np.frombuffer(view, np.uint8).ctypes.data == self._address:
            self.parts.append([])
        else:
            self.parts[-1].append(bytes(view))
        return view.nbytes

    def flush(self) -> None:
        """Nothing is kept back."""


def _frame(dtype: torch.dtype, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``torch.save`` writes before and after the bytes of such a tensor, with its own checksums left out: bytes.

    It depends on nothing else, so a tensor can be written without ``torch.save`` and read with ``torch.load``.
    """
    tensor = torch.empty(shape, dtype=dtype)
    frame = _Frame(tensor)
    with_sums = get_crc32_options()
    set_crc32_options(False)
    try:
        torch.save(tensor, frame)  # type: ignore[arg-type]  # it has what torch.save uses of a file
    finally:
        set_crc32_options(with_sums)
    head, *tail = (b"".join(part) for part in frame.parts)
    assert len(tail) == (1 if tensor.nbytes else 0), "torch.save writes the bytes of a tensor in another way"
    return _tensor(head), _tensor(tail[0] if tail else b"")


def _tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def finish(directory: Path, index: Metadata, written: Iterable[Storage]) -> manifest.Entry:
    """Write the index of a role's complete directory; ``written`` is what each rank wrote. Raises OSError."""
    storage: Storage = {}
    for part in written:
        storage.update(part)
    whole = replace(index, storage_data=storage, storage_meta=None, version=CURRENT_DCP_VERSION)
    return manifest.write_file(directory / METADATA_FILE, pickle.dumps(whole))


def contents(index: Metadata) -> Mapping[str, tuple[str, list[int], int]]:
    """Name of a tensor -> its type, shape and bytes as a whole."""
    found = {}
    for name, entry in index.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            dtype = entry.properties.dtype
            found[name] = (str(dtype).removeprefix("torch."), list(entry.size), entry.size.numel() * dtype.itemsize)
    return found


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

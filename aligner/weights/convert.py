"""Hugging Face directories <-> this rank's shard of a model, tensor by tensor.

Loading reads, for one parameter after another, the slices that this rank holds, straight from the safetensors files;
each file is unmapped before the next tensor, so the peak is the shard plus one tensor. Saving gathers one tensor
at a time and holds one output file at most, on global rank 0.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from aligner.config.hf_config import Architecture
from aligner.distributed import platform
from aligner.distributed.topology import Topology
from aligner.errors import ModelError
from aligner.models.role_model import RoleModel
from aligner.models.transformer import SCALAR
from aligner.weights.table import (
    Entry,
    build_table,
    find_entry,
    hf_names,
    hf_shapes,
    places,
    shard_ranges,
    take_apart,
    walk,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_FILE_BYTES = 4 << 30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# files that make a directory usable without Aligner; weights are written anew
COPIED = ("*.json", "*.model", "*.jinja", "*.txt", "LICENSE*")


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that a Hugging Face directory consists of. Raises ModelError when there are none."""
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if index.is_file():
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ModelError(f"{index}: not a safetensors index ({error})") from None
        return sorted({directory / file for file in names.values()})
    if not single.is_file():
        raise ModelError(
            f"{directory}: holds neither {SINGLE_FILE} nor {INDEX_FILE}; "
            "only safetensors weights are read (save the model with transformers' save_pretrained)"
        )
    return [single]


class HFWeights:
    """The safetensors files of a directory: where each tensor is, and slices of it. Raises :class:`ModelError`."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in weight_files(self.directory):
            for name, shape in _read_shapes(path).items():
                self.files[name], self.shapes[name] = path, shape

    def check(self, arch: Architecture, table: Sequence[Entry], optional: Collection[str]) -> None:
        """Every tensor that the whole model needs is there with the right shape, and nothing is left over."""
        needed: dict[str, tuple[int, ...]] = {}
        for entry, layer in walk(arch, table):
            needed |= zip(hf_names(entry, layer), hf_shapes(arch, entry), strict=True)
        for name, shape in needed.items():
            if name not in self.shapes:
                if name not in optional:
                    raise ModelError(
                        f"{self.directory}: tensor {name} is missing; config.json asks for it with shape {list(shape)}"
                    )
            elif self.shapes[name] != shape:
                raise ModelError(
                    f"{self.files[name]}: tensor {name} has shape {list(self.shapes[name])}, "
                    f"but config.json asks for {list(shape)}"
                )
        # of the other head, or a stored copy of tied weights
        known = needed.keys() | {"lm_head.weight", "score.weight", "score.bias"}
        unmapped = sorted(n for n in self.shapes if n not in known and not n.endswith("rotary_emb.inv_freq"))
        if unmapped:
            more = f" and {len(unmapped) - 3} more" if len(unmapped) > 3 else ""
            raise ModelError(
                f"{self.directory}: no place for {', '.join(unmapped[:3])}{more} in a {arch.family} model with "
                f"{arch.num_layers} layers; config.json and weights do not belong together, or the architecture "
                "has parts that are not supported"
            )

    def copy(self, name: str, dim: int | None, start: int, stop: int, place: torch.Tensor) -> None:
        """Fill ``place`` in order with ``name[start:stop]`` along ``dim`` (all of it when ``dim`` is None)."""
        try:
            with safe_open(self.files[name], framework="pt") as opened:
                tensor = opened.get_slice(name)
                part = tensor[:] if dim is None else tensor[start:stop] if dim == 0 else tensor[:, start:stop]
                place.copy_(part.view(place.shape))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self.files[name]}: tensor {name} cannot be read ({error})") from None


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a safetensors file, from its header."""
    try:
        with safe_open(path, framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: cannot be read as safetensors ({error}); the file is missing or damaged") from None


def load_hf(model: RoleModel, directory: str | Path, *, need_head: bool = False) -> None:
    """Fill ``model`` from an HF directory of the same architecture; each rank reads its own slices.

    A scalar model takes the trunk and, where the directory has ``score.weight``, the head; otherwise the head keeps
    its seeded start (refused with ``need_head``) and a vocabulary layer in the directory is ignored.

    Raises:
        ModelError: a tensor is missing, has another shape, or has no place in this architecture.
    """
    weights = HFWeights(directory)
    table = build_table(model.arch, model.head)
    optional = {name for entry in table if entry.megatron.startswith("head.") for name in entry.hf}
    weights.check(model.arch, table, optional)
    if need_head and model.head == SCALAR and "score.weight" not in weights.files:
        raise ModelError(
            f"{directory}: there is no score.weight, so the {model.name} model would score at random; give the run of "
            "`aligner rm`, or a sequence-classification model"
        )
    model.will_change()
    with torch.no_grad():
        for name, parameter in model.parameters():
            entry, layer = find_entry(table, name, layer_offset(model))
            names = hf_names(entry, layer)
            if all(part in weights.files for part in names):
                _fill(parameter.data, weights, model, entry, names)
    model.weights_changed()


def _fill(target: torch.Tensor, weights: HFWeights, model: RoleModel, entry: Entry, names: tuple[str, ...]) -> None:
    topology = model.topology
    ranges: Sequence[tuple[int, int]] = [(0, 0)] * len(names)
    if entry.dim is not None:
        ranges = shard_ranges(model.arch, entry, topology.tp, topology.tp_rank)
    if entry.padded:
        [(start, stop)] = ranges
        target[stop - start :].zero_()
        target = target[: stop - start]
    for name, (start, stop), place in zip(names, ranges, places(model.arch, entry, target), strict=True):
        if place.numel():
            weights.copy(name, entry.dim, start, stop, place)


def layer_offset(model: RoleModel) -> int:
    """The first layer (from 0) on this pipeline stage."""
    return model.topology.pp_rank * (model.arch.num_layers // model.topology.pp)


def export_tensors(
    model: RoleModel, value: Callable[[torch.nn.Parameter], torch.Tensor] = lambda p: p.data
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """(HF name, whole tensor) of every weight, one after another; a collective of all ranks of the role.

    The tensor is given on global rank 0 and None elsewhere. ``value`` picks what is exported of a parameter: its
    weight, or its gradient.
    """
    topology = model.topology
    own = dict(model.parameters())
    table = build_table(model.arch, model.head)
    for entry, layer in walk(model.arch, table):
        stage = _stage_of(entry, layer, model)
        parts: list[torch.Tensor] | None = None
        if topology.dp_rank == 0 and topology.pp_rank == stage:
            parameter = _find_own(own, entry, layer, model)
            parts = _gather(model.arch, entry, value(parameter).detach(), topology)
        parts = _to_first(parts, entry, stage, model)
        for index, name in enumerate(hf_names(entry, layer)):
            yield name, parts[index] if parts is not None and platform.rank() == 0 else None


def _stage_of(entry: Entry, layer: int | None, model: RoleModel) -> int:
    if layer is not None:
        return layer // (model.arch.num_layers // model.topology.pp)
    return 0 if entry.megatron.startswith("embedding.") else model.topology.pp - 1


def _find_own(
    own: dict[str, torch.nn.Parameter], entry: Entry, layer: int | None, model: RoleModel
) -> torch.nn.Parameter:
    local = None if layer is None else layer - layer_offset(model)
    for name in (entry.megatron, entry.fused):
        if name is not None and name.format(layer=local) in own:
            return own[name.format(layer=local)]
    raise KeyError(entry.megatron)


def _gather(arch: Architecture, entry: Entry, shard: torch.Tensor, topology: Topology) -> list[torch.Tensor] | None:
    """The whole HF tensors on the first tensor-parallel rank of a stage; None on the others."""
    if entry.dim is None:
        return take_apart(arch, entry, shard)
    shard = shard.contiguous()
    shards = [torch.empty_like(shard) for _ in range(topology.tp)] if topology.tp_rank == 0 else None
    dist.gather(shard, shards, dst=topology.rank_of(0, topology.pp_rank, topology.dp_rank), group=topology.pg.tp)
    if shards is None:
        return None
    columns = zip(*(take_apart(arch, entry, part) for part in shards), strict=True)
    whole = [torch.cat(column, dim=entry.dim) for column in columns]
    return [whole[0][: arch.vocab_size]] if entry.padded else whole


def _to_first(
    parts: list[torch.Tensor] | None, entry: Entry, stage: int, model: RoleModel
) -> list[torch.Tensor] | None:
    """Send whole tensors from the stage that has them to global rank 0."""
    topology = model.topology
    if stage == 0 or topology.tp_rank or topology.dp_rank or topology.pp_rank not in (0, stage):
        return parts
    source, first = topology.rank_of(0, stage, 0), topology.rank_of(0, 0, 0)
    if topology.pp_rank == stage:
        assert parts is not None
        meta: list[Any] = [[(tuple(part.shape), part.dtype) for part in parts]]
        dist.send_object_list(meta, dst=first, group=topology.pg.pp)
        for part in parts:
            dist.send(part.contiguous(), dst=first, group=topology.pg.pp)
        return parts
    meta = [None]
    dist.recv_object_list(meta, src=source, group=topology.pg.pp)
    device = next(model.module.parameters()).device
    received = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in meta[0]]
    for part in received:
        dist.recv(part, src=source, group=topology.pg.pp)
    return received


def save_hf(
    model: RoleModel,
    directory: str | Path,
    *,
    source: str | Path,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write an HF directory from the shards; a collective of all ranks of the role, rank 0 writes.

    Args:
        source: directory that config, tokenizer and template files are copied from.
        dtype: of the weights on disk; None: the model's.
        max_file_bytes: weights beyond this are split into several files with an index.
    """
    target, origin = Path(directory), Path(source)
    dtype = model.dtype if dtype is None else dtype
    plan = _plan_files(model, dtype, max_file_bytes)
    if platform.rank() == 0:
        target.mkdir(parents=True, exist_ok=True)
        _copy_files(model, origin, target, dtype)
    pending: dict[str, torch.Tensor] = {}
    for name, tensor in export_tensors(model):
        if tensor is None or name not in plan:
            continue
        pending[name] = tensor.to("cpu", dtype).contiguous()
        if len(pending) == sum(file == plan[name] for file in plan.values()):
            save_file(pending, target / plan[name], metadata={"format": "pt"})
            pending = {}
    if platform.rank() == 0 and len(set(plan.values())) > 1:
        total = sum(_bytes(model, dtype).values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(plan.items()))}
        (target / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    dist.barrier()


def _bytes(model: RoleModel, dtype: torch.dtype) -> dict[str, int]:
    """Size on disk of every HF tensor, in export order."""
    sizes = {}
    for entry, layer in walk(model.arch, build_table(model.arch, model.head)):
        for name, shape in zip(hf_names(entry, layer), hf_shapes(model.arch, entry), strict=True):
            sizes[name] = torch.Size(shape).numel() * dtype.itemsize
    return sizes


def _plan_files(model: RoleModel, dtype: torch.dtype, limit: int) -> dict[str, str]:
    """File name of every tensor: consecutive tensors share a file up to ``limit`` bytes."""
    numbers, number, used = {}, 0, 0
    for name, size in _bytes(model, dtype).items():
        if used and used + size > limit:
            number, used = number + 1, 0
        numbers[name], used = number, used + size
    if number == 0:
        return dict.fromkeys(numbers, SINGLE_FILE)
    return {name: f"model-{n + 1:05d}-of-{number + 1:05d}.safetensors" for name, n in numbers.items()}


def _copy_files(model: RoleModel, source: Path, target: Path, dtype: torch.dtype) -> None:
    for old in [*target.glob("*.safetensors"), target / INDEX_FILE]:
        old.unlink(missing_ok=True)
    for pattern in COPIED:
        for file in source.glob(pattern):
            if file.name != INDEX_FILE and file.resolve() != (target / file.name).resolve():
                shutil.copyfile(file, target / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    wanted = next(name for name, value in DTYPES.items() if value == dtype)
    config["torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"] = wanted
    if model.head == "scalar":
        stem = config.get("architectures", ["LlamaForCausalLM"])[0].split("For")[0]
        config |= {"architectures": [f"{stem}ForSequenceClassification"], "num_labels": 1}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

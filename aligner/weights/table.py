"""The name table between Hugging Face and Megatron: one declaration, walked in both directions.

An :class:`Entry` says which HF tensors make up one Megatron parameter, along which dimension they are split over
tensor-parallel ranks, and how their parts are laid out inside the parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from aligner.config.hf_config import Architecture, padded_vocab_size


class Layout(Enum):
    """How the HF tensors of an entry sit in the Megatron parameter."""

    SINGLE = "one tensor as it is"
    STACKED = "one below the other (gate, up)"
    GROUPED = "by key/value group: the group's queries, its key, its value"


@dataclass(frozen=True)
class Entry:
    """``megatron`` may hold ``{layer}`` (of the whole model); ``dim``: split over tensor ranks, None: replicated.

    ``fused`` is the same parameter's name where Transformer Engine fuses the norm into the next linear layer.
    ``padded``: rows beyond the vocabulary exist in Megatron only, as zeros.
    """

    megatron: str
    hf: tuple[str, ...]
    dim: int | None
    layout: Layout = Layout.SINGLE
    fused: str | None = None
    padded: bool = False


_LAYER = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_EMBEDDING = "model.embed_tokens.weight"


def build_table(arch: Architecture, head: str) -> tuple[Entry, ...]:
    """Entries of a model with ``arch`` and ``head`` (``lm`` or ``scalar``), in the order of the forward pass."""
    entries = [Entry("embedding.word_embeddings.weight", (_EMBEDDING,), 0, padded=True)]
    entries += [
        Entry(
            _LAYER + "input_layernorm.weight",
            (_HF + "input_layernorm.weight",),
            None,
            fused=_LAYER + "self_attention.linear_qkv.layer_norm_weight",
        ),
        _grouped("weight"),
    ]
    if arch.attention_bias:
        entries.append(_grouped("bias"))
    if arch.qk_norm:
        entries.append(Entry(_LAYER + "self_attention.q_layernorm.weight", (_HF + "self_attn.q_norm.weight",), None))
        entries.append(Entry(_LAYER + "self_attention.k_layernorm.weight", (_HF + "self_attn.k_norm.weight",), None))
    entries += [
        Entry(_LAYER + "self_attention.linear_proj.weight", (_HF + "self_attn.o_proj.weight",), 1),
        Entry(
            _LAYER + "pre_mlp_layernorm.weight",
            (_HF + "post_attention_layernorm.weight",),
            None,
            fused=_LAYER + "mlp.linear_fc1.layer_norm_weight",
        ),
        Entry(
            _LAYER + "mlp.linear_fc1.weight",
            (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
            0,
            Layout.STACKED,
        ),
        Entry(_LAYER + "mlp.linear_fc2.weight", (_HF + "mlp.down_proj.weight",), 1),
        Entry("decoder.final_layernorm.weight", ("model.norm.weight",), None),
    ]
    if head == "lm":
        output = _EMBEDDING if arch.tie_word_embeddings else "lm_head.weight"
        entries.append(Entry("output_layer.weight", (output,), 0, padded=True))
    else:
        entries.append(Entry("head.weight", ("score.weight",), None))
        entries.append(Entry("head.bias", ("score.bias",), None))
    return tuple(entries)


def _grouped(kind: str) -> Entry:
    names = tuple(f"{_HF}{part}.{kind}" for part in _QKV)
    return Entry(f"{_LAYER}self_attention.linear_qkv.{kind}", names, 0, Layout.GROUPED)


_LAYER_NUMBER = re.compile(r"^decoder\.layers\.(\d+)\.")


def find_entry(table: Sequence[Entry], name: str, layer_offset: int) -> tuple[Entry, int | None]:
    """The entry of parameter ``name`` of a stage whose first layer is ``layer_offset``, and its global layer."""
    match = _LAYER_NUMBER.match(name)
    template, layer = name, None
    if match:
        template, layer = _LAYER_NUMBER.sub(_LAYER, name), int(match.group(1)) + layer_offset
    for entry in table:
        if template in (entry.megatron, entry.fused):
            return entry, layer
    raise KeyError(name)


def walk(arch: Architecture, table: Sequence[Entry]) -> Iterator[tuple[Entry, int | None]]:
    """Every entry with every layer it exists in, without the second use of a tied embedding."""
    for entry in table:
        if entry.megatron == "output_layer.weight" and arch.tie_word_embeddings:
            continue
        if "{layer}" in entry.megatron:
            yield from ((entry, layer) for layer in range(arch.num_layers))
        else:
            yield entry, None


def hf_names(entry: Entry, layer: int | None) -> tuple[str, ...]:
    """Names of the HF tensors of ``entry`` in ``layer``."""
    return tuple(name.format(layer=layer) for name in entry.hf)


def hf_shapes(arch: Architecture, entry: Entry) -> tuple[tuple[int, ...], ...]:
    """Shapes of the HF tensors of ``entry``, in order."""
    h, f, d = arch.hidden_size, arch.ffn_hidden_size, arch.head_dim
    q, kv = arch.num_attention_heads * d, arch.num_key_value_heads * d
    name = entry.megatron
    if entry.padded:
        return ((arch.vocab_size, h),)
    if name.endswith("linear_qkv.weight"):
        return (q, h), (kv, h), (kv, h)
    if name.endswith("linear_qkv.bias"):
        return (q,), (kv,), (kv,)
    if name.endswith("linear_proj.weight"):
        return ((h, q),)
    if name.endswith("linear_fc1.weight"):
        return (f, h), (f, h)
    if name.endswith("linear_fc2.weight"):
        return ((h, f),)
    if name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
        return ((d,),)
    if name == "head.weight":
        return ((1, h),)
    return ((1,),) if name == "head.bias" else ((h,),)


def shard_ranges(arch: Architecture, entry: Entry, tp: int, tp_rank: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) along ``entry.dim`` of each HF tensor that this tensor-parallel rank holds."""
    assert entry.dim is not None
    if entry.padded:
        rows = padded_vocab_size(arch) // tp
        start = min(tp_rank * rows, arch.vocab_size)
        return ((start, min((tp_rank + 1) * rows, arch.vocab_size)),)
    sizes = [shape[entry.dim] // tp for shape in hf_shapes(arch, entry)]
    return tuple((tp_rank * size, (tp_rank + 1) * size) for size in sizes)


def places(arch: Architecture, entry: Entry, parameter: torch.Tensor) -> list[torch.Tensor]:
    """Views of a rank's ``parameter``, one for each HF tensor of ``entry``: its part of that tensor fills it in order.

    The part [rows, ...] has as many elements; for :attr:`Layout.GROUPED` the view is [groups, rows of a group, ...].
    """
    if entry.layout is Layout.STACKED:
        return list(parameter.chunk(2))
    if entry.layout is Layout.SINGLE:
        return [parameter]
    d = arch.head_dim
    queries = arch.num_attention_heads // arch.num_key_value_heads
    return list(parameter.unflatten(0, (-1, (queries + 2) * d)).split([queries * d, d, d], dim=1))


def take_apart(arch: Architecture, entry: Entry, parameter: torch.Tensor) -> list[torch.Tensor]:
    """A rank's parts of the HF tensors of ``entry``, from its ``parameter``."""
    parts = places(arch, entry, parameter)
    return [part.flatten(0, 1) for part in parts] if entry.layout is Layout.GROUPED else parts

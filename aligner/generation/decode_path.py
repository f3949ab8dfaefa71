"""One lean forward pass for prefill and decode, over the weights of the Megatron modules themselves.

A stage's modules are read once into flat lists of linear layers (views of the parameters, or packed copies of them);
the forward pass is then plain tensor code without autograd: fused QKV as Megatron stores it (per KV group: its query
heads, key, value), keys and values into the preallocated cache, one all-reduce after attention and one after the MLP
under tensor parallelism, hidden states sent from stage to stage under pipeline parallelism.

Shapes: N tokens of a step (decode: one a slot; prefill: prompts one after the other), K KV heads of this rank,
G query heads a KV head, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F

from aligner.generation.kv_cache import KVCache
from aligner.generation.linear import Linear, make_linear
from aligner.models.role_model import RoleModel
from aligner.models.rope import RotaryTable


@dataclass(frozen=True)
class Layer:
    """The weights of one transformer layer on this rank."""

    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    proj: Linear
    mlp_norm: torch.Tensor
    fc1: Linear
    fc2: Linear


@dataclass(frozen=True)
class StageWeights:
    """The weights of one pipeline stage on this rank. Embedding on the first stage, norm and output on the last."""

    layers: tuple[Layer, ...]
    embedding: torch.Tensor | None
    final_norm: torch.Tensor | None
    output: Linear | None


def read_weights(model: RoleModel, *, packed: bool) -> StageWeights:
    """Views of the parameters of ``model`` (own modules, or Transformer Engine's with fused norms)."""
    module: Any = model.module
    topology = model.topology

    def linear(layer: Any) -> Linear:
        bias = getattr(layer, "bias", None)
        return make_linear(
            layer.weight.detach(), bias.detach() if bias is not None and bias.numel() else None, packed=packed
        )

    def norm(own: Any, fused: Any) -> torch.Tensor:
        weight = getattr(own, "weight", None)
        return (fused.layer_norm_weight if weight is None else weight).detach()

    layers = []
    for block in module.decoder.layers:
        attention, mlp = block.self_attention, block.mlp
        query_norm = getattr(attention.q_layernorm, "weight", None)
        key_norm = getattr(attention.k_layernorm, "weight", None)
        layers.append(
            Layer(
                input_norm=norm(block.input_layernorm, attention.linear_qkv),
                qkv=linear(attention.linear_qkv),
                query_norm=None if query_norm is None else query_norm.detach(),
                key_norm=None if key_norm is None else key_norm.detach(),
                proj=linear(attention.linear_proj),
                mlp_norm=norm(block.pre_mlp_layernorm, mlp.linear_fc1),
                fc1=linear(mlp.linear_fc1),
                fc2=linear(mlp.linear_fc2),
            )
        )
    embedding = final_norm = output = None
    if topology.is_first_stage:
        embedding = module.embedding.word_embeddings.weight.detach()
    if topology.is_last_stage:
        final_norm = module.decoder.final_layernorm.weight.detach()
        output = make_linear(module.output_weight().detach(), None, packed=packed)
    return StageWeights(tuple(layers), embedding, final_norm, output)


class Attention(Protocol):
    """How the tokens of a step attend: queries [N, K, G, D] of ``layer``, whose keys and values are in the cache
    already -> [N, K, G, D]."""

    def __call__(self, layer: int, query_NKGD: torch.Tensor) -> torch.Tensor: ...


class DecodeAttention:
    """Token n is the newest of slot n. ``lengths``: tokens of each slot, the new one included."""

    def __init__(self, cache: KVCache, lengths: Sequence[int], dtype: torch.dtype) -> None:
        self.cache = cache
        self.count = len(lengths)
        self.longest = max(lengths)
        self.mask: torch.Tensor | None = None
        if min(lengths) < self.longest:
            device = cache.tensor.device
            hidden = torch.arange(self.longest, device=device) >= torch.tensor(lengths, device=device)[:, None]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
            self.mask = mask[:, None, None, :]

    def __call__(self, layer: int, query_NKGD: torch.Tensor) -> torch.Tensor:
        # The query heads of a KV head stand where SDPA has query positions: nothing is repeated, nothing is causal.
        keys, values = self.cache.read(layer, 0, self.count, self.longest)
        return F.scaled_dot_product_attention(query_NKGD, keys, values, attn_mask=self.mask)


@dataclass(frozen=True)
class Segment:
    """Tokens ``start``..``end - 1`` of the sequence in ``slot``; the ones before are in the cache."""

    slot: int
    start: int
    end: int


class PrefillAttention:
    """Tokens of several segments, one after the other; causal within each slot, earlier tokens come from the cache."""

    def __init__(self, cache: KVCache, segments: Sequence[Segment]) -> None:
        self.cache = cache
        self.segments = segments
        self.masks = [self._mask(segment) for segment in segments]

    def _mask(self, segment: Segment) -> torch.Tensor | None:
        if segment.start == 0:
            return None
        # is_causal would align to the top left; a continued prompt needs the lower right.
        device = self.cache.tensor.device
        queries = torch.arange(segment.start, segment.end, device=device)
        return torch.arange(segment.end, device=device)[None] <= queries[:, None]

    def __call__(self, layer: int, query_NKGD: torch.Tensor) -> torch.Tensor:
        out = torch.empty(query_NKGD.shape, dtype=query_NKGD.dtype, device=query_NKGD.device)
        first = 0
        for segment, mask in zip(self.segments, self.masks, strict=True):
            count = segment.end - segment.start
            keys, values = self.cache.read(layer, segment.slot, 1, segment.end)
            query = query_NKGD[first : first + count].flatten(1, 2).transpose(0, 1)[None]
            context = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
            out[first : first + count] = context[0].transpose(0, 1).unflatten(1, out.shape[1:3])
            first += count
        return out


class DecodePath:
    """Runs steps of tokens through this rank's stage. ``token_layers`` counts (token, layer) pairs."""

    def __init__(self, model: RoleModel, *, packed: bool) -> None:
        self.topology = model.topology
        self.weights = read_weights(model, packed=packed)
        arch, tp = model.arch, model.topology.tp
        self.kv_heads = arch.num_key_value_heads // tp
        self.queries = arch.num_attention_heads // arch.num_key_value_heads
        self.head_dim = arch.head_dim
        self.hidden_size = arch.hidden_size
        self.epsilon = arch.norm_epsilon
        parameter = next(model.module.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self.rotary = RotaryTable(arch, self.device)
        self.token_layers = 0

    def new_cache(self, num_slots: int, max_length: int) -> KVCache:
        """A cache of this stage's layers and heads."""
        return KVCache(
            num_layers=len(self.weights.layers),
            num_slots=num_slots,
            max_length=max_length,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def forward(
        self, tokens: Sequence[int], positions: Sequence[int], rows: Sequence[int], cache: KVCache, attention: Attention
    ) -> torch.Tensor | None:
        """One step of N tokens at ``positions``, cached at ``rows``. Collective over the tensor-parallel group and
        the pipeline; returns hidden states [N, h] before the final norm on the last stage, None elsewhere."""
        if self.topology.is_first_stage:
            hidden_NH = self._embed(torch.tensor(tokens, device=self.device))
        else:
            hidden_NH = torch.empty(len(tokens), self.hidden_size, dtype=self.dtype, device=self.device)
            dist.recv(hidden_NH, src=self._stage_rank(-1), group=self.topology.pg.pp)
        position_N = torch.tensor(positions, device=self.device)
        row_N = torch.tensor(rows, device=self.device)
        cos, sin = self.rotary.at(position_N, cache.max_length, self.dtype)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        for index, layer in enumerate(self.weights.layers):
            query_NKGD = self._project(layer, index, hidden_NH, cos, sin, row_N, cache)
            context_NH = attention(index, query_NKGD).reshape(len(tokens), -1)
            hidden_NH = self._sum(layer.proj(context_NH)).add_(hidden_NH)
            gate_NF, up_NF = layer.fc1(self._norm(hidden_NH, layer.mlp_norm)).chunk(2, dim=-1)
            hidden_NH = self._sum(layer.fc2(F.silu(gate_NF).mul_(up_NF))).add_(hidden_NH)
        self.token_layers += len(tokens) * len(self.weights.layers)
        if self.topology.is_last_stage:
            return hidden_NH
        dist.send(hidden_NH, dst=self._stage_rank(1), group=self.topology.pg.pp)
        return None

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Last stage: this rank's part of the logits, [N, padded vocabulary / tp], in the model's dtype."""
        assert self.weights.final_norm is not None and self.weights.output is not None
        return self.weights.output(self._norm(hidden_NH, self.weights.final_norm))

    # ------------------------------------------------------------------ inside a layer

    def _project(
        self,
        layer: Layer,
        index: int,
        hidden_NH: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        row_N: torch.Tensor,
        cache: KVCache,
    ) -> torch.Tensor:
        """Rotated queries [N, K, G, D]; rotated keys and values go into the cache."""
        mixed = layer.qkv(self._norm(hidden_NH, layer.input_norm))
        mixed = mixed.view(-1, self.kv_heads, self.queries + 2, self.head_dim)
        rotated = mixed[:, :, : self.queries + 1]
        if layer.query_norm is not None and layer.key_norm is not None:
            rotated[:, :, :-1] = self._norm(rotated[:, :, :-1], layer.query_norm)
            rotated[:, :, -1] = self._norm(rotated[:, :, -1], layer.key_norm)
        first, second = rotated.chunk(2, dim=-1)
        before = first.clone()
        first.mul_(cos).addcmul_(second, sin, value=-1.0)
        second.mul_(cos).addcmul_(before, sin)
        cache.write(index, row_N, mixed[:, :, self.queries :])
        return mixed[:, :, : self.queries]

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.epsilon)

    def _sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum of a row-parallel product over the tensor-parallel ranks."""
        if self.topology.tp > 1:
            dist.all_reduce(partial, group=self.topology.pg.tp)
        return partial

    def _embed(self, token_N: torch.Tensor) -> torch.Tensor:
        table = self.weights.embedding
        assert table is not None
        if self.topology.tp == 1:
            return F.embedding(token_N, table)
        local_N = token_N - self.topology.tp_rank * table.shape[0]
        elsewhere_N = (local_N < 0) | (local_N >= table.shape[0])
        hidden_NH = F.embedding(local_N.masked_fill(elsewhere_N, 0), table)
        return self._sum(hidden_NH.masked_fill(elsewhere_N[:, None], 0.0))

    def _stage_rank(self, step: int) -> int:
        place = self.topology
        return place.rank_of(place.tp_rank, place.pp_rank + step, place.dp_rank)

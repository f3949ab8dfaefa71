"""Self-attention over packed segments on ``scaled_dot_product_attention``, for where Transformer Engine is absent.

A pack holds segments of different lengths. Attention never crosses a segment: segments are put into few buckets of
similar length and each bucket is one batched causal call; a shorter segment is padded at its end, where the causal
mask hides it. No mask tensor exists, and a pack of equal segments is only viewed, never copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from aligner.models.rope import rotate

SHORT_SEGMENT = 128  # tokens; segments up to here share a bucket whatever their lengths


@dataclass(frozen=True)
class Bucket:
    """Segments attended in one call: ``index_N`` [segments * length] are their token positions in the pack."""

    index_N: torch.Tensor
    segments: int
    length: int


@dataclass
class SegmentPlan(PackedSeqParams):
    """Megatron's packed-sequence parameters plus the buckets; made once a pack, used by every layer.

    ``buckets`` empty: all segments have equal length and are in place. ``inverse_T``: where each token of the pack is
    in the concatenated outputs of the buckets.
    """

    num_segments: int = 0
    buckets: tuple[Bucket, ...] = ()
    inverse_T: torch.Tensor | None = None


def plan_segments(bounds: Sequence[int], device: torch.device) -> SegmentPlan:
    """A plan for segments between consecutive ``bounds`` (``cu_seqlens`` as integers, the first is 0)."""
    lengths = [end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    plan = SegmentPlan(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        num_segments=len(lengths),
    )
    if min(lengths) == max(lengths):
        return plan
    groups: list[list[int]] = []
    for segment in sorted(range(len(lengths)), key=lambda s: (-lengths[s], s)):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and (longest <= SHORT_SEGMENT or 2 * lengths[segment] >= longest):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    buckets, inverse, offset = [], torch.empty(bounds[-1], dtype=torch.int64), 0
    for group in groups:
        width = lengths[group[0]]
        starts = torch.tensor([bounds[s] for s in group])
        widths = torch.tensor([lengths[s] for s in group])
        columns = torch.arange(width)
        index = starts[:, None] + torch.minimum(columns[None], widths[:, None] - 1)
        real = columns[None] < widths[:, None]
        inverse[index[real]] = (offset + torch.arange(index.numel()).view_as(index))[real]
        buckets.append(Bucket(index.flatten().to(device), len(group), width))
        offset += index.numel()
    plan.buckets, plan.inverse_T = tuple(buckets), inverse.to(device)
    return plan


class SdpaAttention(torch.nn.Module):
    """Causal grouped-query attention within segments; Megatron's ``core_attention`` interface for packed input.

    In bfloat16 on a CPU it computes in float32, in every pass and for every role: scoring a pack and training on it,
    policy and reference of equal weights give the same bits.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: SegmentPlan,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [T, heads, d], key and value [T, kv heads, d] -> [T, heads * d]."""
        plan, tokens = packed_seq_params, query.size(0)
        if not plan.buckets:
            return self._attend(query, key, value, plan.num_segments).reshape(tokens, -1)
        outputs = []
        for bucket in plan.buckets:
            q, k, v = (x.index_select(0, bucket.index_N) for x in (query, key, value))
            outputs.append(self._attend(q, k, v, bucket.segments).reshape(bucket.index_N.numel(), -1))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        assert plan.inverse_T is not None
        return joined.index_select(0, plan.inverse_T)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: int) -> torch.Tensor:
        """Rows of ``segments`` equal segments, [segments * L, heads, d] -> [segments, L, heads, d]."""
        q, k, v = (x.unflatten(0, (segments, -1)).transpose(1, 2) for x in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        grouped = q.size(1) != k.size(1)
        dtype = q.dtype
        if dtype == torch.bfloat16 and q.device.type == "cpu":
            q, k, v = q.float(), k.float(), v.float()  # the CPU kernel's backward is four times slower in bf16
        if dropout:
            with get_cuda_rng_tracker().fork():
                out = F.scaled_dot_product_attention(q, k, v, None, dropout, True, scale=self.scale, enable_gqa=grouped)
        else:
            out = F.scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=self.scale, enable_gqa=grouped)
        return out.to(dtype).transpose(1, 2)


class PackedSelfAttention(SelfAttention):
    """Megatron's self-attention with its weights and names, and a forward pass for packed input only.

    ``rotary_pos_emb`` is the pair (cos, sin) of the pack, computed once for all layers; query and key heads are rotated
    together.
    """

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any) -> Any:
        """hidden [T (or this rank's part of it), 1, h] -> (the same shape, bias or None)."""
        cos, sin = kwargs["rotary_pos_emb"]
        mixed, _ = self.linear_qkv(hidden_states)
        tokens, head = mixed.size(0), self.hidden_size_per_attention_head
        groups = self.num_query_groups_per_partition
        queries = self.num_attention_heads_per_partition // groups
        mixed = mixed.view(tokens, groups, queries + 2, head)
        if self.config.qk_layernorm:
            query = self.q_layernorm(mixed[:, :, :queries]).reshape(tokens, groups * queries, head)
            query, key = rotate(query, cos, sin), rotate(self.k_layernorm(mixed[:, :, queries]), cos, sin)
        else:
            both = rotate(mixed[:, :, : queries + 1].flatten(1, 2), cos, sin).view(tokens, groups, queries + 1, head)
            query, key = both[:, :, :queries].flatten(1, 2), both[:, :, queries]
        value = mixed[:, :, queries + 1]
        context = self.core_attention(query, key, value, attention_mask, packed_seq_params=kwargs["packed_seq_params"])
        return self.linear_proj(context.unsqueeze(1))

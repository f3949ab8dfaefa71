"""Segments of a pack: buckets cover every token once, and attention equals a masked reference."""

from __future__ import annotations

import pytest
import torch

from aligner.models.attention import SdpaAttention, plan_segments

CPU = torch.device("cpu")


def bounds(*lengths: int) -> list[int]:
    out = [0]
    for length in lengths:
        out.append(out[-1] + length)
    return out


def test_equal_segments_are_only_viewed() -> None:
    plan = plan_segments(bounds(5, 5, 5), CPU)
    assert (plan.buckets, plan.num_segments, plan.max_seqlen_q) == ((), 3, 5)


@pytest.mark.parametrize("lengths", [(3, 9, 1, 4), (300, 20, 280, 150, 149, 1), (129, 64), (7,)])
def test_attention_within_segments(lengths: tuple[int, ...]) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    edges = bounds(*lengths)
    total, heads, groups, width = edges[-1], 4, 2, 8
    plan = plan_segments(edges, CPU)
    if plan.buckets:
        assert plan.inverse_T is not None
        joined = torch.cat([bucket.index_N for bucket in plan.buckets])
        assert torch.equal(joined[plan.inverse_T], torch.arange(total))
        assert sum(bucket.segments for bucket in plan.buckets) == len(lengths)
    query = torch.randn(total, heads, width, requires_grad=True)
    key = torch.randn(total, groups, width, requires_grad=True)
    value = torch.randn(total, groups, width, requires_grad=True)
    config = TransformerConfig(num_layers=1, hidden_size=heads * width, num_attention_heads=heads)
    attention = SdpaAttention(config, 1, None, "self").eval()
    got = attention(query, key, value, packed_seq_params=plan)
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.arange(total)
    allowed = (segment[:, None] == segment[None]) & (positions[:, None] >= positions[None])
    scores = torch.einsum("qgrd,kgd->grqk", query.view(total, groups, -1, width), key) / width**0.5
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    expected = torch.einsum("grqk,kgd->qgrd", weights, value).reshape(total, -1)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    probe = torch.randn_like(got)
    ours = torch.autograd.grad((got * probe).sum(), (query, key, value))
    reference = torch.autograd.grad((expected * probe).sum(), (query, key, value))
    for own, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)

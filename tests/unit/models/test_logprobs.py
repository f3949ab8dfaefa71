"""Log-probs and entropy with their gradients against plain torch, in one process, chunked and not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from aligner.distributed import platform
from aligner.models import logprobs as module
from aligner.models.logprobs import vocab_parallel_logprobs

ROWS, WIDTH, REAL, PADDED = 11, 8, 37, 64


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    platform.initialize()
    yield dist.group.WORLD
    platform.shutdown()


@pytest.mark.parametrize("chunk_rows", [100, 4, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_against_torch(
    group: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
    chunk_rows: int,
    temperature: float,
    with_entropy: bool,
) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_rows * REAL)
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    weight = torch.randn(PADDED, WIDTH, requires_grad=True)
    labels = torch.randint(0, REAL, (ROWS,))
    weights_logprob, weights_entropy = torch.randn(ROWS), torch.randn(ROWS)
    got, entropy = vocab_parallel_logprobs(
        hidden, weight, labels, vocab_size=REAL, temperature=temperature, with_entropy=with_entropy, group=group
    )
    log_p = (hidden @ weight[:REAL].t() / temperature).log_softmax(-1)
    expected = log_p.gather(1, labels[:, None]).squeeze(1)
    expected_entropy = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(got, expected)
    loss, expected_loss = (got * weights_logprob).sum(), (expected * weights_logprob).sum()
    if with_entropy:
        assert entropy is not None
        torch.testing.assert_close(entropy, expected_entropy)
        loss = loss + (entropy * weights_entropy).sum()
        expected_loss = expected_loss + (expected_entropy * weights_entropy).sum()
    else:
        assert entropy is None
    ours = torch.autograd.grad(loss, (hidden, weight))
    reference = torch.autograd.grad(expected_loss, (hidden, weight))
    for own, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-4)
    assert not ours[1][REAL:].any()


def test_confident_logits_stay_finite(group: dist.ProcessGroup) -> None:
    hidden = torch.full((2, 1), 1000.0, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]])
    got, entropy = vocab_parallel_logprobs(
        hidden, weight, torch.tensor([0, 1]), vocab_size=3, temperature=1.0, with_entropy=True, group=group
    )
    assert entropy is not None
    torch.testing.assert_close(got, torch.tensor([0.0, -2000.0]))
    torch.testing.assert_close(entropy, torch.zeros(2))
    (got.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_no_rows(group: dist.ProcessGroup) -> None:
    hidden = torch.zeros(0, 4, requires_grad=True)
    got, entropy = vocab_parallel_logprobs(
        hidden,
        torch.ones(8, 4),
        torch.zeros(0, dtype=torch.int64),
        vocab_size=8,
        temperature=1.0,
        with_entropy=True,
        group=group,
    )
    assert got.shape == (0,) and entropy is not None and entropy.shape == (0,)
    got.sum().backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, 4)


def test_memory_of_all_logits_is_never_needed(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 3 * REAL)
    parts = module._chunks(ROWS, REAL)
    assert [part.stop - part.start for part in parts] == [3, 3, 3, 2]
    assert max((part.stop - part.start) * REAL for part in parts) <= module.CHUNK_ELEMENTS

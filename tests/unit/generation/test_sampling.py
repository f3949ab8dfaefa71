"""The sampler against the definition of its noise, softmax, and sets computed the slow way."""

from __future__ import annotations

import math

import pytest
import torch

from aligner.generation import noise
from aligner.generation.engine import SamplingParams
from aligner.generation.sampling import VocabParallelSampler, row_sampling

CPU = torch.device("cpu")


def _rows(params: list[SamplingParams], seeds: list[int], positions: list[int] | None = None, vocab: int = 1000):
    positions = positions if positions is not None else [7] * len(params)
    return row_sampling(params, seeds, positions, [0] * len(params), vocab, CPU)


def _sample(logits: torch.Tensor, params: list[SamplingParams], seeds: list[int], vocab: int, **kwargs):
    sampler = VocabParallelSampler(vocab, logits.shape[1])
    return sampler.sample(
        logits.clone(),
        row_sampling(
            params,
            seeds,
            kwargs.get("positions", [7] * len(params)),
            kwargs.get("generated", [0] * len(params)),
            vocab,
            CPU,
        ),
    )


def test_noise_is_gumbel_and_keyed() -> None:
    keys = noise.row_keys(noise.seed_tensor(range(400)), torch.zeros(400, dtype=torch.int64))
    values = noise.vocabulary_noise(keys, 1000).double()
    # Mean and variance of the standard Gumbel distribution, and its distribution function at several points.
    assert abs(values.mean().item() - 0.5772) < 0.01
    assert abs(values.var().item() - math.pi**2 / 6) < 0.02
    for point in (-1.5, -0.5, 0.0, 1.0, 3.0, 6.0):
        expected = math.exp(-math.exp(-point))
        assert abs((values <= point).double().mean().item() - expected) < 4 * math.sqrt(0.25 / values.numel())
    # Neighbouring ids, seeds and positions are not correlated.
    centred = values - values.mean()
    for a, b in ((centred[:, 1:], centred[:, :-1]), (centred[1:], centred[:-1]), (centred[:, 64:], centred[:, :-64])):
        assert abs((a * b).mean().item()) < 0.02
    moved = noise.vocabulary_noise(
        noise.row_keys(noise.seed_tensor(range(400)), torch.ones(400, dtype=torch.int64)), 1000
    ).double()
    assert abs((centred * (moved - moved.mean())).mean().item()) < 0.02
    # Seeds of any size; the same seed gives the same noise wherever it stands.
    keys = noise.row_keys(noise.seed_tensor([2**63 + 5, -3, 2**63 + 5]), torch.tensor([4, 4, 4]))
    assert keys[0] == keys[2] and keys[0] != keys[1]


def test_bounds_are_the_block_maxima() -> None:
    keys = noise.row_keys(noise.seed_tensor(range(50)), torch.arange(50))
    full = noise.vocabulary_noise(keys, 640).view(50, 10, noise.BLOCK)
    assert torch.equal(full[:, 3:].amax(-1), noise.block_bounds(keys, 3, 7))


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 20.0])
@pytest.mark.parametrize(("vocab", "padded"), [(1000, 1024), (130, 144), (50, 128)])
def test_result_is_the_full_argmax(scale: float, vocab: int, padded: int) -> None:
    torch.manual_seed(1)
    logits = torch.randn(200, padded) * scale
    seeds = list(range(200))
    params = [SamplingParams(temperature=(0.0, 0.7, 1.0, 1.9)[i % 4]) for i in range(200)]
    ids, logprobs = _sample(logits, params, seeds, vocab, positions=[i * 3 for i in range(200)])
    keys = noise.row_keys(noise.seed_tensor(seeds), torch.arange(200) * 3)
    temperature = torch.tensor([p.temperature or 1.0 for p in params])[:, None]
    noisy = torch.tensor([float(p.temperature > 0) for p in params])[:, None]
    scaled = logits[:, :vocab] / temperature
    assert torch.equal(ids, (scaled + noise.vocabulary_noise(keys, vocab) * noisy).max(-1).indices)
    expected = torch.log_softmax(scaled.double(), -1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=2e-6)


def test_lowest_id_wins_ties() -> None:
    logits = torch.zeros(3, 128)
    logits[0, [40, 90]] = 5.0
    logits[2, [64, 63]] = 5.0
    ids, _ = _sample(logits, [SamplingParams(temperature=0.0)] * 3, [0, 1, 2], 100)
    assert ids.tolist() == [40, 0, 63]
    # The same through the path that draws noise for other rows.
    ids, _ = _sample(logits, [SamplingParams(temperature=0.0)] * 2 + [SamplingParams()], [0, 1, 2], 100)
    assert ids[:2].tolist() == [40, 0]


def test_frequencies_follow_softmax() -> None:
    torch.manual_seed(2)
    row = torch.randn(128) * 1.5
    draws = 20000
    for temperature in (0.7, 1.0):
        params = [SamplingParams(temperature=temperature)] * draws
        ids, _ = _sample(row.expand(draws, -1), params, list(range(draws)), 100)
        expected = torch.softmax(row[:100].double() / temperature, -1) * draws
        counts = torch.bincount(ids, minlength=100).double()
        big = expected >= 5
        cells = torch.cat([expected[big], expected[~big].sum()[None]])
        seen = torch.cat([counts[big], counts[~big].sum()[None]])
        chi_square = ((seen - cells) ** 2 / cells).sum().item()
        freedom = len(cells) - 1
        assert chi_square < freedom + 4 * math.sqrt(2 * freedom)
    # One seed along a sequence is as random as many seeds.
    ids, _ = _sample(row.expand(draws, -1), params, [11] * draws, 100, positions=list(range(draws)))
    counts = torch.bincount(ids, minlength=100).double()
    seen = torch.cat([counts[big], counts[~big].sum()[None]])
    assert ((seen - cells) ** 2 / cells).sum().item() < freedom + 4 * math.sqrt(2 * freedom)


def _kept_set(row: torch.Tensor, params: SamplingParams) -> set[int]:
    """Top-k then top-p by sorting; ties with the last kept id are kept."""
    values = (row.double() / params.temperature).tolist()
    order = sorted(range(len(values)), key=lambda i: -values[i])
    if params.top_k and params.top_k < len(order):
        last = values[order[params.top_k - 1]]
        order = [i for i in order if values[i] >= last]
    weights = [math.exp(values[i] - values[order[0]]) for i in order]
    mass, total = 0.0, sum(weights)
    for i, weight in zip(list(order), weights, strict=True):
        mass += weight
        if mass >= params.top_p * total:
            return {j for j in order if values[j] >= values[i]}
    return set(order)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=1),
        SamplingParams(top_k=5, temperature=1.3),
        SamplingParams(top_k=99),
        SamplingParams(top_p=0.5),
        SamplingParams(top_p=0.9, temperature=0.8),
        SamplingParams(top_p=0.999),
        SamplingParams(top_p=1e-6),
        SamplingParams(top_k=20, top_p=0.8),
    ],
)
def test_top_k_and_top_p_sets(params: SamplingParams) -> None:
    torch.manual_seed(3)
    draws = 3000
    row = torch.randn(128).mul(2).bfloat16().float()  # bf16 values tie often
    row[100:] = 50.0  # padding of the vocabulary: never sampled
    sampler = VocabParallelSampler(100, 128)
    kept = _kept_set(row[:100], params)
    rows = row_sampling([params, SamplingParams()], [1, 2], [0, 0], [0, 0], 100, CPU)
    values = torch.stack([row, row]) / rows.divisor_B[:, None]
    values[:, 100:] = -math.inf
    sampler._filter(values, rows)
    assert set(values[0].isfinite().nonzero()[:, 0].tolist()) == kept
    assert values[1].isfinite().sum() == 100  # the other row of the batch is left alone
    ids, logprobs = _sample(row.expand(draws, -1), [params] * draws, list(range(draws)), 100)
    assert set(ids.tolist()) <= kept
    full = torch.log_softmax(row[:100] / params.temperature, -1)
    torch.testing.assert_close(logprobs, full[ids], atol=1e-5, rtol=0)


def test_filters_agree_with_transformers() -> None:
    warpers = pytest.importorskip("transformers.generation.logits_process")
    torch.manual_seed(4)
    logits = torch.randn(40, 2048) * 4
    sampler = VocabParallelSampler(2048, 2048)
    for k, p in ((50, 1.0), (0, 0.9), (0, 0.3), (40, 0.95)):
        expected = logits.clone()
        if k:
            expected = warpers.TopKLogitsWarper(k)(None, expected)
        if p < 1:
            expected = warpers.TopPLogitsWarper(p)(None, expected)
        values = logits.clone()
        sampler._filter(values, _rows([SamplingParams(top_k=k, top_p=p)] * 40, list(range(40)), vocab=2048))
        assert torch.equal(values.isfinite(), expected.isfinite())


def test_forbidden_ids_and_their_log_probs() -> None:
    logits = torch.zeros(2, 128)
    logits[:, 9] = 8.0
    params = SamplingParams(min_new_tokens=3, stop_token_ids=(9, 200), top_p=0.5)
    ids, logprobs = _sample(logits, [params, params], [1, 1], 100, generated=[2, 3])
    assert ids[0] != 9 and ids[1] == 9
    expected = torch.log_softmax(logits[:, :100], -1)
    assert logprobs.tolist() == pytest.approx([expected[0, ids[0]].item(), expected[1, 9].item()], abs=1e-5)


def test_rows_do_not_depend_on_the_batch() -> None:
    torch.manual_seed(5)
    logits = torch.randn(12, 512)
    params = [
        SamplingParams(temperature=1.0 + 0.1 * i, top_k=(0, 3, 0)[i % 3], top_p=(1, 1, 0.7)[i % 3]) for i in range(12)
    ]
    together, logprobs = _sample(logits, params, list(range(12)), 500)
    for i in range(12):
        alone, logprob = _sample(logits[i : i + 1], [params[i]], [i], 500)
        assert alone[0] == together[i] and abs(logprob[0] - logprobs[i]) < 1e-6


def test_bfloat16_logits_and_non_finite_rows() -> None:
    logits = torch.randn(2, 128).bfloat16()
    logits[1, 5] = float("nan")
    ids, logprobs = _sample(logits, [SamplingParams()] * 2, [1, 2], 100)
    assert logprobs.dtype == torch.float32 and logprobs[0].isfinite() and logprobs[1].isnan()
    assert 0 <= int(ids[1]) < 128

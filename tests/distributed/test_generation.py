"""The native engine on real ranks: against transformers, the trainer's log-probs, and itself in other layouts."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from aligner.config.hf_config import read_architecture
from aligner.data.packing import gather_rows, pack_sequences
from aligner.distributed.topology import Degrees, build_topology, seed_everything
from aligner.errors import GenerationError
from aligner.generation.decode_path import DecodePath
from aligner.generation.engine import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_STOP,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    generate,
)
from aligner.generation.megatron_engine import MegatronEngine
from aligner.models.build import build_model
from aligner.models.forward import score_logprobs
from aligner.models.role_model import RoleModel
from aligner.weights.convert import load_hf
from tests.distributed.spawn import run_ranks

VOCABULARY = 300  # no multiple of 128, so there is padding to mask
EOS = 2  # also the pad id
NEW_TOKENS = 12
PROMPTS = [
    (5, 6, 7, 8, 9, 10, 11),
    (1,),
    (2, 2, 17, 2),  # eos (and pad) inside a prompt is a token like others
    tuple(range(20, 43)),
    (5, 6, 7, 8, 9, 10, 11),
    (299, 0, 150),
]
SAMPLED = [
    SamplingParams(max_new_tokens=NEW_TOKENS),
    SamplingParams(temperature=0.7, top_k=20, max_new_tokens=NEW_TOKENS),
    SamplingParams(temperature=1.2, top_p=0.8, max_new_tokens=NEW_TOKENS),
    SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS),
    SamplingParams(top_k=50, top_p=0.9, max_new_tokens=NEW_TOKENS, min_new_tokens=4, stop_token_ids=tuple(range(150))),
    SamplingParams(temperature=0.9, max_new_tokens=NEW_TOKENS, stop_token_ids=tuple(range(0, 300, 9))),
]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS)
SP = Degrees(tp=2, pp=2, sequence_parallel=True)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small random models saved by transformers: untied Llama and tied Qwen3 (QK norm, head_dim != hidden / heads)."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "initializer_range": 0.3,
    }
    models = {
        "llama": (LlamaForCausalLM, LlamaConfig(**shape, tie_word_embeddings=False)),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config(**shape, head_dim=16, tie_word_embeddings=True)),
    }
    found = {}
    for name, (kind, config) in models.items():
        torch.manual_seed(7)
        found[name] = tmp_path_factory.mktemp("models") / name
        kind(config).save_pretrained(found[name])
    return found


def _load(directory: Path, degrees: Degrees, dtype: torch.dtype = torch.float32) -> RoleModel:
    topology = build_topology(degrees)
    seed_everything(1, topology)
    model = build_model("actor", read_architecture(directory), topology, head="lm", dtype=dtype)
    load_hf(model, directory)
    return model


def _engine(model: RoleModel, tokenizer: object = None, **options: int | bool) -> MegatronEngine:
    sizes: dict[str, int | bool] = {"max_batch_size": 4, "max_sequence_length": 48, **options}
    engine = MegatronEngine(model, tokenizer, **sizes)  # type: ignore[arg-type]
    engine.publish(3)
    return engine


def _requests(
    params: Sequence[SamplingParams], prompts: Sequence[tuple[int, ...]] = PROMPTS
) -> list[GenerationRequest]:
    return [
        GenerationRequest(i, prompt, 1000 + i, param)
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True))
    ]


def _tokens(results: Sequence[GenerationResult]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


def _check_scores(model: RoleModel, results: Sequence[GenerationResult], tolerance: float) -> None:
    """Engine log-probs equal those of the trainer's packed forward pass, at each request's temperature."""
    for params, prompt, result in zip(SAMPLED, PROMPTS, results, strict=True):
        packs = pack_sequences([torch.tensor(prompt + result.token_ids)], 64, multiple_of=model.topology.tp)
        scores = score_logprobs(model, packs, temperature=params.temperature or 1.0)
        row = gather_rows(packs, scores, 1, len(prompt) + len(result.token_ids))[0, len(prompt) :]
        assert (row - torch.tensor(result.logprobs)).abs().max() < tolerance


def _count_case(engine: MegatronEngine, model: RoleModel) -> None:
    """Each token passes each layer once; equal prompts pass once."""
    before = engine.token_layers
    prompts = [(5, 6, 7), (8, 9), (5, 6, 7), (5, 6, 7), (8, 9)]
    results = generate(engine, _requests([SamplingParams(max_new_tokens=5)] * 5, prompts))
    # Four share one admission; when the fifth is admitted, the other (8, 9) has ended: it is computed again.
    counted = torch.tensor([engine.token_layers - before])
    dist.all_reduce(counted, group=model.topology.pg.pp)
    sampled = sum(len(result.token_ids) - 1 for result in results)
    assert int(counted) == (3 + 2 + 2 + sampled) * model.arch.num_layers


def _layout_case(directory: Path, degrees: Degrees) -> dict[str, list[tuple[int, ...]]]:
    model = _load(directory, degrees)
    engine = _engine(model)
    greedy = generate(engine, _requests([GREEDY] * len(PROMPTS)))
    requests = _requests(SAMPLED)
    results = generate(engine, requests)
    assert {result.weights_version for result in results} == {3}
    _check_scores(model, results, 1e-4)
    _count_case(engine, model)
    # Other orders, batch compositions, prefill chunks and plain weights: the same samples.
    other = _engine(model, max_batch_size=2, prefill_tokens=5, pack_weights=False)
    turned = generate(other, requests[::-1])[::-1]
    assert _tokens(turned) == _tokens(results)
    other.submit(requests[2:4])
    late = [*other.poll(), *other.poll()]
    other.submit(requests[5:])
    while other.unfinished:
        late += other.poll()
    assert {r.request_id: r.token_ids for r in late} == {i: results[i].token_ids for i in (2, 3, 5)}
    return {"greedy": _tokens(greedy), "sampled": _tokens(results)}


def _bfloat16_case(directory: Path, degrees: Degrees) -> None:
    model = _load(directory, degrees, torch.bfloat16)
    results = generate(_engine(model), _requests(SAMPLED))
    assert all(len(result.token_ids) >= 1 for result in results)
    _check_scores(model, results, 0.15)


def _layouts_case(directories: dict[str, Path], layouts: list[Degrees]) -> list[dict[str, dict[str, list]]]:
    found = [{name: _layout_case(path, degrees) for name, path in directories.items()} for degrees in layouts]
    for degrees in layouts:
        _bfloat16_case(directories["llama"], degrees)
    return found


def _transformers_greedy(directory: Path, prompts: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        found.append(tuple(out[0, len(prompt) :].tolist()))
    return found


def test_every_layout_samples_what_transformers_and_the_trainer_say(directories: dict[str, Path]) -> None:
    layouts = {1: [Degrees()], 2: [Degrees(tp=2), Degrees(pp=2)], 4: [Degrees(tp=2, pp=2), SP]}
    found = []
    for world_size, degrees in layouts.items():
        for rank_result in run_ranks(world_size, _layouts_case, directories, degrees, timeout=300):
            found += rank_result
    for name, directory in directories.items():
        expected = _transformers_greedy(directory, PROMPTS, NEW_TOKENS)
        sampled = found[0][name]["sampled"]
        assert sampled[0] != sampled[4][: len(sampled[0])]  # equal prompts, other seeds
        assert len(sampled[4]) >= 4
        for layout in found:
            assert layout[name]["greedy"] == expected
            assert layout[name]["sampled"] == sampled


# --------------------------------------------------------------------------- one process: the protocol


class Pieces:
    """A tokenizer whose id i is the text ``<i>``."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(f"<{i}>" for i in token_ids)


def _refuses(match: str, call: object, *args: object) -> None:
    with pytest.raises(GenerationError, match=match):
        call(*args)  # type: ignore[operator]


def _endings_case(model: RoleModel) -> None:
    engine = _engine(model, Pieces())
    request = GenerationRequest(0, (5, 6), 11, SamplingParams(max_new_tokens=20))
    (free,) = generate(engine, [request])
    assert free.finish_reason == FINISH_LENGTH and len(free.token_ids) == 20
    # A stop string over two tokens ends the response with the token that completes it.
    tokens = free.token_ids
    string = f"{tokens[6]}><{tokens[7]}>"
    (stopped,) = generate(engine, [replace(request, params=replace(request.params, stop_strings=("none", string)))])
    assert (stopped.finish_reason, stopped.token_ids) == (FINISH_STOP, tokens[:8])
    assert stopped.logprobs == pytest.approx(free.logprobs[:8], abs=1e-5)
    # A stop id is part of the response.
    params = replace(request.params, stop_token_ids=(tokens[5],))
    (stopped,) = generate(engine, [replace(request, params=params)])
    first = tokens.index(tokens[5])
    assert (stopped.finish_reason, stopped.token_ids) == (FINISH_STOP, tokens[: first + 1])
    # Below min_new_tokens it is not sampled.
    (late,) = generate(engine, [replace(request, params=replace(params, min_new_tokens=15))])
    assert tokens[5] not in late.token_ids[:15] and len(late.token_ids) >= 15
    # The context ends a response too: prompt and response fill max_sequence_length.
    (full,) = generate(engine, [replace(request, params=SamplingParams(max_new_tokens=500))])
    assert (full.finish_reason, len(full.token_ids)) == (FINISH_LENGTH, 46) and full.token_ids[:20] == tokens


def _refusals_case(model: RoleModel) -> None:
    engine = _engine(model)
    fine = SamplingParams(max_new_tokens=3)
    for match, prompt, params in (
        ("empty", (), fine),
        ("no room", tuple(range(48)), fine),
        ("300 is outside the vocabulary", (1, 300), fine),
        ("temperature is -1", (1,), replace(fine, temperature=-1.0)),
        ("top_p is 0", (1,), replace(fine, top_p=0.0)),
        ("top_k is -2", (1,), replace(fine, top_k=-2)),
        ("max_new_tokens is 0", (1,), replace(fine, max_new_tokens=0)),
        ("min_new_tokens is 4", (1,), replace(fine, min_new_tokens=4)),
        ("tokenizer", (1,), replace(fine, stop_strings=("x",))),
        ("stop_strings", (1,), replace(fine, stop_strings=("",))),
    ):
        good = GenerationRequest(1, (1,), 0, fine)
        _refuses(match, engine.submit, [good, GenerationRequest(2, prompt, 0, params)])
    assert engine.unfinished == 0  # the good one of a refused batch is not queued
    _refuses("already in flight", engine.submit, [good, good])
    _refuses("context is 64", lambda: MegatronEngine(model, max_batch_size=1, max_sequence_length=65))
    with torch.no_grad():
        model.module.output_layer.weight.fill_(float("nan"))
    engine.publish(4)
    _refuses("not finite", generate, engine, [good])


def _lifecycle_case(model: RoleModel) -> None:
    engine = _engine(model)
    requests = _requests([SamplingParams(max_new_tokens=6)] * 6)
    before = generate(engine, requests)
    engine.submit(requests)
    finished = engine.poll()
    _refuses("6 requests in flight", engine.publish, 5)
    _refuses("in flight", engine.release)
    engine.abort([1, 5, 77])  # one runs, one waits, one is unknown
    finished += engine.poll()
    aborted = {r.request_id: r for r in finished if r.finish_reason == FINISH_ABORT}
    assert sorted(aborted) == [1, 5] and aborted[5].token_ids == ()
    assert aborted[1].token_ids == before[1].token_ids[: len(aborted[1].token_ids)] != ()
    while engine.unfinished:
        finished += engine.poll()
    assert len(finished) == 6
    rest = {r.request_id: r.token_ids for r in finished if r.finish_reason != FINISH_ABORT}
    assert rest == {i: before[i].token_ids for i in (0, 2, 3, 4)}
    # Memory is really given back, and results are the same after it is taken again.
    held = [weakref.ref(engine._cache.tensor), weakref.ref(engine._path)]  # type: ignore[union-attr]
    engine.release(("kv_cache",))
    gc.collect()
    assert held[0]() is None and held[1]() is not None
    engine.release()
    gc.collect()
    assert held[1]() is None and not [x for x in gc.get_objects() if isinstance(x, DecodePath)]
    _refuses("weights are released", engine.publish, 5)
    engine.submit(requests[:1])
    _refuses("released", engine.poll)
    engine.abort([0])
    engine.poll()
    _refuses("unknown memory tag", engine.resume, ("optimizer",))
    engine.resume(("kv_cache", "weights"))
    assert _tokens(generate(engine, requests)) == _tokens(before)
    # Published weights are the ones that sample.
    with torch.no_grad():
        model.module.decoder.final_layernorm.weight.mul_(-1.0)
    engine.publish(9)
    after = generate(engine, requests)
    assert _tokens(after) != _tokens(before) and {r.weights_version for r in after} == {9}


def _single_case(directory: Path) -> None:
    _endings_case(_load(directory, Degrees()))
    _lifecycle_case(_load(directory, Degrees()))
    _refusals_case(_load(directory, Degrees()))


def test_the_protocol_in_one_process(directories: dict[str, Path]) -> None:
    run_ranks(1, _single_case, directories["llama"])


# --------------------------------------------------------------------------- a real model, where it is at hand


def _stories() -> Path:
    root = Path(os.environ.get("ALIGNER_SHARED", Path(__file__).resolve().parents[3] / "shared"))
    return root / "models" / "stories260K"


def _stories_case(directory: Path, prompts: list[tuple[int, ...]], text: str) -> list[tuple[int, ...]]:
    from aligner.data.tokenizer import load_tokenizer

    model = _load(directory, Degrees())
    engine = _engine(model, load_tokenizer(directory), max_batch_size=2, max_sequence_length=128)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=60)
    results = generate(engine, _requests([greedy] * len(prompts), prompts))
    stopped = generate(engine, _requests([replace(greedy, stop_strings=(text,))] * len(prompts), prompts))
    tokenizer = load_tokenizer(directory)
    for short, long in zip(stopped, results, strict=True):
        assert short.finish_reason == FINISH_STOP and short.token_ids == long.token_ids[: len(short.token_ids)]
        assert text in tokenizer.decode(short.token_ids) and text not in tokenizer.decode(short.token_ids[:-1])
    return _tokens(results)


@pytest.mark.skipif(not _stories().is_dir(), reason="stories260K is not at hand")
def test_stories_equal_transformers_and_stop_at_text() -> None:
    from aligner.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(_stories())
    texts = ["Once upon a time", "Lily and Tom went to the park. They", "The dog"]
    prompts = [(1, *tokenizer.encode(text)) for text in texts]
    (found,) = run_ranks(1, _stories_case, _stories(), prompts, ". ")
    assert found == _transformers_greedy(_stories(), prompts, 60)

"""A rollout in chunks, polled while it decodes: the same batch and polls on every rank; no finished chunk is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aligner.config.hf_config import read_architecture
from aligner.data.samples import PromptSample
from aligner.distributed.collectives import all_gather_objects
from aligner.distributed.stop import Stopped, StopSignals
from aligner.distributed.topology import Degrees, Topology, build_topology, seed_everything
from aligner.errors import AlignerError, GenerationError, RankFailure
from aligner.generation.engine import (
    FINISH_ABORT,
    GenerationEngine,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
)
from aligner.generation.megatron_engine import MegatronEngine
from aligner.models.build import build_model
from aligner.rollout.batch import RolloutBatch
from aligner.rollout.collect import collect
from aligner.weights.convert import load_hf
from tests.distributed.spawn import run_ranks

PROMPTS = [PromptSample(torch.arange(1, 3 + i), ({"role": "user", "content": f"q{i}"},), f"p:{i}") for i in range(5)]
PARAMS = SamplingParams(max_new_tokens=9, stop_token_ids=tuple(range(0, 90, 7)))


class StepEngine:
    """Decodes one token a poll for up to three requests, out of each request's seed."""

    def __init__(self, fail_on: int | None = None) -> None:
        self.waiting: list[GenerationRequest] = []
        self.running: dict[int, tuple[GenerationRequest, list[int]]] = {}
        self.aborted: list[GenerationResult] = []
        self.fail_on = fail_on
        self.polls = 0

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.waiting += requests

    def poll(self) -> list[GenerationResult]:
        finished, self.aborted = self.aborted, []
        self.polls += 1
        while self.waiting and len(self.running) < 3:
            request = self.waiting.pop(0)
            self.running[request.request_id] = (request, [])
        for row, (request, tokens) in list(self.running.items()):
            if row == self.fail_on:
                raise GenerationError(f"request {row} cannot be served")
            tokens.append((request.seed // 10 ** len(tokens)) % 90)
            stops = tokens[-1] in request.params.stop_token_ids
            if stops or len(tokens) == request.params.max_new_tokens:
                finished.append(self._result(row, tokens, "stop" if stops else "length"))
                del self.running[row]
        return finished

    def _result(self, row: int, tokens: Sequence[int], reason: str) -> GenerationResult:
        return GenerationResult(row, tuple(tokens), tuple(-float(token) for token in tokens), reason, 3)

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.aborted)

    def publish(self, version: int) -> None: ...

    def release(self, tags: Sequence[str] = ()) -> None:
        assert not self.unfinished

    def resume(self, tags: Sequence[str] = ()) -> None: ...

    def abort(self, request_ids: Sequence[int]) -> None:
        self.aborted += [self._result(r.request_id, (), FINISH_ABORT) for r in self.waiting]
        self.aborted += [self._result(row, tokens, FINISH_ABORT) for row, (_, tokens) in self.running.items()]
        self.waiting, self.running = [], {}


def sample(engine: GenerationEngine, topology: Topology, **more: Any) -> RolloutBatch:
    return collect(engine, topology, PROMPTS, PARAMS, samples_per_prompt=3, run_seed=11, step=2, **more)


class Counter:
    """A poll that never stops."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1

    def on_all_ranks(self) -> int:
        """The calls, which must be as many on every rank."""
        (calls,) = set(all_gather_objects(self.calls))
        return calls


def same(a: RolloutBatch, b: RolloutBatch, tolerance: float = 0.0) -> bool:
    exact = ("tokens_BT", "lengths_B", "prompt_lengths_B", "loss_mask_BT", "group_id_B", "weights_version_B")
    assert a.engine_logprobs_BT is not None and b.engine_logprobs_BT is not None
    return (
        all(torch.equal(getattr(a, name), getattr(b, name)) for name in exact)
        and (a.finish_reasons, a.metadata, a.logprob_contract) == (b.finish_reasons, b.metadata, b.logprob_contract)
        and float((a.engine_logprobs_BT - b.engine_logprobs_BT).abs().max()) <= tolerance
    )


def check_chunks(
    topology: Topology, engine: Callable[[], GenerationEngine], tolerance: float, sizes: dict[int | None, list[int]]
) -> None:
    """Chunked, polled and resumed rollouts are the whole one. ``sizes``: chunk size -> rows of the chunks."""
    whole = sample(engine(), topology)
    for chunk_size, rows in sizes.items():
        poll, chunks = Counter(), list[RolloutBatch]()
        batch = sample(engine(), topology, chunk_size=chunk_size, chunks=chunks, poll=poll, poll_interval=2)
        assert same(batch, whole, tolerance)
        assert [len(chunk) for chunk in chunks] == rows
        assert poll.on_all_ranks() > len(rows)
        resumed = sample(engine(), topology, chunk_size=4, chunks=chunks[:1])
        assert same(resumed, whole, tolerance)
        idle = engine()
        assert same(sample(idle, topology, chunks=chunks), whole, tolerance)
        assert getattr(idle, "polls", 0) == 0 and getattr(idle, "token_layers", 0) == 0  # all was there


def check_stop(topology: Topology, engine: GenerationEngine, tolerance: float) -> None:
    """A signal to the last rank alone, in the middle of the second chunk, stops all of them at the same place."""
    whole = sample(engine, topology)
    signals, counter = StopSignals(), Counter()
    chunks: list[RolloutBatch] = []
    in_second_chunk, in_flight = 0, 0

    def poll() -> None:
        nonlocal in_second_chunk, in_flight
        counter()
        in_second_chunk += len(chunks) == 1
        if in_second_chunk == 3 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        in_flight = engine.unfinished
        signals.check()

    signals.install()
    try:
        with pytest.raises(Stopped) as caught:
            sample(engine, topology, chunk_size=6, chunks=chunks, poll=poll, poll_interval=1)
    finally:
        signals.uninstall()
    assert caught.value.request.reason == "SIGUSR1"
    assert [len(chunk) for chunk in chunks] == [6]
    counter.on_all_ranks()
    assert any(all_gather_objects(in_flight))
    assert engine.unfinished == 0
    engine.release()
    engine.resume()
    engine.publish(3)
    assert same(sample(engine, topology, chunk_size=6, chunks=chunks), whole, tolerance)
    assert [len(chunk) for chunk in chunks] == [6, 6, 3]


def error_of(engine: StepEngine, topology: Topology) -> AlignerError | None:
    poll = Counter()
    try:
        sample(engine, topology, chunk_size=6, poll=poll, poll_interval=1)
    except AlignerError as error:
        poll.on_all_ranks()
        return error
    return None


def uneven(topology: Topology) -> None:
    """One row for all: replicas without any join every poll."""
    poll = Counter()
    one = PROMPTS[:1]
    batch = collect(StepEngine(), topology, one, PARAMS, run_seed=5, step=1, chunk_size=1, poll=poll, poll_interval=1)
    assert len(batch) == 1
    assert poll.on_all_ranks() == int(batch.response_lengths_B[0])


def changed_chunks(topology: Topology) -> None:
    """Chunks that are not of this batch are sampled again, with all behind them."""
    chunks: list[RolloutBatch] = []
    whole = sample(StepEngine(), topology, chunk_size=3, chunks=chunks)
    first, second, *others = chunks
    for wrong in (
        second.select([0, 1]),
        second.replace(group_id_B=second.group_id_B + 1),
        second.replace(tokens_BT=second.tokens_BT + 1),
        second.replace(logprob_contract=others[0].logprob_contract.__class__(temperature=0.5)),
    ):
        given = [first, wrong, *others]
        assert same(sample(StepEngine(), topology, chunk_size=3, chunks=given), whole)
        assert len(given) == 5 and given[0] is first and given[1] is not wrong and given[2] is not others[0]
    given = [*chunks, first]
    assert same(sample(StepEngine(), topology, chunks=given), whole) and len(given) == 5


def fake_case() -> list[AlignerError | None]:
    world = dist.get_world_size()
    errors: list[AlignerError | None] = []
    for tp in {1, world // 2}:
        topology = build_topology(Degrees(tp=tp))
        check_chunks(topology, StepEngine, 0.0, {None: [15], 1: [3] * 5, 7: [6, 6, 3], 1000: [15]})
        check_stop(topology, StepEngine(), 0.0)
    topology = build_topology(Degrees())
    uneven(topology)
    changed_chunks(topology)
    engine = StepEngine(fail_on=7)  # in the second chunk, of replica 7 % world
    errors.append(error_of(engine, topology))
    assert 7 % world == dist.get_rank() or engine.unfinished == 0
    return errors


@pytest.mark.parametrize("world_size", [2, 4])
def test_replicas_with_uneven_rows(world_size: int) -> None:
    for rank, (error,) in enumerate(run_ranks(world_size, fake_case, timeout=120)):
        own = rank == 7 % world_size
        assert type(error) is (GenerationError if own else RankFailure)
        assert "request 7 cannot be served" in str(error)


def native_case(directory: Path, layouts: Sequence[Degrees]) -> None:
    for degrees in layouts:
        topology = build_topology(degrees)
        seed_everything(1, topology)
        model = build_model("actor", read_architecture(directory), topology, head="lm", dtype=torch.float32)
        load_hf(model, directory)

        def engine(model: Any = model) -> MegatronEngine:
            engine = MegatronEngine(model, max_batch_size=4, max_sequence_length=32)
            engine.publish(3)
            return engine

        check_chunks(topology, engine, 1e-5, {7: [6, 6, 3]})
        check_stop(topology, engine(), 1e-5)


@pytest.mark.parametrize(
    "layouts",
    [[Degrees(), Degrees(tp=2), Degrees(pp=2)], [Degrees(tp=2), Degrees(pp=2), Degrees(tp=2, pp=2)]],
    ids=["2 ranks", "4 ranks"],
)
def test_the_native_engine_in_every_layout(layouts: list[Degrees], tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    run_ranks(4 if Degrees(tp=2, pp=2) in layouts else 2, native_case, tmp_path, layouts, timeout=240)

"""Collecting a rollout over replicas: the same batch on every rank and for every layout; errors end all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from aligner.data.samples import PromptSample
from aligner.distributed.topology import Degrees, build_topology
from aligner.errors import AlignerError, GenerationError, RankFailure
from aligner.generation.engine import GenerationRequest, GenerationResult, SamplingParams
from aligner.rewards.function import FunctionReward
from aligner.rollout.batch import RolloutBatch
from aligner.rollout.collect import collect, reward_requests
from tests.distributed.spawn import run_ranks

PARAMS = SamplingParams(max_new_tokens=6)
PROMPTS = [PromptSample(torch.arange(1, 3 + i), ({"role": "user", "content": f"q{i}"},), f"p:{i}") for i in range(5)]


class SeededEngine:
    """An engine whose responses are a function of the request's seed alone; finishes out of order, two at a time."""

    def __init__(self, fail_on: int | None = None, empty_on: int | None = None) -> None:
        self.waiting: list[GenerationRequest] = []
        self.fail_on = fail_on
        self.empty_on = empty_on
        self.seen: list[int] = []

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.waiting += requests

    def poll(self) -> list[GenerationResult]:
        done = [self.waiting.pop() for _ in range(min(2, len(self.waiting)))]
        return [self._answer(request) for request in done]

    def _answer(self, request: GenerationRequest) -> GenerationResult:
        if request.request_id == self.fail_on:
            raise GenerationError(f"request {request.request_id} cannot be served")
        self.seen.append(request.request_id)
        generator = torch.Generator().manual_seed(request.seed)
        count = int(torch.randint(1, request.params.max_new_tokens + 1, (1,), generator=generator))
        ids = torch.randint(0, 90, (0 if request.request_id == self.empty_on else count,), generator=generator)
        logprobs = -torch.rand(ids.numel(), generator=generator)
        reason = "length" if count == request.params.max_new_tokens else "stop"
        return GenerationResult(request.request_id, tuple(ids.tolist()), tuple(logprobs.tolist()), reason, 3)

    @property
    def unfinished(self) -> int:
        return len(self.waiting)

    def publish(self, version: int) -> None: ...

    def release(self, tags: Sequence[str] = ()) -> None: ...

    def resume(self, tags: Sequence[str] = ()) -> None: ...

    def abort(self, request_ids: Sequence[int]) -> None: ...


class Numbers:
    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


def sample(engine: SeededEngine, degrees: Degrees) -> RolloutBatch:
    topology = build_topology(degrees)
    return collect(engine, topology, PROMPTS, PARAMS, samples_per_prompt=3, run_seed=11, step=2)


def failure(engine: SeededEngine, degrees: Degrees) -> AlignerError | None:
    try:
        sample(engine, degrees)
    except AlignerError as error:
        return error
    return None


def on_a_rank(scratch: str) -> dict:
    """All cases of one world size; returned values are compared across ranks and layouts by the tests."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batches, seen = [], []
    layouts = [Degrees(tp=tp) for tp in (1, 2) if world % tp == 0]
    for degrees in layouts:
        engine = SeededEngine()
        batches.append(sample(engine, degrees))
        seen.append(sorted(engine.seen))
    reward = FunctionReward(f"{scratch}/mine.py:score")
    scores = reward.score(reward_requests(batches[0], PROMPTS, Numbers())).scores_B
    broken = FunctionReward(f"{scratch}/mine.py:broken")
    try:
        broken.score(reward_requests(batches[0], PROMPTS, Numbers()))
        reward_error = None
    except AlignerError as error:
        reward_error = error
    errors = [failure(SeededEngine(fail_on=4), layouts[0]), failure(SeededEngine(empty_on=4), layouts[0])]
    for i, batch in enumerate(batches):
        batch.save(f"{scratch}/world_{world}_layout_{i}_rank_{rank}")
    return {"layouts": len(layouts), "seen": seen, "scores": scores, "errors": errors, "reward_error": reward_error}


def same(a: RolloutBatch, b: RolloutBatch) -> bool:
    tensors = ("tokens_BT", "lengths_B", "loss_mask_BT", "engine_logprobs_BT", "group_id_B", "weights_version_B")
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in tensors) and (
        (a.finish_reasons, a.metadata) == (b.finish_reasons, b.metadata)
    )


def test_collect_on_one_two_and_four_ranks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import random\n"
        "def score(requests):\n    return [random.random() for _ in requests]\n"
        "def broken(requests):\n    return []\n"
    )
    batches = []
    for world in (1, 2, 4):
        results = run_ranks(world, on_a_rank, str(tmp_path), timeout=120)
        for rank, result in enumerate(results):
            for layout in range(result["layouts"]):
                batches.append(RolloutBatch.load(tmp_path / f"world_{world}_layout_{layout}_rank_{rank}"))
            # rows are dealt out in turn to the data-parallel replicas: tp 1, so as many as ranks
            assert result["seen"][0] == list(range(rank, 15, world))
            # a user's function runs once: random scores are equal everywhere
            assert torch.equal(result["scores"], results[0]["scores"])
            # row 4 is sampled by rank 4 % world; there the error itself, elsewhere its message
            own = rank == 4 % world
            for error, text in zip(result["errors"], ("cannot be served", "returned 0 tokens"), strict=True):
                assert type(error) is (GenerationError if own else RankFailure), (world, rank)
                assert text in str(error)
            assert "returned 0 scores for 15 requests" in str(result["reward_error"])
        if world == 4:  # tp 2: two ranks of a replica get the same rows
            assert [result["seen"][1] for result in results] == [list(range(i, 15, 2)) for i in (0, 0, 1, 1)]
    assert len(batches) == 1 + 4 + 8
    assert all(same(batches[0], batch) for batch in batches)

"""Prompts in, a :class:`RolloutBatch` out, the same on every rank.

Rows are prompt-major: row ``p * samples_per_prompt + k`` is sample k of prompt p. Row i is sampled by data-parallel
rank ``i % dp``; its seed depends on (run seed, step, row) only, so the samples depend neither on the layout nor on the
chunks in which they are taken.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from aligner.data.samples import PromptSample
from aligner.distributed.collectives import agree, all_gather_objects, any_of
from aligner.distributed.topology import Topology
from aligner.errors import GenerationError
from aligner.generation.engine import GenerationEngine, GenerationRequest, GenerationResult, SamplingParams
from aligner.rewards.protocol import RewardRequest
from aligner.rollout.batch import LogprobContract, RolloutBatch

GROUPS_PER_STEP = 2**32  # group id = step * this + index of the prompt in the step's batch


class Decoder(Protocol):
    """The part of a tokenizer that turns response ids into text (special tokens left out)."""

    def decode(self, token_ids: Sequence[int]) -> str: ...


def sample_seed(run_seed: int, step: int, row: int, stream: str = "rollout") -> int:
    """Seed in [0, 2^63) of one sample: a hash of its arguments. ``stream`` keeps training and validation apart."""
    content = struct.pack("<qqq", run_seed, step, row) + stream.encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def collect(
    engine: GenerationEngine,
    topology: Topology,
    prompts: Sequence[PromptSample],
    params: SamplingParams,
    *,
    samples_per_prompt: int = 1,
    run_seed: int,
    step: int,
    stream: str = "rollout",
    chunk_size: int | None = None,
    chunks: list[RolloutBatch] | None = None,
    poll: Callable[[], None] | None = None,
    poll_interval: int = 16,
) -> RolloutBatch:
    """Sample ``samples_per_prompt`` responses to each prompt. A collective of all ranks, with equal arguments.

    ``topology`` is the layout of the engine: each data-parallel replica samples its rows, every rank gets all of them.

    Args:
        chunk_size: samples that are worked on together, rounded down to whole prompts, at least one; None: all.
        chunks: the first chunks of this batch, finished before (those that are not of these prompts are removed, with
            all behind them). Each chunk that is finished is appended.
        poll: called by all ranks together, every ``poll_interval`` decode steps and behind every chunk. What it raises
            goes on when the requests in flight are aborted.

    Raises:
        What the engine raised (RankFailure on the ranks where it did not fail).
    """
    requests = build_requests(prompts, params, samples_per_prompt, run_seed, step, stream)
    done: list[RolloutBatch] = [] if chunks is None else chunks
    start = _keep_matching(done, requests, params, samples_per_prompt, step)
    size = len(requests) if chunk_size is None else max(1, chunk_size // samples_per_prompt) * samples_per_prompt
    while start < len(requests):
        rows = range(start, min(start + size, len(requests)))
        own = [requests[row] for row in rows if row % topology.dp == topology.dp_rank]
        gathered = _sample(engine, own, poll, poll_interval)
        results = {
            result.request_id: result for part in all_gather_objects(gathered, topology.pg.dp) for result in part
        }
        first, end = start // samples_per_prompt, rows.stop // samples_per_prompt
        in_order = [results[row] for row in rows]
        done.append(build_batch(prompts[first:end], in_order, params, samples_per_prompt, step, first_prompt=first))
        start = rows.stop
        if poll is not None:
            poll()
    return RolloutBatch.concat(done)


def _keep_matching(
    chunks: list[RolloutBatch],
    requests: Sequence[GenerationRequest],
    params: SamplingParams,
    samples_per_prompt: int,
    step: int,
) -> int:
    """Remove the chunks from the first on that is not of ``requests``; returns the number of rows that are left."""
    start = 0
    for index, chunk in enumerate(chunks):
        rows = range(start, start + len(chunk))
        if (
            rows.stop > len(requests)
            or len(chunk) % samples_per_prompt
            or chunk.logprob_contract != _contract(params)
            or chunk.group_id_B.tolist() != [_group(step, row, samples_per_prompt) for row in rows]
            or any(
                tuple(tokens[:length].tolist()) != requests[row].prompt_ids
                for row, tokens, length in zip(rows, chunk.tokens_BT, chunk.prompt_lengths_B.tolist(), strict=True)
            )
        ):
            del chunks[index:]
            break
        start = rows.stop
    return start


def _sample(
    engine: GenerationEngine,
    requests: Sequence[GenerationRequest],
    poll: Callable[[], None] | None,
    poll_interval: int,
) -> list[GenerationResult]:
    """The results of this replica's ``requests``, in the order they finish. A collective of all ranks.

    With ``poll`` all replicas advance in rounds of at most ``poll_interval`` decode steps; after each they agree on
    whether one has failed and whether one goes on. A replica that is through, or has no requests, joins every round.
    """
    results: list[GenerationResult] = []

    def advance(first: bool) -> None:
        if first:
            engine.submit(requests)
        steps = 0
        while engine.unfinished and (poll is None or steps < poll_interval):
            finished = engine.poll()
            _check_results(requests, finished)
            results.extend(finished)
            steps += 1

    first = True
    while True:
        error: Exception | None = None
        try:
            advance(first)
        except Exception as found:
            error = found
        first = False
        failed, goes_on = any_of(error is not None, error is None and engine.unfinished > 0)
        try:
            if failed:
                agree(error)
            if not goes_on:
                break
            assert poll is not None
            poll()
        except Exception:
            if error is None:
                _abort(engine, requests)
            raise
    return results


def _abort(engine: GenerationEngine, requests: Sequence[GenerationRequest]) -> None:
    """End ``requests`` and take what is left of them out of ``engine``, so that it can be released."""
    engine.abort([request.request_id for request in requests])
    while engine.unfinished:
        engine.poll()


def build_requests(
    prompts: Sequence[PromptSample],
    params: SamplingParams,
    samples_per_prompt: int,
    run_seed: int,
    step: int,
    stream: str = "rollout",
) -> list[GenerationRequest]:
    """One request a row, in row order; ``request_id`` is the row."""
    return [
        GenerationRequest(row, tuple(prompt.prompt_ids.tolist()), sample_seed(run_seed, step, row, stream), params)
        for row, prompt in enumerate(prompt for prompt in prompts for _ in range(samples_per_prompt))
    ]


def build_batch(
    prompts: Sequence[PromptSample],
    results: Sequence[GenerationResult],
    params: SamplingParams,
    samples_per_prompt: int,
    step: int,
    *,
    first_prompt: int = 0,
) -> RolloutBatch:
    """The batch of all rows' results, in row order. Sampled ids, lengths and finish reasons are taken as they are.

    ``first_prompt``: the place of ``prompts[0]`` among the prompts of the step.
    """
    rows = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
    first_row = first_prompt * samples_per_prompt
    prompt_lengths = [int(prompt.prompt_ids.numel()) for prompt in rows]
    lengths = [start + len(result.token_ids) for start, result in zip(prompt_lengths, results, strict=True)]
    tokens_BT = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    engine_logprobs_BT = torch.zeros(len(rows), max(lengths), dtype=torch.float32)
    loss_mask_BT = torch.zeros(len(rows), max(lengths), dtype=torch.bool)
    for row, (prompt, result) in enumerate(zip(rows, results, strict=True)):
        start, end = prompt_lengths[row], lengths[row]
        tokens_BT[row, :start] = prompt.prompt_ids
        tokens_BT[row, start:end] = torch.tensor(result.token_ids)
        engine_logprobs_BT[row, start:end] = torch.tensor(result.logprobs)
        loss_mask_BT[row, start:end] = True
    return RolloutBatch(
        tokens_BT=tokens_BT,
        lengths_B=torch.tensor(lengths),
        prompt_lengths_B=torch.tensor(prompt_lengths),
        loss_mask_BT=loss_mask_BT,
        group_id_B=torch.tensor([_group(step, first_row + row, samples_per_prompt) for row in range(len(rows))]),
        weights_version_B=torch.tensor([result.weights_version for result in results]),
        finish_reasons=tuple(result.finish_reason for result in results),
        metadata=tuple({"source": prompt.source, **prompt.metadata} for prompt in rows),
        logprob_contract=_contract(params),
        engine_logprobs_BT=engine_logprobs_BT,
    ).validate()


def reward_requests(batch: RolloutBatch, prompts: Sequence[PromptSample], decoder: Decoder) -> list[RewardRequest]:
    """What a reward sees of each row of ``batch``, which :func:`collect` made of ``prompts``.

    The response is the text of the tokens after the prompt.
    """
    requests = []
    for row, sequence in enumerate(batch.sequences()):
        prompt = prompts[int(batch.group_id_B[row]) % GROUPS_PER_STEP]
        ids = sequence.tolist()
        requests.append(
            RewardRequest(
                messages=prompt.messages,
                response=decoder.decode(ids[prompt.prompt_ids.numel() :]),
                finish_reason=batch.finish_reasons[row],
                num_tokens=int(batch.response_lengths_B[row]),
                token_ids=tuple(ids),
                metadata=batch.metadata[row],
            )
        )
    return requests


def _group(step: int, row: int, samples_per_prompt: int) -> int:
    return step * GROUPS_PER_STEP + row // samples_per_prompt


def _contract(params: SamplingParams) -> LogprobContract:
    return LogprobContract(temperature=params.temperature or 1.0, full_softmax=True)


def _check_results(requests: Sequence[GenerationRequest], results: Sequence[GenerationResult]) -> None:
    for result in results:
        if not result.token_ids or len(result.token_ids) != len(result.logprobs):
            request = next(request for request in requests if request.request_id == result.request_id)
            raise GenerationError(
                f"the engine returned {len(result.token_ids)} tokens and {len(result.logprobs)} log-probabilities for "
                f"prompt {result.request_id} ({len(request.prompt_ids)} tokens, finish reason "
                f"{result.finish_reason!r}); a response has at least one token and as many log-probabilities: check "
                "max_new_tokens and the prompt's length against the model's context"
            )

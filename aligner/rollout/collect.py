"""Prompts in, a :class:`RolloutBatch` out, the same on every rank.

Rows are prompt-major: row ``p * samples_per_prompt + k`` is sample k of prompt p. Row i is sampled by data-parallel
rank ``i % dp``; its seed depends on (run seed, step, row) only, so the samples do not depend on the layout.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Protocol

import torch

from aligner.data.loader import rows_of_rank
from aligner.data.samples import PromptSample
from aligner.distributed.collectives import all_gather_objects, on_all_ranks
from aligner.distributed.topology import Topology
from aligner.errors import GenerationError
from aligner.generation.engine import GenerationEngine, GenerationRequest, GenerationResult, SamplingParams, generate
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
) -> RolloutBatch:
    """Sample ``samples_per_prompt`` responses to each prompt. A collective of all ranks, with equal arguments.

    ``topology`` is the layout of the engine: each data-parallel replica samples its rows, every rank gets all of them.
    Raises what the engine raised (RankFailure on the ranks where it did not fail).
    """
    requests = build_requests(prompts, params, samples_per_prompt, run_seed, step, stream)

    def sample() -> list[GenerationResult]:
        rows = rows_of_rank(range(len(requests)), topology.dp_rank, topology.dp)
        results = generate(engine, [requests[row] for row in rows])
        _check_results(requests, results)
        return results

    local = on_all_ranks(sample)
    results: list[GenerationResult | None] = [None] * len(requests)
    for part in all_gather_objects(local, topology.pg.dp):
        for result in part:
            results[result.request_id] = result
    missing = [row for row, result in enumerate(results) if result is None]
    assert not missing, f"no replica returned rows {missing}"
    finished = [result for result in results if result is not None]
    return build_batch(prompts, finished, params, samples_per_prompt, step)


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
) -> RolloutBatch:
    """The batch of all rows' results, in row order. Sampled ids, lengths and finish reasons are taken as they are."""
    rows = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
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
        group_id_B=torch.tensor([step * GROUPS_PER_STEP + row // samples_per_prompt for row in range(len(rows))]),
        weights_version_B=torch.tensor([result.weights_version for result in results]),
        finish_reasons=tuple(result.finish_reason for result in results),
        metadata=tuple({"source": prompt.source, **prompt.metadata} for prompt in rows),
        logprob_contract=LogprobContract(temperature=params.temperature or 1.0, full_softmax=True),
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


def _check_results(requests: Sequence[GenerationRequest], results: Sequence[GenerationResult]) -> None:
    for result in results:
        if not result.token_ids or len(result.token_ids) != len(result.logprobs):
            raise GenerationError(
                f"the engine returned {len(result.token_ids)} tokens and {len(result.logprobs)} log-probabilities for "
                f"prompt {result.request_id} ({len(requests[result.request_id].prompt_ids)} tokens, finish reason "
                f"{result.finish_reason!r}); a response has at least one token and as many log-probabilities: check "
                "max_new_tokens and the prompt's length against the model's context"
            )

"""Requests and batches of a rollout, without ranks (tests/distributed/test_collect.py has them)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from aligner.data.samples import PromptSample
from aligner.errors import TrainingError
from aligner.generation.engine import GenerationResult, SamplingParams
from aligner.rollout.collect import GROUPS_PER_STEP, build_batch, build_requests, reward_requests, sample_seed

PROMPTS = [
    PromptSample(torch.tensor([1, 2]), ({"role": "user", "content": "two"},), "p.jsonl:1", {"domain": "a"}),
    PromptSample(torch.tensor([3]), ({"role": "user", "content": "one"},), "p.jsonl:2"),
]
RESULTS = [
    GenerationResult(0, (5, 6, 0), (-0.5, -1.0, -0.25), "stop", 4),
    GenerationResult(1, (7,), (-2.0,), "length", 4),
    GenerationResult(2, (0, 0), (-0.5, -0.75), "stop", 4),
    GenerationResult(3, (8, 9, 8, 9), (-1.0, -1.0, -1.0, -1.0), "length", 5),
]


def test_seeds_depend_on_every_argument_and_nothing_else() -> None:
    seeds = {
        sample_seed(run, step, row, stream)
        for run in range(3)
        for step in range(5)
        for row in range(40)
        for stream in ("rollout", "validation")
    }
    assert len(seeds) == 3 * 5 * 40 * 2
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(1234, 7, 3) == 4271824601176238734  # the same in every process and release


def test_requests_are_prompt_major_and_numbered_by_row() -> None:
    params = SamplingParams(max_new_tokens=4)
    requests = build_requests(PROMPTS, params, 2, run_seed=1, step=9)
    assert [request.prompt_ids for request in requests] == [(1, 2), (1, 2), (3,), (3,)]
    assert [request.request_id for request in requests] == [0, 1, 2, 3]
    assert [request.seed for request in requests] == [sample_seed(1, 9, row) for row in range(4)]
    assert all(request.params is params for request in requests)


def test_batch_by_hand() -> None:
    batch = build_batch(PROMPTS, RESULTS, SamplingParams(temperature=0.7), 2, step=9)
    # id 0 is a real token here, and the padding too: lengths decide
    assert batch.tokens_BT.tolist() == [[1, 2, 5, 6, 0], [1, 2, 7, 0, 0], [3, 0, 0, 0, 0], [3, 8, 9, 8, 9]]
    assert batch.lengths_B.tolist() == [5, 3, 3, 5]
    assert batch.prompt_lengths_B.tolist() == [2, 2, 1, 1]
    assert batch.loss_mask_BT.int().tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 0, 0], [0, 1, 1, 0, 0], [0, 1, 1, 1, 1]]
    assert batch.engine_logprobs_BT is not None
    assert batch.engine_logprobs_BT[0].tolist() == [0, 0, -0.5, -1.0, -0.25]
    assert batch.engine_logprobs_BT[2].tolist() == [0, -0.5, -0.75, 0, 0]
    assert (batch.group_id_B - 9 * GROUPS_PER_STEP).tolist() == [0, 0, 1, 1]
    assert batch.weights_version_B.tolist() == [4, 4, 4, 5]
    assert batch.finish_reasons == ("stop", "length", "stop", "length")
    assert batch.metadata[0] == {"source": "p.jsonl:1", "domain": "a"}
    assert batch.metadata[3] == {"source": "p.jsonl:2"}
    assert batch.logprob_contract.temperature == 0.7 and batch.logprob_contract.full_softmax


def test_greedy_logprobs_are_at_temperature_one() -> None:
    assert build_batch(PROMPTS, RESULTS, SamplingParams(temperature=0.0), 2, 1).logprob_contract.temperature == 1.0


def test_engine_logprobs_that_are_not_finite_stop_the_run() -> None:
    broken = [*RESULTS[:3], GenerationResult(3, (8,), (float("nan"),), "stop", 5)]
    with pytest.raises(TrainingError, match="engine_logprobs_BT"):
        build_batch(PROMPTS, broken, SamplingParams(), 2, 1)


class Letters:
    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(97 + token) for token in token_ids)


def test_reward_requests_belong_to_their_prompts_also_after_select() -> None:
    batch = build_batch(PROMPTS, RESULTS, SamplingParams(), 2, step=9)
    requests = reward_requests(batch, PROMPTS, Letters())
    assert [request.response for request in requests] == ["fga", "h", "aa", "ijij"]
    assert [request.num_tokens for request in requests] == [3, 1, 2, 4]
    assert requests[0].token_ids == (1, 2, 5, 6, 0)
    assert requests[0].messages == PROMPTS[0].messages
    assert requests[0].metadata["domain"] == "a"
    assert [request.finish_reason for request in requests] == ["stop", "length", "stop", "length"]
    assert reward_requests(batch.select([3, 0]), PROMPTS, Letters()) == [requests[3], requests[0]]

"""Validation of PPO: the same prompts with the same seeds every time, so that two steps can be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aligner.distributed.context import RunContext
from aligner.monitoring import metrics as names
from aligner.monitoring.metrics import MetricSums
from aligner.monitoring.samples import step_samples_path, write_samples
from aligner.monitoring.writing import write_on_first_rank
from aligner.rollout.advantages import kl_k1
from aligner.rollout.collect import collect, reward_requests
from aligner.rollout.score import logprobs_of

if TYPE_CHECKING:
    from aligner.algorithms.ppo import PPO

STREAM = "validation"


def validate(ppo: PPO, context: RunContext, step: int, poll: Callable[[], None]) -> dict[str, float]:
    """Sample the fixed prompts with the current policy; keep the samples in the run directory. Collective.

    ``poll`` is called while sampling and between the models' passes; it may raise Stopped.
    """
    assert ppo.validation is not None
    count = min(ppo.config.ppo.validation_prompts, len(ppo.validation))
    prompts = [ppo.validation[index] for index in range(count)]
    ppo.engine.resume()
    ppo.engine.publish(version=step)
    topology, seed = ppo.roles.actor.topology, ppo.config.trainer.seed
    batch = collect(
        ppo.engine,
        topology,
        prompts,
        ppo.sampling,
        run_seed=seed,
        step=0,
        stream=STREAM,
        chunk_size=ppo.config.ppo.rollout_chunk_size,
        poll=poll,
        poll_interval=ppo.config.generation.poll_interval,
    )
    ppo.engine.release()
    poll()
    requests = reward_requests(batch, prompts, ppo.roles.tokenizer)
    scores_B = ppo.roles.reward.score(requests).scores_B
    pack = ppo.config.data.pack_length
    poll()
    policy_BT = logprobs_of(ppo.roles.actor, batch, temperature=ppo.temperature, pack_length=pack)
    reference_BT = logprobs_of(ppo.roles.reference, batch, temperature=ppo.temperature, pack_length=pack)
    kl_B = kl_k1(policy_BT, reference_BT).sum(dim=1)  # both are 0 where the policy wrote nothing
    rows = (
        {
            "prompt": prompt.text,
            "response": request.response,
            "step": step,
            "reward": float(score),
            "kl": float(kl),
            "tokens": request.num_tokens,
            "finish_reason": request.finish_reason,
        }
        for prompt, request, score, kl in zip(prompts, requests, scores_B, kl_B, strict=True)
    )
    path = step_samples_path(context.run_dir, step)
    write_on_first_rank(path, lambda: write_samples(path, rows))
    sums = MetricSums()
    sums.add_values(names.VAL_ROLLOUT_REWARDS_MEAN, scores_B)
    sums.add_values(names.VAL_ROLLOUT_RESPONSE_LENGTH_MEAN, batch.response_lengths_B)
    sums.add_values(names.VAL_ROLLOUT_EOS_RATE, ~batch.truncated_B)
    sums.add_values(names.VAL_ROLLOUT_KL, kl_B)
    return sums.means()

"""PPO for RLHF (Schulman et al. 2017, arXiv:1707.06347; Ouyang et al. 2022, arXiv:2203.02155).

One step reads top to bottom in :func:`ppo_step`: ROLLOUT, SCORE, ADVANTAGES, TRAIN; :func:`run` FINISHes it. Every
rank holds the whole batch of a step on the CPU; each role computes the rows of its own data-parallel rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aligner.algorithms.ppo_checks import check_first_rollout
from aligner.algorithms.ppo_metrics import rollout_metrics
from aligner.algorithms.ppo_update import UpdateMetrics, mini_batches, update_policy, update_values
from aligner.algorithms.ppo_validation import validate
from aligner.algorithms.rollout_chunks import RolloutChunks
from aligner.algorithms.run import TrainingRun
from aligner.checkpoint.stateful import Stateful
from aligner.config.schema import PPORoot
from aligner.data.datasets import PromptDataset
from aligner.data.loader import ShardedOrder
from aligner.data.samples import PromptSample
from aligner.distributed.context import RunContext
from aligner.generation.engine import GenerationEngine, SamplingParams
from aligner.monitoring import metrics as names
from aligner.phases.datasets import open_prompts
from aligner.phases.engine import build_engine, sampling_params
from aligner.phases.identity import run_identity
from aligner.phases.roles import PPORoles, load_ppo_roles
from aligner.rewards.protocol import RewardOutput
from aligner.rollout.advantages import with_advantages
from aligner.rollout.batch import RolloutBatch
from aligner.rollout.collect import collect, reward_requests
from aligner.rollout.kl_controller import KLController, build_kl_controller
from aligner.rollout.score import logprobs_and_entropy_of, logprobs_of, values_of


@dataclass(frozen=True)
class PPO:
    """What a step works with."""

    config: PPORoot
    roles: PPORoles
    engine: GenerationEngine
    sampling: SamplingParams
    prompts: PromptDataset
    order: ShardedOrder
    kl: KLController
    validation: PromptDataset | None

    @property
    def temperature(self) -> float:
        """What log-probs of policy and reference are taken at; greedy rollouts are scored at 1."""
        return self.sampling.temperature or 1.0

    @property
    def sampled_with(self) -> dict[str, Any]:
        """What samples depend on besides prompts and weights."""
        return {
            **dataclasses.asdict(self.sampling),
            "seed": self.config.trainer.seed,
            "samples_per_prompt": self.config.ppo.samples_per_prompt,
        }


def run(root: PPORoot, context: RunContext) -> None:
    """Train actor and critic until ``trainer.max_steps``. Collective."""
    ppo = build(root, context)
    models = {"actor": ppo.roles.actor, "critic": ppo.roles.critic}
    stateful: dict[str, Stateful] = {"order": ppo.order, "kl": ppo.kl}

    def validate_policy(step: int) -> dict[str, float]:
        return validate(ppo, context, step, training.poll)

    with TrainingRun(
        "ppo",
        root,
        context,
        models,
        stateful,
        identity=run_identity(root, context, {"data.prompts": ppo.prompts, "data.validation_prompts": ppo.validation}),
        validate=validate_policy if ppo.validation is not None else None,
        shown=(names.REWARDS_MEAN, names.INIT_POLICY_KL, names.RESPONSE_LENGTH_MEAN, names.CLIP_FRACTION),
    ) as training:
        chunks = RolloutChunks(context, training, ppo.sampled_with)
        for step in training.steps():
            batch, metrics = ppo_step(ppo, training, chunks, step)
            # 5 FINISH: validate, log, save; stop when asked to
            training.finish_step(step, metrics, samples=len(batch), tokens=int(batch.response_lengths_B.sum()))


def ppo_step(
    ppo: PPO, training: TrainingRun, chunks: RolloutChunks, step: int
) -> tuple[RolloutBatch, dict[str, float]]:
    """One PPO step: sample, score, estimate advantages, update critic and policy. Collective.

    A stop request ends it by raising Stopped before TRAIN; what is sampled is kept (``chunks``). A step whose training
    has begun is finished.
    """
    config = ppo.config.ppo

    # 1 ROLLOUT: the engine takes the policy's weights; ids, lengths and finish reasons are kept as sampled
    with training.timers("rollout"):
        prompts = [ppo.prompts[index] for index in ppo.order.next_batch()]
        ppo.engine.resume()
        ppo.engine.publish(version=step - 1)
        batch = collect(
            ppo.engine,
            ppo.roles.actor.topology,
            prompts,
            ppo.sampling,
            samples_per_prompt=config.samples_per_prompt,
            run_seed=ppo.config.trainer.seed,
            step=step,
            chunk_size=config.rollout_chunk_size,
            chunks=chunks.of_step(step),
            poll=training.poll,
            poll_interval=ppo.config.generation.poll_interval,
        )
        ppo.engine.release()

    # 2 SCORE: whole responses by the reward; per-token log-probs by policy and reference; values by the critic
    batch, reward, entropy_BT = _score(ppo, training, batch, prompts)
    if step == 1 and config.self_check:
        check_first_rollout(ppo, batch)

    # 3 ADVANTAGES: KL-shaped token rewards, GAE, whitening over the valid tokens of the global batch
    batch = with_advantages(
        batch,
        kl_coef=ppo.kl.coef,
        discount=config.discount,
        gae_lambda=config.gae_lambda,
        truncation=config.truncation,
        truncation_penalty=config.truncation_penalty,
        whiten_advantages=config.whiten_advantages,
    )
    metrics = rollout_metrics(batch, reward, entropy_BT, kl_coef=ppo.kl.coef)

    # 4 TRAIN: the critic always, the policy after the critic's warm-up
    training.poll()
    with training.dump_on_failure(step, batch.save):
        batch.validate()
        updates = _update(ppo, training, batch, step)
    chunks.trained()
    ppo.kl.update(metrics[names.INIT_POLICY_KL], len(batch))
    return batch, metrics | updates


def _score(
    ppo: PPO, training: TrainingRun, batch: RolloutBatch, prompts: Sequence[PromptSample]
) -> tuple[RolloutBatch, RewardOutput, torch.Tensor]:
    """``batch`` with scores, log-probs and values; what the reward said; [B, T] the policy's entropy. Collective.

    Between two models' passes a stop request is looked for.
    """
    roles, timers, pack = ppo.roles, training.timers, ppo.config.data.pack_length
    training.poll()
    with timers("reward"):
        reward = roles.reward.score(reward_requests(batch, prompts, roles.tokenizer))
    training.poll()
    with timers("logprobs"):
        policy_BT, entropy_BT = logprobs_and_entropy_of(
            roles.actor, batch, temperature=ppo.temperature, pack_length=pack
        )
        training.poll()
        reference_BT = logprobs_of(roles.reference, batch, temperature=ppo.temperature, pack_length=pack)
    training.poll()
    with timers("values"):
        values_BT, bootstrap_B = values_of(roles.critic, batch, pack_length=pack)
    scored = batch.replace(
        scores_B=reward.scores_B,
        policy_logprobs_BT=policy_BT,
        reference_logprobs_BT=reference_BT,
        values_BT=values_BT,
        bootstrap_values_B=bootstrap_B,
    )
    return scored, reward, entropy_BT


def _update(ppo: PPO, training: TrainingRun, batch: RolloutBatch, step: int) -> dict[str, float]:
    """Update critic and policy on shuffled mini-batches of ``batch``. Collective."""
    config, roles, timers = ppo.config.ppo, ppo.roles, training.timers
    seed, pack = ppo.config.trainer.seed, ppo.config.data.pack_length
    updates = UpdateMetrics()
    for rows in mini_batches(len(batch), config.mini_batch_size, config.ppo_epochs, seed, step):
        mini_batch = batch.select(rows)
        if mini_batch.train_mask_BT is None or not mini_batch.train_mask_BT.any():
            continue  # the truncation rule masks every response of the mini-batch
        with timers("train_critic"):
            updates.add_critic(update_values(roles.critic, mini_batch, config, pack_length=pack))
        if step > config.critic_warmup_steps:
            with timers("train_policy"):
                updates.add_policy(
                    update_policy(roles.actor, mini_batch, config, temperature=ppo.temperature, pack_length=pack)
                )
    return updates.means()


def build(root: PPORoot, context: RunContext) -> PPO:
    """Load roles and data, start the engine. Collective."""
    roles = load_ppo_roles(root, context)
    prompts = open_prompts(root.data.prompts, roles.tokenizer, root.data, context)
    validation = None
    if root.data.validation_prompts and root.ppo.validation_prompts:
        validation = open_prompts(root.data.validation_prompts, roles.tokenizer, root.data, context)
    kl = root.ppo.kl
    return PPO(
        config=root,
        roles=roles,
        engine=build_engine(root.generation, root.data.max_prompt_length, roles.actor, roles.tokenizer),
        sampling=sampling_params(root.generation.sampling, roles.tokenizer),
        prompts=prompts,
        order=ShardedOrder(len(prompts), root.ppo.rollout_batch_size, root.trainer.seed, prompts.fingerprint),
        kl=build_kl_controller(kl.controller, kl.coef, kl.target, kl.horizon),
        validation=validation,
    )

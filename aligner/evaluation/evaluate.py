"""``aligner evaluate``: sample every checkpoint on the same prompts with the same seeds, score, compare.

Policies are loaded one after the other, so memory holds one policy and then the reward model, never all.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from rich.console import Console

from aligner.config.schema import EvaluateRoot
from aligner.data.tokenizer import Tokenizer
from aligner.distributed.context import RunContext
from aligner.evaluation.responses import EvaluatedResponse
from aligner.evaluation.runner import Comparison, compare
from aligner.evaluation.sampling import Samples, hold_checkpoint, load_policy, load_prompts, sample
from aligner.monitoring.writing import write_on_first_rank
from aligner.phases.roles import load_reward
from aligner.rewards.rules import get_rule
from aligner.rollout.advantages import kl_k1
from aligner.rollout.score import logprobs_of


def run(root: EvaluateRoot, context: RunContext) -> Comparison:
    """Compare ``evaluation.checkpoints``; rank 0 prints the table and writes results and samples. Collective."""
    config = root.evaluation
    names = list(config.checkpoints)
    kl_from = config.kl_from or names[0]
    temperature = root.generation.sampling.temperature or 1.0
    console = Console(highlight=False)
    samples: dict[str, Samples] = {}
    logprobs: dict[str, torch.Tensor] = {}
    tokenizers: dict[str, Tokenizer] = {}
    held = {name: hold_checkpoint(source, context) for name, source in config.checkpoints.items()}
    for name, source in held.items():
        policy = load_policy(root, source)
        tokenizers[name] = policy.tokenizer
        prompts = load_prompts(root, root.data.prompts, config.limit, policy.tokenizer, context)
        if context.rank == 0:
            console.print(f"{name}: {len(prompts)} prompts, {source}", markup=False)
        samples[name] = sample(root, context, policy, prompts)
        if name != kl_from:
            logprobs[name] = logprobs_of(
                policy.model, samples[name].batch, temperature=temperature, pack_length=root.data.pack_length
            )
        del policy
    context.poll()
    kl = _kl_from(root, held, kl_from, samples, logprobs, tokenizers, temperature)
    context.poll()
    rewards = _rewards(root, samples, tokenizers)
    rules = _rule_scores(config.rule, samples)
    responses = {
        name: [
            EvaluatedResponse(
                prompt_index=row,  # one sample a prompt
                prompt=str(request.messages[-1]["content"]),
                response=request.response,
                num_tokens=request.num_tokens,
                finish_reason=request.finish_reason,
                reward=rewards[name][row] if name in rewards else None,
                rule_score=rules[name][row] if name in rules else None,
                kl=kl[name][row] if name in kl else None,
            )
            for row, request in enumerate(samples[name].requests)
        ]
        for name in names
    }
    comparison = compare(
        responses,
        baseline=config.baseline,
        kl_from=kl_from,
        bootstrap_samples=config.bootstrap_samples,
        confidence=config.confidence,
        seed=root.trainer.seed,
    )
    if context.rank == 0:
        comparison.print(console)
    write_on_first_rank(context.run_dir, lambda: comparison.write(context.run_dir))
    return comparison


def _kl_from(
    root: EvaluateRoot,
    sources: Mapping[str, str],
    kl_from: str,
    samples: Mapping[str, Samples],
    logprobs: Mapping[str, torch.Tensor],
    tokenizers: Mapping[str, Tokenizer],
    temperature: float,
) -> dict[str, list[float]]:
    """k1 estimate of each response's KL from checkpoint ``kl_from``, in nats.

    ``kl_from`` itself needs none, and a checkpoint with another tokenizer has none: its ids mean something else there.
    """
    reference = load_policy(root, sources[kl_from])
    result = {}
    for name, sampled in samples.items():
        if name == kl_from or tokenizers[name].fingerprint() != tokenizers[kl_from].fingerprint():
            continue
        reference_BT = logprobs_of(
            reference.model, sampled.batch, temperature=temperature, pack_length=root.data.pack_length
        )
        result[name] = kl_k1(logprobs[name], reference_BT).sum(dim=1).tolist()
    return result


def _rewards(
    root: EvaluateRoot, samples: Mapping[str, Samples], tokenizers: Mapping[str, Tokenizer]
) -> dict[str, list[float]]:
    """Scores of the reward model or function, where one is configured: loaded once for all checkpoints of one
    tokenizer."""
    if not (root.reward.init_from or root.reward.function):
        return {}
    groups: dict[str, list[str]] = {}
    for name in samples:
        groups.setdefault(tokenizers[name].fingerprint(), []).append(name)
    result = {}
    for group in groups.values():
        reward = load_reward(root.reward, tokenizers[group[0]], root.data.pack_length, root.trainer.seed)
        for name in group:
            result[name] = reward.score(samples[name].requests).scores_B.tolist()
        del reward  # before the next one is loaded
    return result


def _rule_scores(rule_name: str | None, samples: Mapping[str, Samples]) -> dict[str, list[float]]:
    if rule_name is None:
        return {}
    rule = get_rule(rule_name)
    return {name: [rule(request)["score"] for request in sampled.requests] for name, sampled in samples.items()}

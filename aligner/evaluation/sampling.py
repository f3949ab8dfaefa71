"""Loading a policy from any source and sampling it on fixed prompts; shared by ``generate`` and ``evaluate``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aligner.checkpoint.pins import pin
from aligner.config.schema import EvaluateRoot, GenerateRoot
from aligner.config.section import replace
from aligner.config.sources import role_source
from aligner.data.datasets import PromptDataset
from aligner.data.samples import PromptSample
from aligner.data.tokenizer import Tokenizer
from aligner.distributed.collectives import broadcast_object, on_all_ranks
from aligner.distributed.context import RunContext
from aligner.distributed.topology import Degrees, build_topology, seed_everything
from aligner.models.role_model import RoleModel
from aligner.phases.datasets import open_prompts
from aligner.phases.engine import build_engine, sampling_params
from aligner.phases.roles import build_role, fill, role_files
from aligner.phases.sources import find_source
from aligner.rewards.protocol import RewardRequest
from aligner.rollout.batch import RolloutBatch
from aligner.rollout.collect import collect, reward_requests


@dataclass(frozen=True)
class Policy:
    """A frozen policy and its tokenizer."""

    model: RoleModel
    tokenizer: Tokenizer
    source: str


@dataclass(frozen=True)
class Samples:
    """Responses of one policy: the batch, and what a reward sees of each row. Equal on all ranks."""

    batch: RolloutBatch
    requests: list[RewardRequest]


def hold_checkpoint(path: str, context: RunContext) -> str:
    """What ``path`` means now: of a run its newest checkpoint, which its retention keeps until this command ends.

    Anything else is returned as it is. Collective.
    """

    def hold() -> str:
        if context.rank != 0:
            return path
        source = find_source(path)
        if source.kind != "checkpoint":
            return path
        context.held.enter_context(pin(source.path, by=f"evaluation {context.run_dir}", heartbeat=True))
        return str(source.path)

    return broadcast_object(on_all_ranks(hold))


def load_policy(root: GenerateRoot | EvaluateRoot, source: str | None = None) -> Policy:
    """The policy at ``source`` (default: the actor's) in the actor's layout, without an optimizer. Collective."""
    role: Any = root.actor if source is None else replace(root.actor, init_from=source)
    files = on_all_ranks(lambda: role_files(role))
    topology = build_topology(Degrees.from_config(role.parallel), make_global=True)
    seed_everything(root.trainer.seed, topology)
    model = build_role("actor", role, files, head="lm", seed=root.trainer.seed)
    fill(model, on_all_ranks(lambda: find_source(role_source(role))), ("actor",))
    return Policy(model, files.tokenizer, role_source(role))


def load_prompts(
    root: GenerateRoot | EvaluateRoot, path: str, limit: int | None, tokenizer: Tokenizer, context: RunContext
) -> list[PromptSample]:
    """The first ``limit`` usable prompts of ``path``. Collective."""
    dataset: PromptDataset = open_prompts(path, tokenizer, root.data, context)
    return [dataset[index] for index in range(min(limit or len(dataset), len(dataset)))]


def sample(
    root: GenerateRoot | EvaluateRoot,
    context: RunContext,
    policy: Policy,
    prompts: Sequence[PromptSample],
    samples_per_prompt: int = 1,
) -> Samples:
    """Sample responses; the seeds depend on ``trainer.seed`` and the row only. Raises Stopped. Collective."""
    engine = build_engine(root.generation, root.data.max_prompt_length, policy.model, policy.tokenizer)
    engine.resume()
    engine.publish(version=0)
    batch = collect(
        engine,
        policy.model.topology,
        prompts,
        sampling_params(root.generation.sampling, policy.tokenizer),
        samples_per_prompt=samples_per_prompt,
        run_seed=root.trainer.seed,
        step=0,
        stream="evaluation",
        poll=context.poll,
        poll_interval=root.generation.poll_interval,
    )
    engine.release()
    return Samples(batch, reward_requests(batch, prompts, policy.tokenizer))

"""Loading the models of a run: every role on its ranks, in its layout, from its source.

A role's source is ``init_from`` (Hugging Face directory, run or checkpoint) or ``model.path``. A role that the run
itself has saved is built empty here and filled by the checkpoint (``algorithms/run.py``).
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aligner.checkpoint import manifest
from aligner.checkpoint.checkpointer import read_extra
from aligner.checkpoint.initialize import Source, initialize_role
from aligner.config.hf_config import Architecture, read_architecture
from aligner.config.schedule import optimizer_steps
from aligner.config.schema import PPORoot, RewardConfig, RMRoot, SFTRoot
from aligner.config.section import replace
from aligner.config.sources import MODEL_DIRECTORY, model_files, role_source
from aligner.data.tokenizer import Tokenizer, load_tokenizer
from aligner.distributed.collectives import on_all_ranks
from aligner.distributed.context import RunContext
from aligner.distributed.topology import Degrees, build_topology, seed_everything
from aligner.errors import CheckpointError, ConfigError
from aligner.models.build import build_model
from aligner.models.role_model import RoleModel
from aligner.phases.sources import find_source, pin_sources
from aligner.rewards.function import FunctionReward
from aligner.rewards.model_reward import ModelReward
from aligner.rewards.protocol import Reward
from aligner.rewards.standardize import ScoreStatistics
from aligner.weights.hub import resolve_model_directory

FROZEN = ("reference", "reward")  # roles of PPO that are not saved with the run
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class RoleFiles:
    """Architecture and tokenizer of one role."""

    directory: Path
    architecture: Architecture
    tokenizer: Tokenizer


@dataclass(frozen=True)
class PPORoles:
    """The four roles of PPO. ``reward`` may be a function instead of a model."""

    actor: RoleModel
    critic: RoleModel
    reference: RoleModel
    reward: Reward
    tokenizer: Tokenizer


def role_files(role: Any) -> RoleFiles:
    """Architecture and tokenizer of ``role``, from its source. Raises ModelError."""
    directory = resolve_model_directory(model_files(role_source(role)))
    return _read_files(directory, resolve_model_directory(role.model.tokenizer) if role.model.tokenizer else directory)


@functools.lru_cache(maxsize=8)  # roles share files, and a tokenizer takes a second to read
def _read_files(directory: Path, tokenizer_directory: Path) -> RoleFiles:
    architecture, tokenizer = read_architecture(directory), load_tokenizer(tokenizer_directory)
    tokenizer.check_vocabulary(architecture.vocab_size)
    return RoleFiles(directory, architecture, tokenizer)


def files_of_roles(root: Any) -> dict[str, RoleFiles]:
    """Architecture and tokenizer of each model of a training run, by role. Raises ModelError."""
    if isinstance(root, PPORoot):
        critic = replace(root.critic, init_from=ppo_sources(root)["critic"])
        roles = {"actor": root.actor, "critic": critic, "reference": root.reference, "reward": root.reward}
        return {name: role_files(role) for name, role in roles.items() if name in ppo_sources(root)}
    return {"reward": role_files(root.reward)} if isinstance(root, RMRoot) else {"actor": role_files(root.actor)}


def build_role(
    name: str, role: Any, files: RoleFiles, *, head: str, seed: int, horizon: int | None = None
) -> RoleModel:
    """The empty model of ``role`` in its layout. Collective.

    With an optimizer when ``horizon`` is given: the optimizer steps that its learning-rate schedule spans.
    """
    topology = build_topology(Degrees.from_config(role.parallel))
    return build_model(
        name,
        files.architecture,
        topology,
        head=head,
        dtype=DTYPES[role.model.dtype],
        hidden_dropout=role.model.hidden_dropout,
        attention_dropout=role.model.attention_dropout,
        optimizer=role.optimizer if horizon is not None else None,
        horizon=horizon,
        seed=seed,
    )


def fill(model: RoleModel, source: Source, roles: Sequence[str], *, needs_head: bool = True) -> str:
    """The weights at ``source``; of a checkpoint's models the first of ``roles``. Returns which was taken. Collective.

    Without ``needs_head`` a scalar model may start from weights that have no scalar head; it keeps its seeded one.
    """

    def choose() -> str:
        if source.kind == "hf":
            return "hf"
        saved = manifest.read(source.path).roles
        for role in roles:
            if role in saved:
                return role
        raise CheckpointError(
            f"{source.path} holds {', '.join(saved)}; {model.name} can start from {' or '.join(roles)}"
        )

    role = on_all_ranks(choose)
    initialize_role(model, source, role, strict=needs_head)
    return role


def load_actor(root: SFTRoot, context: RunContext) -> tuple[RoleModel, Tokenizer]:
    """The policy to train. Collective."""
    source = pin_sources(context, {"actor": role_source(root.actor)})["actor"]
    return _load_trained("actor", root.actor, source, root, context, head="lm")


def load_trained_reward(root: RMRoot, context: RunContext) -> tuple[RoleModel, Tokenizer]:
    """The reward model to train. Collective."""
    source = pin_sources(context, {"reward": role_source(root.reward)})["reward"]
    return _load_trained("reward", root.reward, source, root, context, head="scalar")


def load_ppo_roles(root: PPORoot, context: RunContext) -> PPORoles:
    """Actor, critic, reference and reward. Collective; Stopped between two roles when a stop was asked for."""
    seed = root.trainer.seed
    sources = pin_sources(context, ppo_sources(root), FROZEN)
    actor, tokenizer = _load_trained("actor", root.actor, sources["actor"], root, context, head="lm")
    context.poll()
    reference_files = on_all_ranks(lambda: role_files(root.reference))
    on_all_ranks(lambda: _require_same_tokenizer("reference", reference_files.tokenizer, tokenizer))
    reference = build_role("reference", root.reference, reference_files, head="lm", seed=seed)
    fill(reference, sources["reference"], ("actor",))
    context.poll()
    reward = load_reward(root.reward, tokenizer, root.data.pack_length, seed, sources.get("reward"))
    context.poll()
    critic = _load_critic(root, sources["critic"], tokenizer, context)
    return PPORoles(actor, critic, reference, reward, tokenizer)


def ppo_sources(root: PPORoot) -> dict[str, str]:
    """What each role starts from, as configured; a reward that is a function has no source."""
    given = {"actor": role_source(root.actor), "reference": role_source(root.reference)}
    if not root.reward.function:
        given["reward"] = role_source(root.reward)
    return {**given, "critic": given.get(root.critic.init_from, root.critic.init_from)}


def load_reward(
    config: RewardConfig, tokenizer: Tokenizer, pack_length: int, seed: int, source: Source | None = None
) -> Reward:
    """The reward: a function, or a reward model that scores standardised (``reward.standardize``). Collective.

    ``source``: where the reward model's weights are; None: what ``init_from`` holds now.
    """
    if config.function:
        function = config.function
        return on_all_ranks(lambda: FunctionReward(function))
    files = on_all_ranks(lambda: role_files(config))
    found = on_all_ranks(lambda: source or find_source(role_source(config)))
    model = build_role("reward", config, files, head="scalar", seed=seed)
    fill(model, found, ("reward",))
    statistics = on_all_ranks(lambda: reward_statistics(found)) if config.standardize else None
    return ModelReward(model, files.tokenizer, tokenizer, statistics=statistics, pack_length=pack_length)


def reward_statistics(source: Source) -> ScoreStatistics:
    """What the reward model's checkpoint knows of its own scores. Local. Raises CheckpointError, ConfigError."""
    if source.kind != "checkpoint":
        raise ConfigError(
            f"reward.standardize=true, but reward.init_from={source.path} is a Hugging Face directory without score "
            "statistics; give the run of `aligner rm`, or set reward.standardize=false"
        )
    return ScoreStatistics.from_dict(read_extra(source.path, "reward_statistics"))


def _load_critic(root: PPORoot, source: Source, tokenizer: Tokenizer, context: RunContext) -> RoleModel:
    """The critic from a reward model (its standardisation absorbed by the head), from a policy, or from a critic."""
    files = on_all_ranks(lambda: files_of_roles(root)["critic"])
    on_all_ranks(lambda: _require_same_tokenizer("critic", files.tokenizer, tokenizer))
    horizon = optimizer_steps(root)["critic"]
    critic = build_role("critic", root.critic, files, head="scalar", seed=root.trainer.seed, horizon=horizon)
    if context.resume_from is not None:
        return critic
    if fill(critic, source, ("critic", "reward", "actor"), needs_head=False) == "reward" and root.reward.standardize:
        statistics = on_all_ranks(lambda: reward_statistics(source))
        critic.absorb_affine(mean=statistics.mean, std=statistics.std)
    return critic


def _load_trained(
    name: str, role: Any, source: Source, root: Any, context: RunContext, *, head: str
) -> tuple[RoleModel, Tokenizer]:
    """The run's main role: its layout is Megatron's global one, its files are kept in ``RUN/model``."""
    files = on_all_ranks(lambda: role_files(role))
    topology = build_topology(Degrees.from_config(role.parallel), make_global=True)
    seed_everything(root.trainer.seed, topology)
    model = build_role(name, role, files, head=head, seed=root.trainer.seed, horizon=optimizer_steps(root)[name])
    if context.resume_from is None:
        fill(model, source, ("reward", "actor") if name == "reward" else ("actor",), needs_head=head == "lm")
    on_all_ranks(lambda: keep_model_files(files, context))
    return model, files.tokenizer


def keep_model_files(files: RoleFiles, context: RunContext) -> None:
    """Copy ``config.json`` and the tokenizer's files to ``RUN/model`` (rank 0): a run can be a source itself."""
    if context.rank != 0:
        return
    target = context.run_dir / MODEL_DIRECTORY
    if files.directory.resolve() == target.resolve():
        return  # a run that continues itself
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(files.directory / "config.json", target / "config.json")
    for file in sorted(files.tokenizer.directory.iterdir()):
        wanted = file.suffix in (".json", ".jinja", ".txt", ".model") and "index" not in file.name
        if file.is_file() and wanted and file.name != "config.json":
            shutil.copyfile(file, target / file.name)


def _require_same_tokenizer(role: str, found: Tokenizer, policy: Tokenizer) -> None:
    """Reference and critic see the policy's token ids, so their tokenizer must be the policy's."""
    if found.fingerprint() != policy.fingerprint():
        raise ConfigError(
            f"{role}: its tokenizer ({found.directory}) is not the policy's ({policy.directory}); {role} reads the "
            f"policy's token ids, so give {role}.init_from a model with the same tokenizer and chat template"
            + (" (its default is the reward model; critic.init_from=actor starts from the policy)" * (role == "critic"))
        )

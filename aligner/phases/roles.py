"""Loading the models of a run: every role on its ranks, in its layout, from its source.

A role's source is ``init_from`` (Hugging Face directory, run or checkpoint) or ``model.path``. A role that the run
itself has saved is built empty here and filled by the checkpoint (``algorithms/run.py``).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aligner.checkpoint import manifest
from aligner.checkpoint.checkpointer import Checkpointer, read_extra
from aligner.checkpoint.initialize import Source, initialize_role, resolve_source
from aligner.config.hf_config import Architecture, read_architecture
from aligner.config.schema import PPOConfig, PPORoot, RewardConfig, RMRoot, SFTRoot
from aligner.config.sources import MODEL_DIRECTORY, model_files, role_source
from aligner.data.tokenizer import Tokenizer, load_tokenizer
from aligner.distributed.collectives import on_all_ranks
from aligner.distributed.context import RunContext
from aligner.distributed.topology import Degrees, build_topology, seed_everything
from aligner.errors import CheckpointError, ConfigError
from aligner.models.build import build_model
from aligner.models.role_model import RoleModel
from aligner.rewards.function import FunctionReward
from aligner.rewards.model_reward import ModelReward
from aligner.rewards.protocol import Reward
from aligner.rewards.standardize import ScoreStatistics
from aligner.weights.hub import resolve_model_directory

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
    architecture = read_architecture(directory)
    tokenizer = load_tokenizer(resolve_model_directory(role.model.tokenizer) if role.model.tokenizer else directory)
    tokenizer.check_vocabulary(architecture.vocab_size)
    return RoleFiles(directory, architecture, tokenizer)


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


def fill(model: RoleModel, source: str, roles: Sequence[str]) -> None:
    """The weights at ``source``; of a checkpoint's models the first of ``roles`` that it has. Collective.

    A policy's weights fill a scalar model without its head, which keeps its seeded start.
    """

    def choose() -> tuple[Source, str]:
        found = resolve_source(resolve_model_directory(source))
        if found.kind == "hf":
            return found, ""
        saved = manifest.read(found.path).roles
        for role in roles:
            if role in saved:
                return found, role
        raise CheckpointError(
            f"{found.path} holds {', '.join(saved)}; {model.name} can start from {' or '.join(roles)}"
        )

    found, role = on_all_ranks(choose)
    initialize_role(model, found, role, strict=not (model.head == "scalar" and role == "actor"))


def load_actor(root: SFTRoot, context: RunContext) -> tuple[RoleModel, Tokenizer]:
    """The policy to train. Collective."""
    return _load_trained("actor", root.actor, root, context, head="lm", horizon=root.trainer.max_steps)


def load_trained_reward(root: RMRoot, context: RunContext) -> tuple[RoleModel, Tokenizer]:
    """The reward model to train. Collective."""
    return _load_trained("reward", root.reward, root, context, head="scalar", horizon=root.trainer.max_steps)


def load_ppo_roles(root: PPORoot, context: RunContext) -> PPORoles:
    """Actor, critic, reference and reward. Collective."""
    seed = root.trainer.seed
    learning_steps = root.trainer.max_steps - root.ppo.critic_warmup_steps
    horizon = max(1, learning_steps) * updates_per_step(root.ppo)
    actor, tokenizer = _load_trained("actor", root.actor, root, context, head="lm", horizon=horizon)
    reference_files = on_all_ranks(lambda: role_files(root.reference))
    reference = build_role("reference", root.reference, reference_files, head="lm", seed=seed)
    fill(reference, role_source(root.reference), ("actor",))
    on_all_ranks(lambda: _require_same_tokenizer("reference", reference_files.tokenizer, tokenizer))
    reward = load_reward(root.reward, tokenizer, root.data.pack_length, seed)
    critic = _load_critic(root, tokenizer, context)
    return PPORoles(actor, critic, reference, reward, tokenizer)


def load_reward(config: RewardConfig, tokenizer: Tokenizer, pack_length: int, seed: int) -> Reward:
    """The reward: a function, or a reward model that scores standardised (``reward.standardize``). Collective."""
    if config.function:
        function = config.function
        return on_all_ranks(lambda: FunctionReward(function))
    files = on_all_ranks(lambda: role_files(config))
    model = build_role("reward", config, files, head="scalar", seed=seed)
    fill(model, role_source(config), ("reward",))
    statistics = reward_statistics(config) if config.standardize else None
    return ModelReward(model, files.tokenizer, tokenizer, statistics=statistics, pack_length=pack_length)


def reward_statistics(config: RewardConfig) -> ScoreStatistics:
    """What the reward model's checkpoint knows of its own scores. Raises CheckpointError. Collective."""

    def read() -> ScoreStatistics:
        kind, path = resolve_source(role_source(config))
        if kind != "checkpoint":
            raise ConfigError(
                f"reward.standardize=true, but reward.init_from={path} is a Hugging Face directory without score "
                "statistics; give the run of `aligner rm`, or set reward.standardize=false"
            )
        return ScoreStatistics.from_dict(read_extra(path, "reward_statistics"))

    return on_all_ranks(read)


def updates_per_step(config: PPOConfig) -> int:
    """Optimizer steps of one PPO step, which is what learning-rate schedules count."""
    samples = config.rollout_batch_size * config.samples_per_prompt
    return config.ppo_epochs * -(-samples // config.mini_batch_size)


def _load_critic(root: PPORoot, tokenizer: Tokenizer, context: RunContext) -> RoleModel:
    """The critic from the reward model (its standardisation absorbed by the head), from the policy, or from a path."""
    starts = {"reward": root.reward, "actor": root.actor}
    source = starts.get(root.critic.init_from)
    if source is None:
        path = root.critic.init_from
        files = on_all_ranks(lambda: _files_of_path(path, root.critic))
    else:
        path = role_source(source)
        files = on_all_ranks(lambda: role_files(source))
    on_all_ranks(lambda: _require_same_tokenizer("critic", files.tokenizer, tokenizer))
    horizon = root.trainer.max_steps * updates_per_step(root.ppo)
    critic = build_role("critic", root.critic, files, head="scalar", seed=root.trainer.seed, horizon=horizon)
    if _is_resumed(context):
        return critic
    fill(critic, path, ("critic", "reward", "actor"))
    if root.critic.init_from == "reward" and root.reward.standardize:
        statistics = reward_statistics(root.reward)
        critic.absorb_affine(mean=statistics.mean, std=statistics.std)
    return critic


def _files_of_path(path: str, role: Any) -> RoleFiles:
    directory = resolve_model_directory(model_files(path))
    tokenizer = load_tokenizer(resolve_model_directory(role.model.tokenizer) if role.model.tokenizer else directory)
    return RoleFiles(directory, read_architecture(directory), tokenizer)


def _load_trained(
    name: str, role: Any, root: Any, context: RunContext, *, head: str, horizon: int
) -> tuple[RoleModel, Tokenizer]:
    """The run's main role: its layout is Megatron's global one, its files are kept in ``RUN/model``."""
    files = on_all_ranks(lambda: role_files(role))
    topology = build_topology(Degrees.from_config(role.parallel), make_global=True)
    seed_everything(root.trainer.seed, topology)
    model = build_role(name, role, files, head=head, seed=root.trainer.seed, horizon=horizon)
    if not _is_resumed(context):
        fill(model, role_source(role), ("reward", "actor") if name == "reward" else ("actor",))
    on_all_ranks(lambda: keep_model_files(files, context))
    return model, files.tokenizer


def keep_model_files(files: RoleFiles, context: RunContext) -> None:
    """Copy ``config.json`` and the tokenizer to ``RUN/model`` (rank 0), so that the run can be a source itself."""
    if context.rank != 0:
        return
    target = context.run_dir / MODEL_DIRECTORY
    target.mkdir(parents=True, exist_ok=True)
    for directory in (files.directory, files.tokenizer.directory):
        for file in sorted(directory.iterdir()):
            wanted = file.suffix in (".json", ".jinja", ".txt", ".model") and "index" not in file.name
            if wanted and file.resolve() != (target / file.name).resolve():
                shutil.copyfile(file, target / file.name)


def _is_resumed(context: RunContext) -> bool:
    return Checkpointer(context.run_dir).newest() is not None


def _require_same_tokenizer(role: str, found: Tokenizer, policy: Tokenizer) -> None:
    """Reference and critic see the policy's token ids, so their tokenizer must be the policy's."""
    if found.fingerprint() != policy.fingerprint():
        raise ConfigError(
            f"{role}: its tokenizer ({found.directory}) is not the policy's ({policy.directory}); {role} reads the "
            f"policy's token ids, so give {role}.init_from a model with the same tokenizer and chat template"
        )

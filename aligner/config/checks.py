"""Checks across sections, made before any rank starts and before any weight is loaded. Imports without torch.

Each message has the numbers that clash and the values that would work. What needs files (architectures) is checked
when they are on this machine; a model that is only on the hub is checked by the ranks when they have it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aligner.config import schema
from aligner.config.effect_checks import check_effects
from aligner.config.file_checks import check_files
from aligner.config.hf_config import Architecture, check_layout, read_architecture
from aligner.config.schedule import optimizer_steps
from aligner.config.sources import model_files, role_source
from aligner.config.value_checks import check_values
from aligner.errors import ConfigError, ModelError, TopologyError

ROLES = ("actor", "critic", "reference", "reward")
_NOT_BUILT = {
    "virtual_pipeline_model_parallel_size": "virtual pipeline parallelism",
    "context_parallel_size": "context parallelism",
    "expert_model_parallel_size": "expert parallelism",
    "expert_tensor_parallel_size": "expert tensor parallelism",
}


@dataclass(frozen=True)
class _Layout:
    """A role's degrees on this world."""

    tp: int
    pp: int
    dp: int


def check(root: Any, world_size: int) -> None:
    """Check a composed configuration for ``world_size`` ranks.

    Raises:
        ConfigError: a value or a combination that cannot run; TopologyError: degrees; ModelError: model directory.
    """
    check_values(root)
    _check_sources(root)
    check_effects(root)
    check_files(root)
    layouts = {name: _check_degrees(name, role, world_size) for name, role in roles(root)}
    _check_batches(root, layouts)
    if isinstance(root.trainer, schema.TrainerConfig):
        _check_steps(root)
    if isinstance(root, schema.PPORoot):
        _check_dropout(root)
        _check_adaptive_kl(root.ppo)
    _check_packing(root)
    architectures = {}
    for name, key, source in _sources(root):
        arch = _architecture(key, source)
        if arch is not None:
            architectures[key] = arch
            _check_model(name, arch, layouts[name])
            _check_context(root, name, arch)
    _check_same_vocabulary(root, architectures)


def roles(root: Any) -> Iterator[tuple[str, Any]]:
    """The model roles of ``root`` that take part in the run: a reward that is a function, or absent, is none."""
    for name in ROLES:
        role = getattr(root, name, None)
        if role is None:
            continue
        if isinstance(role, schema.RewardConfig) and not role.init_from:
            continue
        yield name, role


# --------------------------------------------------------------------------- where things come from


def _check_sources(root: Any) -> None:
    reward = getattr(root, "reward", None)
    if isinstance(reward, schema.RewardConfig):
        if reward.init_from and reward.function:
            raise ConfigError(
                f"reward.init_from={reward.init_from} and reward.function={reward.function}: only one can score; "
                "leave one out"
            )
        if isinstance(root, schema.PPORoot) and not (reward.init_from or reward.function):
            raise ConfigError(
                "no reward: set reward.init_from=<run directory of `aligner rm`> "
                "or reward.function=path/to/file.py:name"
            )
    if isinstance(root, schema.PPORoot) and root.critic.init_from == "reward" and not root.reward.init_from:
        raise ConfigError(
            "critic.init_from=reward, but the reward is a function; set critic.init_from=actor (or a directory)"
        )
    if isinstance(reward, schema.RewardConfig) and reward.init_from and reward.standardize:
        _check_standardize(reward.init_from)
    if isinstance(root, schema.EvaluateRoot):
        _check_evaluation(root)
    if isinstance(root, schema.GenerateRoot) and Path(root.output).exists() and not root.overwrite:
        raise ConfigError(f"output={root.output} exists; choose another file or set overwrite=true")


def _check_standardize(source: str) -> None:
    if (Path(source) / "config.json").is_file() or looks_like_hub_id(source):
        raise ConfigError(
            f"reward.standardize=true, but reward.init_from={source} is a Hugging Face model without score statistics; "
            "give the run of `aligner rm`, or set reward.standardize=false"
        )


def _check_evaluation(root: schema.EvaluateRoot) -> None:
    names = list(root.evaluation.checkpoints)
    if not names:
        raise ConfigError(
            "evaluation.checkpoints is empty; name what to compare: evaluation.checkpoints.<name>=<directory>"
        )
    for key in ("baseline", "kl_from"):
        value = getattr(root.evaluation, key)
        if value is not None and value not in names:
            raise ConfigError(
                f"evaluation.{key}={value}: not among evaluation.checkpoints; choose one of {', '.join(names)}"
            )


# --------------------------------------------------------------------------- degrees and batches


def _check_degrees(name: str, role: Any, world_size: int) -> _Layout:
    parallel = role.parallel
    where = f"{name}.parallel"
    for field in dataclasses.fields(parallel):
        value = getattr(parallel, field.name)
        if field.name == "sequence_parallel":
            continue
        if value < 1:
            raise TopologyError(f"{where}.{field.name}={value}: must be 1 or more")
        if value > 1 and field.name in _NOT_BUILT:
            raise TopologyError(f"{where}.{field.name}={value}: {_NOT_BUILT[field.name]} is not built yet; set it to 1")
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    # A role that follows the actor just has it off when it has no tensor parallelism of its own.
    follows_actor = isinstance(parallel, schema.FollowActorParallelConfig)
    if parallel.sequence_parallel and tp == 1 and not follows_actor:
        raise TopologyError(
            f"{where}.sequence_parallel=true needs tensor parallelism, but {where}.tensor_model_parallel_size=1; "
            "set the first to false or the second to 2 or more"
        )
    if world_size % (tp * pp):
        multiples = ", ".join(str(tp * pp * n) for n in range(1, 4))
        raise TopologyError(
            f"{where}: tensor {tp} x pipeline {pp} = {tp * pp} does not divide the {world_size} ranks; "
            f"start {multiples}, ... ranks (trainer.devices), or choose degrees whose product is one of "
            f"{_listed(divisors(world_size))}"
        )
    return _Layout(tp=tp, pp=pp, dp=world_size // (tp * pp))


def _check_batches(root: Any, layouts: dict[str, _Layout]) -> None:
    """Every data-parallel rank of every role needs at least one row of every batch it works on."""
    data = root.data
    for name, layout in layouts.items():
        if isinstance(data, schema.TextDataConfig):
            _at_least_dp("data.global_batch_size", data.global_batch_size, name, layout)
        if isinstance(root, schema.PPORoot):
            samples = root.ppo.rollout_batch_size * root.ppo.samples_per_prompt
            _at_least_dp("ppo.rollout_batch_size x ppo.samples_per_prompt", samples, name, layout)
            if name in ("actor", "critic"):
                _at_least_dp("ppo.mini_batch_size", root.ppo.mini_batch_size, name, layout)
    if isinstance(root, schema.PPORoot):
        ppo = root.ppo
        samples = ppo.rollout_batch_size * ppo.samples_per_prompt
        if samples % ppo.mini_batch_size:
            raise ConfigError(
                f"ppo.mini_batch_size={ppo.mini_batch_size} does not divide the {samples} samples of a step "
                f"(ppo.rollout_batch_size {ppo.rollout_batch_size} x ppo.samples_per_prompt {ppo.samples_per_prompt}); "
                f"values that work: {_listed(divisors(samples))}"
            )


def _at_least_dp(key: str, value: int, role: str, layout: _Layout) -> None:
    if value < layout.dp:
        raise ConfigError(
            f"{key} = {value} is less than the {layout.dp} data-parallel ranks of {role} "
            f"(tensor {layout.tp}, pipeline {layout.pp}); give {layout.dp} or more, or fewer ranks"
        )


def _check_steps(root: Any) -> None:
    steps = root.trainer.max_steps
    if isinstance(root, schema.PPORoot) and root.ppo.critic_warmup_steps >= steps:
        raise ConfigError(
            f"ppo.critic_warmup_steps={root.ppo.critic_warmup_steps}: the policy never learns in trainer.max_steps="
            f"{steps} steps; give at most {steps - 1}"
        )
    for name, total in optimizer_steps(root).items():
        optimizer = getattr(root, name).optimizer
        if optimizer.decay_steps is None and optimizer.warmup_steps >= total:
            key = f"{name}.optimizer"
            raise ConfigError(
                f"{key}.warmup_steps={optimizer.warmup_steps}, but {name} makes {total} optimizer steps in "
                f"trainer.max_steps={steps} and its schedule ends there; give at most {total - 1}, or set "
                f"{key}.decay_steps above it"
            )


# --------------------------------------------------------------------------- ppo


def _check_dropout(root: schema.PPORoot) -> None:
    """The old log-probs are taken without dropout; with it in the update the first ratio would not be 1."""
    for key, section in (("model", root.model), ("actor.model", root.actor.model), ("critic.model", root.critic.model)):
        for name in ("hidden_dropout", "attention_dropout"):
            if value := getattr(section, name):
                raise ConfigError(
                    f"{key}.{name}={value}: PPO compares updates with log-probs and values taken without dropout, so "
                    f"its ratios would be wrong; set {key}.{name}=0"
                )


def _check_adaptive_kl(ppo: schema.PPOConfig) -> None:
    """A step multiplies the coefficient by 1 + error * samples / horizon, |error| <= 0.2: it must stay above 0."""
    if ppo.kl.controller != "adaptive":
        return
    if not ppo.kl.coef > 0:
        raise ConfigError(
            f"ppo.kl.coef={ppo.kl.coef}: ppo.kl.controller=adaptive multiplies the coefficient, and 0 stays 0; "
            "give a number above 0"
        )
    samples = ppo.rollout_batch_size * ppo.samples_per_prompt
    if samples >= 5 * ppo.kl.horizon:
        raise ConfigError(
            f"ppo.kl.horizon={ppo.kl.horizon} is not above 0.2 x the {samples} samples of a step = {samples / 5:g} "
            f"(ppo.rollout_batch_size {ppo.rollout_batch_size} x ppo.samples_per_prompt {ppo.samples_per_prompt}): the "
            f"coefficient could fall to 0 or below; give {samples // 5 + 1} or more"
        )


# --------------------------------------------------------------------------- lengths


def _check_packing(root: Any) -> None:
    data = root.data
    pairs = isinstance(data, schema.PairDataConfig)
    if isinstance(data, schema.TextDataConfig) and not pairs and data.pack_length < data.sequence_length:
        raise ConfigError(
            f"data.pack_length={data.pack_length} is below data.sequence_length={data.sequence_length}: the longest "
            f"sample would not fit a micro-batch; give {data.sequence_length} or more"
        )
    if isinstance(data, schema.PairDataConfig) and data.pack_length < 2 * data.sequence_length:
        raise ConfigError(
            f"data.pack_length={data.pack_length} is below 2 x data.sequence_length={data.sequence_length}: a pair has "
            f"two samples and stays in one micro-batch; give {2 * data.sequence_length} or more"
        )
    if isinstance(data, schema.ScoredPromptDataConfig):
        new = root.generation.sampling.max_new_tokens
        longest = data.max_prompt_length + new
        if data.pack_length < longest:
            raise ConfigError(
                f"data.pack_length={data.pack_length} is below data.max_prompt_length {data.max_prompt_length} + "
                f"generation.sampling.max_new_tokens {new} = {longest}: the longest sample would not fit a "
                f"micro-batch; give {longest} or more"
            )


def _check_context(root: Any, name: str, arch: Architecture) -> None:
    context = arch.max_position_embeddings
    data = root.data
    if isinstance(data, schema.TextDataConfig):
        if data.sequence_length > context:
            raise ConfigError(
                f"data.sequence_length={data.sequence_length} is above the context of {name}'s model, "
                f"{context} tokens; give {context} or less"
            )
        return
    new = root.generation.sampling.max_new_tokens
    if data.max_prompt_length + new > context:
        works = (
            f"data.max_prompt_length={context - new} works"
            if new < context
            else f"max_new_tokens must be below {context}"
        )
        raise ConfigError(
            f"data.max_prompt_length {data.max_prompt_length} + generation.sampling.max_new_tokens {new} = "
            f"{data.max_prompt_length + new} is above the context of {name}'s model, {context} tokens; {works}"
        )


# --------------------------------------------------------------------------- models


def _check_model(name: str, arch: Architecture, layout: _Layout) -> None:
    try:
        check_layout(arch, layout)
    except TopologyError as error:
        raise TopologyError(f"{name}.parallel: {error}") from None


def _sources(root: Any) -> Iterator[tuple[str, str, str]]:
    """(role, the key that says so, what the role starts from); every compared checkpoint is an actor."""
    if isinstance(root, schema.EvaluateRoot):
        for name, source in root.evaluation.checkpoints.items():
            yield "actor", f"evaluation.checkpoints.{name}", source
    for name, role in roles(root):
        if name == "actor" and isinstance(root, schema.EvaluateRoot):
            continue
        if name == "critic" and role.init_from in ("reward", "actor"):
            yield name, "critic.init_from", role_source(getattr(root, role.init_from))
        else:
            yield name, f"{name}.init_from" if role.init_from else f"{name}.model.path", role_source(role)


def _architecture(key: str, source: str) -> Architecture | None:
    """The architecture of the model at ``source``, or None when its files are not on this machine (a hub id)."""
    files = model_files(source)
    if isinstance(files, str) and looks_like_hub_id(files):
        return None
    if not Path(files).is_dir():
        raise ModelError(
            f"{key}={source}: no such directory; give a Hugging Face directory, a run directory, a checkpoint or a hub "
            "id (`make demo` prepares ./models/smollm2-135m-instruct)"
        )
    return read_architecture(files)


def looks_like_hub_id(text: str) -> bool:
    """``organisation/name`` whose first part is no folder here (then it is a mistyped path)."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", text) is not None and not Path(text.partition("/")[0]).exists()


def _check_same_vocabulary(root: Any, architectures: dict[str, Architecture]) -> None:
    """Policies that KL is measured between share their token ids."""
    if isinstance(root, schema.PPORoot):
        keys = [key for key in architectures if key.startswith(("actor.", "reference."))]
    else:
        keys = [key for key in architectures if key.startswith("evaluation.checkpoints.")]
    sizes = {key: architectures[key].vocab_size for key in keys}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{key} has {size}" for key, size in sizes.items())
        raise ConfigError(f"vocabularies differ in size: {listed}; KL needs models of one family")


# --------------------------------------------------------------------------- numbers


def divisors(number: int) -> list[int]:
    """Divisors of ``number``, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _listed(values: list[int]) -> str:
    shown = values if len(values) <= 12 else [*values[:11], values[-1]]
    return ", ".join(map(str, shown))

"""The configuration schema: one dataclass a section, one root a command.

Defaults are those of a small, sane run; ``conf/`` holds model presets and recipes on top. Strings such as
``${model.path}`` are OmegaConf interpolations: a role follows the top-level ``model`` section unless it is
overridden field by field. Imports without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import II, MISSING

from aligner.config.section import Section

# --------------------------------------------------------------------------- shared sections


@dataclass
class RunConfig(Section):
    """Where a run lives. ``dir`` empty: ``runs/<command>/<date>-<time>``, decided once by the launcher."""

    dir: str | None = None


@dataclass
class ResumableRunConfig(RunConfig):
    """A run that can be continued in its directory."""

    # Keys whose changed values are meant when a run is resumed; `all`: every one that may change at all.
    accept_changes: list[str] = field(default_factory=list)


@dataclass
class ProcessesConfig(Section):
    """Seed and local processes: the trainer section of commands that do not train."""

    devices: int = 1  # local ranks that `aligner` starts when it is not already under torchrun or srun
    threads: int | None = None  # CPU threads a rank; empty: cores // local ranks
    seed: int = 1234


@dataclass
class TrainerConfig(ProcessesConfig):
    """Steps, cadence, seed and local processes."""

    max_steps: int = 100
    val_check_interval: int = 0  # steps between validations; 0: only at the end
    save_interval: int = 0  # steps between checkpoints; 0: only at the end
    max_time: str | None = None  # [D-]HH:MM:SS of wall-clock time: the run saves and stops before it is over
    stop_grace: float = 600.0  # seconds that local ranks have to save after a stop request, then they are killed
    max_restarts: int = 0  # how often local ranks are started again after a crash or a hang
    restart_window: float = 3600.0  # seconds in which max_restarts is counted
    hang_timeout: float = 1800.0  # seconds without a sign of life in a phase; then the rank counts as hung
    phase_timeouts: dict[str, float] = field(default_factory=dict)  # hang_timeout of single phases, by timer name


@dataclass
class CheckpointConfig(Section):
    """How checkpoints are written and which are kept. The resumed one and pinned ones always stay."""

    async_save: bool = True  # write in the background while training goes on
    keep_last: int | None = None  # newest checkpoints to keep; empty: all
    keep_every: int = 0  # besides: those of every Nth step; 0: none
    best_metric: str | None = None  # besides: the best by this metric of metrics.jsonl (a row at a saved step)
    best_mode: str = "max"  # max | min


@dataclass
class ModelConfig(Section):
    """An architecture: a Hugging Face directory (or hub id) and how to compute with it."""

    path: str = MISSING
    tokenizer: str | None = None  # empty: the tokenizer in `path`
    dtype: str = "bfloat16"  # bfloat16 | float32
    hidden_dropout: float = 0.0  # sft and rm only
    attention_dropout: float = 0.0  # sft and rm only


@dataclass
class RoleModelConfig(Section):
    """A role's model: follows the top-level ``model`` section unless overridden."""

    path: str = II("model.path")
    tokenizer: str | None = II("model.tokenizer")
    dtype: str = II("model.dtype")
    hidden_dropout: float = II("model.hidden_dropout")
    attention_dropout: float = II("model.attention_dropout")


@dataclass
class ParallelConfig(Section):
    """Parallel degrees, under Megatron's names. Data parallelism is what is left of the world size."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    sequence_parallel: bool = False


@dataclass
class ActorParallelConfig(ParallelConfig):
    """The layout of the actor; the other roles follow it unless overridden."""


@dataclass
class FollowActorParallelConfig(Section):
    """Parallel degrees of a role that follows the actor's unless overridden."""

    tensor_model_parallel_size: int = II("actor.parallel.tensor_model_parallel_size")
    pipeline_model_parallel_size: int = II("actor.parallel.pipeline_model_parallel_size")
    virtual_pipeline_model_parallel_size: int = II("actor.parallel.virtual_pipeline_model_parallel_size")
    context_parallel_size: int = II("actor.parallel.context_parallel_size")
    expert_model_parallel_size: int = II("actor.parallel.expert_model_parallel_size")
    expert_tensor_parallel_size: int = II("actor.parallel.expert_tensor_parallel_size")
    sequence_parallel: bool = II("actor.parallel.sequence_parallel")


@dataclass
class OptimizerConfig(Section):
    """Adam and its learning-rate schedule. The schedule is defined against ``decay_steps``, which is saved."""

    lr: float = 1e-5
    min_lr: float = 0.0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0  # 0: no clipping
    schedule: str = "cosine"  # cosine | linear | constant
    warmup_steps: int = 0  # optimizer steps; below decay_steps
    decay_steps: int | None = None  # optimizer steps; empty: those of trainer.max_steps of the first life of the run
    use_distributed_optimizer: bool = True


@dataclass
class SamplingConfig(Section):
    """How responses are sampled. ``temperature: 0`` is greedy."""

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop_strings: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)  # besides the tokenizer's end-of-turn ids


@dataclass
class GenerationConfig(Section):
    """The engine that samples responses, and its size."""

    engine: str = "megatron"
    max_batch_size: int = 64  # sequences decoded together on one data-parallel rank
    poll_interval: int = 16  # decode steps between two looks at stop requests
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


@dataclass
class FrozenRoleConfig(Section):
    """A role that is never trained (reference)."""

    model: RoleModelConfig = field(default_factory=RoleModelConfig)
    parallel: FollowActorParallelConfig = field(default_factory=FollowActorParallelConfig)
    placement: str = "all"  # the set of ranks that holds the role
    offload: str = "none"
    init_from: str | None = None  # HF directory, run directory or checkpoint; empty: model.path


@dataclass
class PolicyConfig(Section):
    """The policy of commands that do not train it."""

    model: RoleModelConfig = field(default_factory=RoleModelConfig)
    parallel: ActorParallelConfig = field(default_factory=ActorParallelConfig)
    placement: str = "all"
    offload: str = "none"
    init_from: str | None = None  # HF directory, run directory or checkpoint; empty: model.path


@dataclass
class ActorConfig(PolicyConfig):
    """The policy that is trained."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class ReferenceConfig(FrozenRoleConfig):
    """The frozen policy that KL is measured against; starts where the actor starts."""

    init_from: str | None = II("actor.init_from")


@dataclass
class CriticConfig(Section):
    """The value model. ``init_from`` is ``reward`` (default), ``actor``, or a path like any role's."""

    model: RoleModelConfig = field(default_factory=RoleModelConfig)
    parallel: FollowActorParallelConfig = field(default_factory=FollowActorParallelConfig)
    placement: str = "all"
    offload: str = "none"
    init_from: str = "reward"  # reward | actor | a path
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class RewardConfig(FrozenRoleConfig):
    """What scores whole responses: a trained reward model (``init_from``) or a Python ``function``.

    ``function`` is ``path/to/file.py:name``; see ``aligner/rewards/protocol.py`` for its signature.
    Exactly one of ``init_from`` and ``function`` is given.
    """

    function: str | None = None
    standardize: bool = True  # (score - mean) / std with the statistics stored in the reward model's checkpoint


# --------------------------------------------------------------------------- data sections


@dataclass
class TextDataConfig(Section):
    """Training data of SFT: JSONL paths, or ``builtin:<name>``."""

    train: str = MISSING
    validation: str | None = None
    sequence_length: int = 1024  # longest sample in tokens
    pack_length: int = 1024  # tokens of one micro-batch (several samples packed); at least sequence_length
    global_batch_size: int = 16  # samples (SFT) or pairs (reward model) an optimizer step, over all ranks
    too_long: str = "drop"  # drop | truncate: what happens to samples over sequence_length (counted, reported)
    filter: str | None = None  # path/to/file.py:name, called with the raw row (a dict); False drops the row


@dataclass
class PairDataConfig(TextDataConfig):
    """Training data of the reward model: preference pairs."""

    sequence_length: int = 1024  # longest side of a pair (prompt and response) in tokens
    pack_length: int = 2048  # tokens of one micro-batch (several pairs packed); at least 2 x sequence_length


@dataclass
class PromptDataConfig(Section):
    """Prompts of generation."""

    prompts: str = "builtin:prompts_train.jsonl"
    max_prompt_length: int = 256  # tokens, chat template included
    too_long: str = "drop"  # drop | truncate (keeps the last tokens)
    filter: str | None = None  # path/to/file.py:name, called with the raw row (a dict); False drops the row


@dataclass
class ScoredPromptDataConfig(PromptDataConfig):
    """Prompts whose responses are scored: evaluation, on held-out prompts."""

    prompts: str = "builtin:prompts_heldout.jsonl"
    pack_length: int = 1024  # tokens of one scoring micro-batch (several samples packed)


@dataclass
class PPODataConfig(ScoredPromptDataConfig):
    """Prompts of PPO and of its validations."""

    prompts: str = "builtin:prompts_train.jsonl"
    validation_prompts: str | None = "builtin:prompts_heldout.jsonl"


# --------------------------------------------------------------------------- algorithm sections


@dataclass
class KLConfig(Section):
    """KL penalty in the reward: fixed, or adaptive (Ziegler et al. 2019, arXiv:1909.08593)."""

    controller: str = "fixed"  # fixed | adaptive
    coef: float = 0.05
    target: float = 6.0  # adaptive only: wanted KL a response, in nats
    horizon: int = 10000  # adaptive only: samples; above 0.2 x the samples of a step


@dataclass
class PPOConfig(Section):
    """PPO (Schulman et al. 2017, arXiv:1707.06347) as used for RLHF."""

    rollout_batch_size: int = 16  # prompts a step, over all ranks
    samples_per_prompt: int = 1
    rollout_chunk_size: int = 256  # samples sampled together; finished chunks of an interrupted step are kept
    mini_batch_size: int = 16  # samples an optimizer step, over all ranks
    ppo_epochs: int = 1
    clip_ratio: float = 0.2
    value_clip: float = 0.2
    entropy_coef: float = 0.0
    discount: float = 1.0
    gae_lambda: float = 0.95
    whiten_advantages: bool = True
    critic_warmup_steps: int = 0  # first steps in which only the critic learns
    truncation: str = "bootstrap"  # bootstrap | penalize | mask: responses cut at max_new_tokens
    truncation_penalty: float = 1.0  # penalize only: subtracted from the score
    validation_prompts: int = 32  # how many of data.validation_prompts are sampled at a validation
    self_check: bool = True  # step-0 checks; a failed one stops the run
    # Largest mean |engine - trainer| log-prob difference, in nats; empty: 1e-3 in float32, 0.1 in bfloat16.
    self_check_tolerance: float | None = None
    kl: KLConfig = field(default_factory=KLConfig)


# --------------------------------------------------------------------------- roots, one a command


@dataclass
class SFTRoot(Section):
    """``aligner sft``."""

    run: ResumableRunConfig = field(default_factory=ResumableRunConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    data: TextDataConfig = field(default_factory=TextDataConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)


@dataclass
class TrainedRewardConfig(Section):
    """The reward model while it is being trained (``aligner rm``)."""

    model: RoleModelConfig = field(default_factory=RoleModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    placement: str = "all"
    offload: str = "none"
    init_from: str | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class RMRoot(Section):
    """``aligner rm``."""

    run: ResumableRunConfig = field(default_factory=ResumableRunConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    data: PairDataConfig = field(default_factory=PairDataConfig)
    reward: TrainedRewardConfig = field(default_factory=TrainedRewardConfig)


@dataclass
class PPORoot(Section):
    """``aligner ppo``."""

    run: ResumableRunConfig = field(default_factory=ResumableRunConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    data: PPODataConfig = field(default_factory=PPODataConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)


@dataclass
class GenerateRoot(Section):
    """``aligner generate``: samples responses to prompts into a JSONL file."""

    run: RunConfig = field(default_factory=RunConfig)
    trainer: ProcessesConfig = field(default_factory=ProcessesConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: PromptDataConfig = field(default_factory=PromptDataConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    actor: PolicyConfig = field(default_factory=PolicyConfig)
    output: str = MISSING  # JSONL file to write
    limit: int | None = None  # first N prompts only
    samples_per_prompt: int = 1
    overwrite: bool = False


@dataclass
class EvaluationConfig(Section):
    """What is compared and how."""

    checkpoints: dict[str, str] = field(default_factory=dict)  # name: HF directory, run directory or checkpoint
    baseline: str | None = None  # name that win rates are measured against; empty: the first
    kl_from: str | None = None  # name that KL is measured from; empty: the first
    limit: int | None = None  # first N prompts only
    rule: str | None = "concise"  # built-in rule judge; empty: none
    bootstrap_samples: int = 2000
    confidence: float = 0.95


@dataclass
class EvaluateRoot(Section):
    """``aligner evaluate``: compares checkpoints on fixed prompts."""

    run: RunConfig = field(default_factory=RunConfig)
    trainer: ProcessesConfig = field(default_factory=ProcessesConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: ScoredPromptDataConfig = field(default_factory=ScoredPromptDataConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    actor: PolicyConfig = field(default_factory=PolicyConfig)  # layout and dtype of the compared policies
    reward: RewardConfig = field(default_factory=RewardConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


ROOTS: dict[str, type[Any]] = {
    "sft": SFTRoot,
    "rm": RMRoot,
    "ppo": PPORoot,
    "generate": GenerateRoot,
    "evaluate": EvaluateRoot,
}

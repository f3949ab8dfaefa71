"""The generation engine of a run and its sampling parameters, from the configuration."""

from __future__ import annotations

from aligner.config.schema import GenerationConfig, SamplingConfig
from aligner.data.tokenizer import Tokenizer
from aligner.generation.engine import GenerationEngine, SamplingParams
from aligner.models.role_model import RoleModel


def sampling_params(config: SamplingConfig, tokenizer: Tokenizer) -> SamplingParams:
    """``generation.sampling`` plus the tokenizer's own stop ids."""
    return SamplingParams(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        max_new_tokens=config.max_new_tokens,
        min_new_tokens=config.min_new_tokens,
        stop_token_ids=tuple(sorted({*tokenizer.stop_token_ids, *config.stop_token_ids})),
        stop_strings=tuple(config.stop_strings),
    )


def build_engine(
    config: GenerationConfig, max_prompt_length: int, actor: RoleModel, tokenizer: Tokenizer
) -> GenerationEngine:
    """The engine named by ``generation.engine`` over the actor's own weights."""
    from aligner.generation.megatron_engine import MegatronEngine

    return MegatronEngine(
        actor,
        tokenizer,
        max_batch_size=config.max_batch_size,
        max_sequence_length=max_prompt_length + config.sampling.max_new_tokens,
    )

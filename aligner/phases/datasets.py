"""Opening a data set on all ranks: the ranks share the one check of all rows and learn its outcome together."""

from __future__ import annotations

from typing import TypeVar

from rich.console import Console

from aligner.config.schema import PromptDataConfig, TextDataConfig
from aligner.data.datasets import PreferenceDataset, PromptDataset, TextDataset
from aligner.data.plugin import load_function
from aligner.data.tokenizer import Tokenizer
from aligner.distributed.collectives import all_gather_objects, on_all_ranks
from aligner.distributed.context import RunContext

D = TypeVar("D", TextDataset, PreferenceDataset, PromptDataset)


def open_texts(path: str, tokenizer: Tokenizer, config: TextDataConfig, context: RunContext) -> TextDataset:
    """SFT samples of ``path``. Collective; DataError on all ranks when a row is unusable or nothing is left."""
    return _open(TextDataset, path, tokenizer, config.sequence_length, config, context)


def open_pairs(path: str, tokenizer: Tokenizer, config: TextDataConfig, context: RunContext) -> PreferenceDataset:
    """Preference pairs of ``path``. Collective; DataError as in :func:`open_texts`."""
    return _open(PreferenceDataset, path, tokenizer, config.sequence_length, config, context)


def open_prompts(path: str, tokenizer: Tokenizer, config: PromptDataConfig, context: RunContext) -> PromptDataset:
    """Prompts of ``path``. Collective; DataError as in :func:`open_texts`."""
    return _open(PromptDataset, path, tokenizer, config.max_prompt_length, config, context)


def _open(
    kind: type[D],
    path: str,
    tokenizer: Tokenizer,
    max_length: int,
    config: TextDataConfig | PromptDataConfig,
    context: RunContext,
) -> D:
    def construct() -> D:
        row_filter = load_function(config.filter, "data.filter", ["row"]) if config.filter else None
        return kind(path, tokenizer, max_length, too_long=config.too_long, filter=row_filter)

    dataset = on_all_ranks(construct)
    report = dataset.check(context.rank, context.world_size, all_gather_objects)
    if context.rank == 0:
        Console(highlight=False).print(report.summary(), markup=False, soft_wrap=True)
    return dataset

"""Token embedding, split over tensor-parallel ranks by vocabulary, with a sparse gradient.

Megatron's embedding makes a dense gradient of the whole table for every micro-batch. Here a trained table's rows are
added straight to ``main_grad``, Megatron's fp32 gradient buffer; nothing of the table's size is made.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from aligner.models.data_parallel import gradient_buffer


class _Rows(torch.autograd.Function):
    """Rows of ``weight`` at ``ids`` [T]; ``hidden`` bool [T] are zero rows (ids of other ranks)."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        ctx.weight, ctx.ids, ctx.hidden = weight, ids, hidden
        rows = weight.index_select(0, ids)
        return rows if hidden is None else rows.masked_fill_(hidden[:, None], 0.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        buffer = gradient_buffer(ctx.weight)
        grad = grad.to(buffer.dtype)
        if ctx.hidden is not None:
            grad = grad.masked_fill(ctx.hidden[:, None], 0.0)
        buffer.index_add_(0, ctx.ids, grad)
        return None, None, None


class Embedding(MegatronModule):
    """Ids [T] -> hidden [T, 1, h], or [T / tp, 1, h] under sequence parallelism. Names as in Megatron's embedding."""

    def __init__(self, config: TransformerConfig, vocab_size: int, pg: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.tp_group = pg.tp
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size, config.hidden_size, init_method=config.embedding_init_method, config=config, tp_group=pg.tp
        )
        self.dropout = torch.nn.Dropout(config.hidden_dropout)

    def forward(self, tokens_T: torch.Tensor) -> torch.Tensor:
        table = self.word_embeddings
        ids, hidden = tokens_T, None
        if self.tp_group.size() > 1:
            ids = tokens_T - table.vocab_start_index
            hidden = (ids < 0) | (ids >= table.num_embeddings_per_partition)
            ids = ids.masked_fill(hidden, 0)
        rows = _Rows.apply(table.weight, ids, hidden).unsqueeze(1)
        if self.config.sequence_parallel:
            rows = reduce_scatter_to_sequence_parallel_region(rows, group=self.tp_group)
            with get_cuda_rng_tracker().fork():
                return self.dropout(rows)
        return self.dropout(reduce_from_tensor_model_parallel_region(rows, group=self.tp_group))

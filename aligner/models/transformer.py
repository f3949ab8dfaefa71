"""One pipeline stage of a role's model: embedding, Megatron transformer block, and vocabulary layer or scalar head.

Parameter names are those of Megatron's ``GPTModel``; the scalar head adds ``head.weight`` and ``head.bias``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

from aligner.config.hf_config import Architecture, padded_vocab_size
from aligner.distributed import platform
from aligner.models.attention import SegmentPlan
from aligner.models.embedding import Embedding
from aligner.models.layer_spec import block_spec, has_transformer_engine
from aligner.models.logprobs import vocab_parallel_logprobs
from aligner.models.rope import RotaryTable

LM = "lm"
SCALAR = "scalar"


@dataclass(frozen=True)
class StageInput:
    """One micro-batch as a stage sees it; T is divisible by TP under sequence parallelism.

    ``wanted_N``: positions (int64, below T - 1) that predict their next token: a vocabulary layer runs on these only.
    """

    tokens_T: torch.Tensor
    position_ids_T: torch.Tensor
    plan: SegmentPlan
    wanted_N: torch.Tensor
    temperature: float = 1.0
    with_entropy: bool = False


@dataclass(frozen=True)
class StageOutput:
    """What the last stage computes, before it is aligned to tokens: by position, fp32.

    For a vocabulary layer ``logprobs_N`` (and ``entropy_N``) at the wanted positions; for a scalar head ``head_T``.
    """

    logprobs_N: torch.Tensor | None = None
    entropy_N: torch.Tensor | None = None
    head_T: torch.Tensor | None = None


class ScalarHead(torch.nn.Module):
    """hidden -> one fp32 number a position: ``hidden @ weight.T + bias``, with fp32 parameters [1, h] and [1].

    Replicated over tensor-parallel ranks: all of them see the whole sequence and compute equal gradients.
    """

    def __init__(self, hidden_size: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        # standard deviation 1 / sqrt(h + 1), as in Stiennon et al. 2020 (arXiv:2009.01325)
        weight = torch.randn(1, hidden_size, generator=generator) / (hidden_size + 1) ** 0.5
        device = platform.current().device
        self.weight = torch.nn.Parameter(weight.to(device))
        self.bias = torch.nn.Parameter(torch.zeros(1, device=device))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, h] -> [T], fp32."""
        return torch.nn.functional.linear(hidden.float(), self.weight, self.bias).squeeze(-1)


class RoleTransformer(LanguageModule):
    """One stage. ``head`` is ``lm`` or ``scalar``; a scalar model has no vocabulary layer at all."""

    def __init__(
        self, config: TransformerConfig, arch: Architecture, *, head: str, pg: ProcessGroupCollection, seed: int
    ) -> None:
        super().__init__(config=config, pg_collection=pg)
        self.arch = arch
        self.head_kind = head
        self.pre_process = pg.pp.rank() == 0
        self.post_process = pg.pp.rank() == pg.pp.size() - 1
        self.share_embeddings_and_output_weights = head == LM and arch.tie_word_embeddings
        self.model_type = ModelType.encoder_or_decoder
        self.transformer_engine = has_transformer_engine()
        width = padded_vocab_size(arch)
        if self.pre_process:
            self.embedding = Embedding(config, width, pg)
        spec = block_spec(arch, arch.num_layers // pg.pp.size(), transformer_engine=self.transformer_engine)
        self.decoder = TransformerBlock(
            config=config, spec=spec, pre_process=self.pre_process, post_process=self.post_process, pg_collection=pg
        )
        self.rotary = RotaryTable(arch, next(self.decoder.parameters()).device)
        if self.post_process and head == SCALAR:
            self.head = ScalarHead(arch.hidden_size, seed)
        elif self.post_process:
            self.output_layer = ColumnParallelLinear(
                config.hidden_size,
                width,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
                tp_group=pg.tp,
            )
        if head == LM and (self.pre_process or self.post_process):
            self.setup_embeddings_and_output_layer()
        elif self.pre_process:
            self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Called by Megatron's schedules with what the previous stage sent."""
        self.decoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def forward(self, batch: StageInput) -> torch.Tensor | StageOutput:
        """Hidden states [T, 1, h] for the next stage (T / tp rows under sequence parallelism), or the final output."""
        plan, longest = batch.plan, batch.plan.max_seqlen_q
        if self.transformer_engine:
            rotary: Any = self.rotary.angles(longest)
        else:
            rotary = self.rotary.at(batch.position_ids_T, longest, self.config.params_dtype)
        hidden = None
        if self.pre_process:
            hidden = self.embedding(batch.tokens_T)
        hidden = self.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=plan)
        if not self.post_process:
            return hidden
        return self._head_output(hidden, batch) if self.head_kind == SCALAR else self._logprobs(hidden, batch)

    def _head_output(self, hidden: torch.Tensor, batch: StageInput) -> StageOutput:
        if self.config.sequence_parallel:
            # every rank computes the same head on the gathered sequence: its gradient must not be summed over ranks
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return StageOutput(head_T=self.head(hidden.squeeze(1)))

    def _logprobs(self, hidden: torch.Tensor, batch: StageInput) -> StageOutput:
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        logprobs, entropy = vocab_parallel_logprobs(
            hidden.squeeze(1).index_select(0, batch.wanted_N),
            self.output_weight(),
            batch.tokens_T.index_select(0, batch.wanted_N + 1),
            vocab_size=self.arch.vocab_size,
            temperature=batch.temperature,
            with_entropy=batch.with_entropy,
            group=group,
        )
        return StageOutput(logprobs_N=logprobs, entropy_N=entropy)

    def output_weight(self) -> torch.Tensor:
        """This rank's rows of the output matrix, [padded vocabulary / tp, h]; last stage of an ``lm`` model only."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As Megatron's, without the output layer's empty extra state and without its vocabulary handling for heads."""
        if self.head_kind == LM:
            sharded = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        else:
            sharded = super(LanguageModule, self).sharded_state_dict(prefix, sharded_offsets, metadata)
        sharded.pop(f"{prefix}output_layer._extra_state", None)
        return sharded

    def tie_embeddings_and_output_weights_state_dict(
        self,
        sharded_state_dict: dict[str, Any],
        output_layer_weight_key: str,
        first_stage_word_emb_key: str,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """The last stage's copy of a tied embedding is a replica of the first stage's, by this layout's ranks.

        Megatron's own version takes the data-parallel rank of the global layout.
        """
        if not self.post_process or self.pre_process:
            return
        dp_cp: dist.ProcessGroup = (metadata or {}).get("dp_cp_group", self.pg_collection.dp_cp)
        sharded_state_dict[output_layer_weight_key] = make_tp_sharded_tensor_for_checkpoint(
            tensor=self.shared_embedding_or_output_weight(),
            key=first_stage_word_emb_key,
            replica_id=(1, 0, dp_cp.rank()),
            allow_shape_mismatch=True,
            tp_group=self.tp_group,
            dp_cp_group=dp_cp,
        )

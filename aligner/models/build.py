"""From an architecture and a layout to this rank's shard of a model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.transformer.transformer_config import TransformerConfig

from aligner.config.hf_config import Architecture, check_layout
from aligner.config.schema import OptimizerConfig
from aligner.distributed.topology import Topology
from aligner.models.data_parallel import RoleDataParallel
from aligner.models.optimizer import build_optimizer, build_scheduler
from aligner.models.role_model import RoleModel
from aligner.models.transformer import LM, SCALAR, RoleTransformer


def _finalize(chunks: list[Any], num_tokens: torch.Tensor | None = None, **options: Any) -> None:
    """Megatron's reductions without its division by the token count, which ``forward.py`` joins with clipping."""
    finalize_model_grads(chunks, None, **options)


def transformer_config(
    arch: Architecture, topology: Topology, dtype: torch.dtype, hidden_dropout: float, attention_dropout: float
) -> TransformerConfig:
    """Megatron's configuration of ``arch`` in this layout. Weights start at zero: they are always loaded."""
    zero = partial(torch.nn.init.constant_, val=0.0)
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_hidden_size,
        num_attention_heads=arch.num_attention_heads,
        num_query_groups=arch.num_key_value_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_epsilon,
        qk_layernorm=arch.qk_norm,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=arch.attention_bias,
        hidden_dropout=hidden_dropout,
        attention_dropout=attention_dropout,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        sequence_parallel=topology.degrees.sequence_parallel and topology.tp > 1,
        variable_seq_lengths=topology.pp > 1,
        moe_token_dispatcher_type="alltoall",  # there are no experts; the default forbids variable lengths
        calculate_per_token_loss=True,
        finalize_model_grads_func=_finalize,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        init_method=zero,
        output_layer_init_method=zero,
        embedding_init_method=zero,
    )


def build_model(
    name: str,
    arch: Architecture,
    topology: Topology,
    *,
    head: str,
    dtype: torch.dtype,
    hidden_dropout: float = 0.0,
    attention_dropout: float = 0.0,
    optimizer: OptimizerConfig | None = None,
    horizon: int | None = None,
    seed: int = 0,
) -> RoleModel:
    """This rank's shard of a model, to be filled by ``weights.convert.load_hf`` or a checkpoint. A collective.

    ``distributed.topology.seed_everything`` must have run. The transformer's weights are zero until loaded; a scalar
    head starts from ``seed``, equal on all ranks and layouts.

    Args:
        head: ``lm`` (vocabulary layer) or ``scalar`` (one fp32 number a position).
        dtype: of weights and activations, ``torch.float32`` or ``torch.bfloat16``; gradients and optimizer are fp32.
        optimizer: given for a role that is trained; it is frozen otherwise.
        horizon: optimizer steps that the learning-rate schedule spans when the section does not say.

    Raises:
        TopologyError: the degrees do not divide the model.
    """
    if head not in (LM, SCALAR):
        raise ValueError(f"head is {head!r}; it is 'lm' or 'scalar'")
    check_layout(arch, topology.degrees)
    config = transformer_config(arch, topology, dtype, hidden_dropout, attention_dropout)
    module = RoleTransformer(config, arch, head=head, pg=topology.pg, seed=seed)
    model = RoleModel(name, arch, topology, config, head, dtype, module, [module])
    if optimizer is None:
        module.requires_grad_(False)
        module.eval()
        return model
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=optimizer.use_distributed_optimizer
    )
    model.chunks = [RoleDataParallel(config, ddp_config, module, pg_collection=topology.pg)]
    model.optimizer = build_optimizer(optimizer, model.chunks, dtype, topology.pg)
    for part in model.optimizer.chained_optimizers:
        if part.optimizer is not None:  # as where this rank holds no parameters
            part.optimizer.register_step_pre_hook(lambda *_: model.will_change())
    model.scheduler = build_scheduler(optimizer, model.optimizer, horizon)
    model.horizon_from_run = not optimizer.decay_steps
    return model

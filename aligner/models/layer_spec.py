"""Which modules a transformer block is made of: Transformer Engine's where it is installed, our own elsewhere."""

from __future__ import annotations

import importlib.util

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from aligner.config.hf_config import Architecture
from aligner.distributed import platform
from aligner.models.attention import PackedSelfAttention, SdpaAttention
from aligner.models.norm import RMSNorm


def has_transformer_engine() -> bool:
    """Transformer Engine runs on CUDA only; being installed on a machine without a GPU does not count."""
    return platform.current().kind == "cuda" and importlib.util.find_spec("transformer_engine") is not None


def block_spec(arch: Architecture, num_layers: int, *, transformer_engine: bool) -> TransformerBlockSubmodules:
    """Modules of one pipeline stage with ``num_layers`` layers. Checkpoints of both kinds are interchangeable."""
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=arch.qk_norm)
        return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=TENorm)
    return TransformerBlockSubmodules(layer_specs=[_own_layer(arch)] * num_layers, layer_norm=RMSNorm)


def _own_layer(arch: Architecture) -> ModuleSpec:
    qk_norm = RMSNorm if arch.qk_norm else IdentityOp
    attention = ModuleSpec(
        module=PackedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=SdpaAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    mlp = ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            # checkpoints use the names of Transformer Engine's fused norm + linear
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )

"""The torch-free reader of Hugging Face configs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aligner.config.hf_config import Llama3Scaling, check_layout, padded_vocab_size, read_architecture
from aligner.errors import ModelError, TopologyError

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}


@dataclass(frozen=True)
class Degrees:
    tp: int = 1
    pp: int = 1


def write(directory: Path, **changes: Any) -> Path:
    config = {key: value for key, value in {**BASE, **changes}.items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_both_generations_of_rope_keys(tmp_path: Path) -> None:
    old = read_architecture(write(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3}))
    new = read_architecture(write(tmp_path, rope_parameters={"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}))
    oldest = read_architecture(write(tmp_path, rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3}))
    assert old == new == oldest
    assert (new.rope_theta, new.rope_scaling) == (5e5, Llama3Scaling(8.0, 1.0, 4.0, 128))
    assert read_architecture(write(tmp_path, rope_scaling=None)).rope_scaling is None


def test_defaults_and_families(tmp_path: Path) -> None:
    llama = read_architecture(
        write(tmp_path, num_key_value_heads="absent", eos_token_id=[2, 7], torch_dtype="bfloat16")
    )
    assert (llama.num_key_value_heads, llama.head_dim, llama.eos_token_ids) == (8, 8, (2, 7))
    assert (llama.dtype, llama.tie_word_embeddings, llama.rope_theta) == ("bfloat16", False, 10000.0)
    qwen2 = read_architecture(write(tmp_path, model_type="qwen2", sliding_window=32))
    assert qwen2.attention_bias and not qwen2.qk_norm and qwen2.sliding_window is None
    qwen3 = read_architecture(write(tmp_path, model_type="qwen3", head_dim=32))
    assert qwen3.qk_norm and not qwen3.attention_bias and qwen3.head_dim == 32
    assert read_architecture(write(tmp_path, model_type="mistral", sliding_window=256)).sliding_window == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "model_type is 'gemma2'; supported families: llama"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "RoPE scaling 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"model_type": "mistral", "sliding_window": 128}, "sliding_window 128 is shorter than max_position_embed"),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, "sliding_window 4096 is shorter"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64},
            "lower max_position_embeddings to 64",
        ),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"num_attention_heads": 6}, "num_attention_heads 6|multiple"),
        ({"hidden_size": "absent"}, "hidden_size is None; a positive integer"),
        ({"vocab_size": "300"}, "vocab_size is '300'"),
        ({"head_dim": 7}, "head_dim is 7"),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_architecture(write(tmp_path, **changes))


def test_missing_or_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not found"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_architecture(tmp_path)


def test_layout_messages_list_what_works(tmp_path: Path) -> None:
    arch = read_architecture(write(tmp_path))
    assert padded_vocab_size(arch) == 384
    check_layout(arch, Degrees(tp=4, pp=3))
    with pytest.raises(TopologyError, match=r"attention heads \(8\).*values that work for this model: 1, 2, 4 "):
        check_layout(arch, Degrees(tp=3))
    with pytest.raises(TopologyError, match=r"key/value heads \(4\)"):
        check_layout(arch, Degrees(tp=8))
    with pytest.raises(TopologyError, match=r"6 layers; values that work for this model: 1, 2, 3, 6"):
        check_layout(arch, Degrees(pp=4))


def test_imports_without_torch() -> None:
    code = "import sys; import aligner.config.hf_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

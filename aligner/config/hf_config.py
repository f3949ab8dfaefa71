"""The one reader of Hugging Face ``config.json`` files; imports without torch.

Configuration checks, planning and model construction share :func:`read_architecture`. What Aligner cannot represent
is refused here, by name, before any weight is read: other RoPE scalings than llama3, sliding windows shorter than the
context, biases outside the QKV projection, unknown families, quantised weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from aligner.errors import ModelError, TopologyError

VOCABULARY_MULTIPLE = 128

_FAMILIES: dict[str, dict[str, Any]] = {
    # defaults of transformers for keys that a config.json may leave out
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}


class Layout(Protocol):
    """Anything with tensor- and pipeline-parallel degrees (``distributed.topology.Degrees`` has them)."""

    @property
    def tp(self) -> int: ...

    @property
    def pp(self) -> int: ...


@dataclass(frozen=True)
class Llama3Scaling:
    """RoPE frequency scaling of Llama 3.1 and later (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with RMSNorm, SwiGLU, grouped-query attention and RoPE.

    ``attention_bias`` is a bias on the QKV projection only (Qwen2); ``qk_norm`` an RMSNorm on each query and key head
    (Qwen3); ``sliding_window`` is informative: it never is shorter than ``max_position_embeddings``.
    ``vocab_size`` counts real ids, see :func:`padded_vocab_size` for the width of the weights.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    norm_epsilon: float
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    sliding_window: int | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    dtype: str  # of the weights on disk: float32 | bfloat16 | float16


def read_architecture(directory: str | Path) -> Architecture:
    """Read ``directory/config.json``. Raises :class:`ModelError` naming the file, the key and what would work."""
    path = Path(directory) / "config.json"
    raw = _read_json(path)
    family = raw.get("model_type")
    if family not in _FAMILIES:
        raise ModelError(f"{path}: model_type is {family!r}; supported families: {', '.join(_FAMILIES)}")
    config = {**_FAMILIES[family], **raw}
    _refuse_unrepresentable(path, config)
    heads = _integer(path, config, "num_attention_heads")
    hidden = _integer(path, config, "hidden_size")
    kv_heads = heads if config.get("num_key_value_heads") is None else _integer(path, config, "num_key_value_heads")
    if config.get("head_dim") is None and hidden % heads:
        raise ModelError(f"{path}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; set head_dim")
    head_dim = hidden // heads if config.get("head_dim") is None else _integer(path, config, "head_dim")
    if heads % kv_heads:
        raise ModelError(f"{path}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise ModelError(f"{path}: head_dim is {head_dim}; RoPE needs an even number")
    theta, scaling = _read_rope(path, config)
    eos = config.get("eos_token_id")
    return Architecture(
        family=family,
        num_layers=_integer(path, config, "num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=_integer(path, config, "intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_integer(path, config, "vocab_size"),
        max_position_embeddings=_integer(path, config, "max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        sliding_window=_effective_window(config),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        pad_token_id=config.get("pad_token_id"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def padded_vocab_size(arch: Architecture) -> int:
    """Rows of the embedding and the output layer: ``vocab_size`` rounded up to a multiple of 128.

    Independent of the tensor-parallel degree, so that checkpoints move between layouts; the added ids are masked in
    the sampler and in the trainer alike.
    """
    return -(-arch.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def check_layout(arch: Architecture, degrees: Layout) -> None:
    """Raise :class:`TopologyError` when ``degrees.tp`` or ``degrees.pp`` do not divide the model evenly."""
    widths = {
        "attention heads": arch.num_attention_heads,
        "key/value heads": arch.num_key_value_heads,
        "FFN width": arch.ffn_hidden_size,
        "padded vocabulary": padded_vocab_size(arch),
    }
    bad = [f"{name} ({width})" for name, width in widths.items() if width % degrees.tp]
    if bad:
        works = [n for n in range(1, arch.num_key_value_heads + 1) if not any(w % n for w in widths.values())]
        raise TopologyError(
            f"tensor_model_parallel_size is {degrees.tp}, which does not divide the model's {', '.join(bad)}; "
            f"values that work for this model: {_listed(works)} "
            "(pipeline or data parallelism can use the other ranks)"
        )
    if arch.num_layers % degrees.pp:
        works = [n for n in range(1, arch.num_layers + 1) if arch.num_layers % n == 0]
        raise TopologyError(
            f"pipeline_model_parallel_size is {degrees.pp}, which does not divide the model's {arch.num_layers} "
            f"layers; values that work for this model: {_listed(works)}"
        )


def _listed(values: list[int]) -> str:
    return ", ".join(str(value) for value in values)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelError(f"{path}: not found; a Hugging Face model directory with a config.json is needed")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: holds a {type(raw).__name__}; a JSON object is needed")
    return raw


def _integer(path: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{path}: {key} is {value!r}; a positive integer is needed")
    return value


def _effective_window(config: dict[str, Any]) -> int | None:
    """The window that attention really uses: Qwen ignores the key unless ``use_sliding_window`` is set."""
    window = config.get("sliding_window")
    if config["model_type"].startswith("qwen") and not config.get("use_sliding_window", False):
        return None
    return window if config["model_type"] != "llama" else None


def _refuse_unrepresentable(path: Path, config: dict[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: hidden_act is {config['hidden_act']!r}; only 'silu' (SwiGLU) is supported")
    if config["model_type"] != "qwen2" and config.get("attention_bias", False):
        raise ModelError(f"{path}: attention_bias is true, which puts a bias on o_proj; that is not supported")
    if config.get("mlp_bias", False):
        raise ModelError(f"{path}: mlp_bias is true; biases in the MLP are not supported")
    if config.get("quantization_config"):
        raise ModelError(f"{path}: quantization_config is set; convert the model to float weights first")
    window, context = _effective_window(config), config.get("max_position_embeddings")
    if window is not None and isinstance(context, int) and window < context:
        raise ModelError(
            f"{path}: sliding_window {window} is shorter than max_position_embeddings {context}, and windowed "
            f"attention is not supported; lower max_position_embeddings to {window} if no sequence will be longer"
        )


def _read_rope(path: Path, config: dict[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """RoPE base and scaling from ``rope_parameters`` (transformers 5) or ``rope_theta`` + ``rope_scaling``."""
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        raise ModelError(f"{path}: rope_parameters differ by layer type; one RoPE for all layers is supported")
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelError(f"{path}: partial_rotary_factor is {partial}; only 1.0 is supported")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(f"{path}: RoPE scaling {kind!r} is not supported; supported: default, llama3")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [key for key in keys if rope.get(key) is None]
    if missing:
        raise ModelError(f"{path}: RoPE scaling 'llama3' lacks {', '.join(missing)}")
    return theta, Llama3Scaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )

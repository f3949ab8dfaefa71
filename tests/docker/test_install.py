"""The images' install steps, as their Dockerfiles have them, run in fresh environments on a copy of the repository.

The CPU image's steps run as they are, without the system packages. For the GPU image a virtual environment stands in
for NVIDIA's container: distributions in its versions, and this machine's torch under the container's version number.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import aligner
from tests.docker import dockerfile

pytestmark = pytest.mark.slow

NVIDIA_TORCH = "2.10.0a0+b558c986e8.nv25.11"
# Of nvcr.io/nvidia/pytorch:25.11-py3. The first ones are not on any index: they are only named as installed.
NVIDIA_ONLY = {
    "apex": "0.1",
    "flash_attn": "2.7.4.post1+25.11",
    "pytorch_triton": "3.5.0+gitde3506d2",
    "torchvision": "0.25.0a0+7a13ad0f",
    "transformer_engine": "2.9.0+70f53666",
}
FROM_PYPI = (
    "setuptools==80.9.0 numpy==2.1.0 packaging==25.0 PyYAML==6.0.3 psutil==7.1.3 requests==2.32.5 rich==14.2.0 "
    "click==8.3.0 tqdm==4.67.1 filelock==3.20.0 fsspec==2025.10.0 sympy==1.14.0 mpmath==1.3.0 networkx==3.5 "
    "Jinja2==3.1.6 MarkupSafe==3.0.3 typing_extensions==4.15.0 regex==2025.11.3 tokenizers==0.22.1 "
    "safetensors==0.6.2 huggingface_hub==1.1.2 hf-xet==1.2.0 anyio==4.11.0 sniffio==1.3.1 idna==3.11 h11==0.16.0 "
    "certifi==2025.10.5 urllib3==2.5.0 charset-normalizer==3.4.4 Pygments==2.19.2 markdown-it-py==4.0.0 mdurl==0.1.2 "
    "shellingham==1.5.4 python-dateutil==2.9.0.post0"
)


def _virtual_environment(path: Path) -> dict[str, str]:
    """A new one with pip; returns the environment of programs that use it."""
    subprocess.run([sys.executable, "-m", "venv", str(path)], check=True, capture_output=True, timeout=120)
    return dockerfile.clean_environment(path)


def _output(environment: dict[str, str], directory: Path, *command: str) -> str:
    result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{command}: {result.stderr}"
    return result.stdout.strip()


def _versions(environment: dict[str, str], directory: Path) -> dict[str, str]:
    found = json.loads(_output(environment, directory, "python3", "-m", "pip", "list", "--format", "json"))
    return {re.sub(r"[-_.]+", "-", entry["name"]).lower(): entry["version"] for entry in found}


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("context")
    dockerfile.copy_repository(path)
    return path


def test_cpu_image(context: Path, tmp_path: Path) -> None:
    environment = _virtual_environment(tmp_path / "python")
    path = dockerfile.ROOT / "docker/Dockerfile.cpu"
    commands = dockerfile.build(path, context, tmp_path / "image", environment)
    assert [command.split()[-1] for command in commands] == ["cpu-dependencies", "cpu-package", "--help"]
    assert _output(environment, tmp_path, "aligner", "--version") == f"aligner {aligner.__version__}"
    program = (
        "import aligner.cli.main, launchers.local, megatron.core, torch;"
        "print(aligner.cli.main.__file__, torch.__version__, torch.version.cuda)"
    )
    where, version, cuda = _output(environment, tmp_path, "python3", "-c", program).split()
    assert Path(where).is_relative_to(tmp_path / "python"), "the installed package, not the repository's"
    pins = _pins(context)
    assert (version, cuda) == (f"{pins['torch']}+cpu", "None")
    found = _versions(environment, tmp_path)
    assert found["megatron-core"] == pins["megatron-core"] and found["transformers"] == pins["transformers"]
    assert "pytest" not in found


def test_gpu_image_keeps_what_the_container_brings(context: Path, tmp_path: Path) -> None:
    environment = _virtual_environment(tmp_path / "python")
    _stand_in_for_the_container(tmp_path / "python", environment)
    before = _versions(environment, tmp_path)
    path = dockerfile.ROOT / "docker/Dockerfile.gpu"
    constraint = tmp_path / "constraint.txt"  # NVIDIA's file, which must not get in the way
    constraint.write_text("tokenizers==0.22.1\n", encoding="utf-8")
    variables = {**environment, "PIP_CONSTRAINT": str(constraint)}
    commands = dockerfile.build(path, context, tmp_path / "image", variables)
    assert [command.split()[-1] for command in commands] == ["gpu-dependencies", "gpu-package", "--help"]
    assert _output(environment, tmp_path, "aligner", "--version") == f"aligner {aligner.__version__}"
    after = _versions(environment, tmp_path)
    moved = {name: after.get(name) for name, version in before.items() if after.get(name) != version}
    pins = _pins(context)
    assert moved == {name: pins[name] for name in moved}
    assert {"huggingface-hub", "safetensors", "tokenizers"} <= set(moved), "transformers needs newer ones"
    assert set(moved).isdisjoint({"torch", "numpy", "apex", "flash-attn", "transformer-engine", "torchvision"})
    assert set(moved).isdisjoint({"setuptools", "packaging", "fsspec", "rich"}), "not asked for in a newer version"
    assert {name: after[name] for name in ("megatron-core", "transformers", "hydra-core", "tensorboard")} == {
        name: pins[name] for name in ("megatron-core", "transformers", "hydra-core", "tensorboard")
    }


def _pins(context: Path) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==(\S+)", (context / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def _stand_in_for_the_container(python: Path, environment: dict[str, str]) -> None:
    command = ("python3", "-m", "pip", "install", "--quiet", "--no-deps", *FROM_PYPI.split())
    _output(environment, python, *command)
    (packages,) = python.glob("lib/python3*/site-packages")
    ours = Path(torch.__file__).parents[1]
    for name in ("torch", "torchgen", "functorch"):
        (packages / name).symlink_to(ours / name)
    for name, version in {**NVIDIA_ONLY, "torch": NVIDIA_TORCH}.items():
        info = packages / f"{name}-{version}.dist-info"
        info.mkdir()
        requires = "Requires-Dist: setuptools\nRequires-Dist: sympy>=1.13.3\n" if name == "torch" else ""
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        (info / "INSTALLER").write_text("pip\n", encoding="utf-8")
        (info / "RECORD").write_text(f"{info.name}/METADATA,,\n{info.name}/RECORD,,\n", encoding="utf-8")

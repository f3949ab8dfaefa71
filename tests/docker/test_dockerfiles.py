"""The Dockerfiles name exact images, repeat no pin wrongly, and are given the files that they copy."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import aligner
from tests.docker import dockerfile

ROOT = dockerfile.ROOT
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
each = pytest.mark.parametrize("path", dockerfile.FILES, ids=lambda path: path.name)


def test_there_are_two() -> None:
    assert [path.name for path in dockerfile.FILES] == ["Dockerfile.cpu", "Dockerfile.gpu"]


@each
def test_base_image_is_exact(path: Path) -> None:
    (image,) = dockerfile.values(path, "FROM")
    _, _, tag = image.rpartition(":")
    assert re.match(r"\d+\.\d+\.\d+-|\d\d\.\d\d-py3$", tag), f"{image}: a tag that always means the same image"
    assert dockerfile.labels(path)["org.opencontainers.image.base.name"].endswith(image)


def test_python_of_the_cpu_image() -> None:
    (image,) = dockerfile.values(ROOT / "docker/Dockerfile.cpu", "FROM")
    found = re.search(r"python:(\d+\.\d+)", image)
    assert found is not None and found[1] in SpecifierSet(PROJECT["requires-python"])


@each
def test_labels(path: Path) -> None:
    found = dockerfile.labels(path)
    assert found["org.opencontainers.image.version"] == aligner.__version__
    assert found["org.opencontainers.image.licenses"] == PROJECT["license"]
    assert found["org.opencontainers.image.revision"] == "${REVISION}"


def test_versions_named_in_docker_are_the_pins() -> None:
    requirements = {entry.name: entry for entry in map(Requirement, PROJECT["dependencies"])}
    pinned = {name.lower(): version for name, version in PINS.items()}
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, pinned))})(?:==|[ =])(\d+(?:\.\d+)+)", re.IGNORECASE)
    named = []
    for path in sorted((ROOT / "docker").iterdir()):
        for name, version in pattern.findall(path.read_text(encoding="utf-8") if path.is_file() else ""):
            assert version == pinned[name.lower()], f"{path.name}: {name} {version}, constraints.txt has another"
            named.append(name)
    assert "megatron-core" in named
    assert PINS["megatron-core"] in requirements["megatron-core"].specifier


@each
def test_files_are_in_the_build_context(path: Path) -> None:
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_in = {rule[1:] for rule in rules if rule.startswith("!")}
    assert "*" in rules
    files = dockerfile.tracked_files()
    for value in dockerfile.values(path, "COPY"):
        for source in value.split()[:-1]:
            assert source.split("/")[0] in let_in, f".dockerignore leaves {source} out"
            assert any(name == source or name.startswith(f"{source}/") for name in files), f"{source} is not there"


@each
def test_commands_are_in_exec_form(path: Path) -> None:
    """A shell in between would keep SIGTERM to itself."""
    for value in (*dockerfile.values(path, "CMD"), *dockerfile.values(path, "ENTRYPOINT")):
        assert json.loads(value)
    assert not dockerfile.values(path, "USER"), "enroot and apptainer run as the caller"


def test_the_install_steps_are_those_of_the_script() -> None:
    script = (ROOT / "docker/install.sh").read_text(encoding="utf-8")
    steps = set(re.findall(r"^([a-z-]+)\)$", script, re.MULTILINE))
    runs = " ".join(value for path in dockerfile.FILES for value in dockerfile.values(path, "RUN"))
    assert steps == set(re.findall(r"install\.sh ([a-z-]+)", runs))
    assert "pip " not in runs, "install.sh installs, so that its test covers it"

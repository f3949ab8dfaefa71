"""The wheel carries the configuration files, the launchers and the built-in data, and works from another directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("aligner", "conf", "launchers", "slurm", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel, as ``pip install --target`` would leave it."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"  # a copy: building leaves files in the tree
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    result = subprocess.run(
        [*command, "--wheel-dir", str(work), str(source)], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    (wheel,) = work.glob("megatron_aligner-*.whl")
    target = work / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def test_files_travel(installed: Path) -> None:
    places = {"conf": "aligner/conf", "slurm": "aligner/slurm", "launchers": "launchers"}
    for folder, place in (*places.items(), ("aligner/data/builtin",) * 2):
        wanted = {
            path.relative_to(ROOT / folder)
            for path in (ROOT / folder).rglob("*.*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        found = {path.relative_to(installed / place) for path in (installed / place).rglob("*.*") if path.is_file()}
        assert wanted and wanted <= found, f"{folder}: {sorted(map(str, wanted - found))} not in the wheel"


def test_composes_from_another_directory(installed: Path, tmp_path: Path) -> None:
    program = (
        "import sys, launchers.slurm_script as jobs, aligner.config.compose as compose, aligner.cli.main as cli;"
        "print(compose.conf_directory(), jobs.templates());"
        "sys.exit(cli.main(['ppo', '--cfg', 'job', 'model=llama3_8b']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    where, _, config = result.stdout.partition("\n")
    assert where == f"{installed / 'aligner' / 'conf'} {installed / 'aligner' / 'slurm'}"
    assert "path: meta-llama/Llama-3.1-8B-Instruct" in config

"""Dockerfiles as data, and their install steps run outside a container, below a folder that stands for the root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))


@dataclass(frozen=True)
class Instruction:
    keyword: str  # FROM, RUN, COPY, …
    value: str  # one line; options (--mount=…) are not in it


def read(path: Path) -> list[Instruction]:
    """The instructions of a Dockerfile, comments left out and continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    found = [line.strip().partition(" ") for line in lines if line.strip()]
    return [Instruction(keyword, re.sub(r"^(--\S+\s+)+", "", value.strip())) for keyword, _, value in found]


def values(path: Path, keyword: str) -> list[str]:
    return [step.value for step in read(path) if step.keyword == keyword]


def labels(path: Path) -> dict[str, str]:
    return dict(re.findall(r'(\S+)="([^"]*)"', " ".join(values(path, "LABEL"))))


def build(path: Path, context: Path, image_root: Path, environment: Mapping[str, str]) -> list[str]:
    """Do what WORKDIR, ENV, COPY and RUN say, below ``image_root``; system packages are left out.

    Args:
        context: where COPY copies from.
        environment: PATH decides which python3 the steps install into.

    Returns: the commands that were run.
    """
    here, variables, commands = image_root, dict(environment), []
    for step in read(path):
        if step.keyword == "WORKDIR":
            here = image_root / step.value.lstrip("/")
            here.mkdir(parents=True, exist_ok=True)
        elif step.keyword == "ENV":
            variables.update(re.findall(r"(\w+)=(\S+)", step.value))
        elif step.keyword == "COPY":
            _copy(step.value, context, here)
        elif step.keyword == "RUN" and not step.value.startswith("apt-get "):
            result = subprocess.run(
                step.value, shell=True, cwd=here, env=variables, capture_output=True, text=True, timeout=540
            )
            output = f"{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
            assert result.returncode == 0, f"RUN {step.value}: exit code {result.returncode}\n{output}"
            commands.append(step.value)
    return commands


def _copy(value: str, context: Path, here: Path) -> None:
    *sources, target = value.split()
    for source in sources:
        origin, place = context / source, here / target
        if origin.is_dir():
            shutil.copytree(origin, place, dirs_exist_ok=True)
        else:
            place = place / origin.name if target.endswith("/") else place
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(origin, place)


def tracked_files() -> list[str]:
    """Files of the repository: what git tracks, and what it would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    return [name for name in listed.splitlines() if (ROOT / name).is_file()]


def copy_repository(target: Path) -> None:
    for name in tracked_files():
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place)


def clean_environment(python_home: Path) -> dict[str, str]:
    """This process's environment without what leads to its own packages, and ``python_home``'s programs first."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "ALIGNER_"))
    }
    return {**kept, "PATH": f"{python_home / 'bin'}:/usr/local/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}

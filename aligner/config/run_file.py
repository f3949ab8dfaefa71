"""``RUN/config.yaml``: the configuration of the run's newest accepted life, with the command's name on top."""

from __future__ import annotations

from pathlib import Path

from aligner.config.compose import to_yaml
from aligner.config.schema import ROOTS
from aligner.config.section import Section
from aligner.errors import ConfigError

CONFIG_FILE = "config.yaml"


def command_of(root: Section) -> str:
    """The command that ``root`` is the configuration of."""
    return next(name for name, schema in ROOTS.items() if type(root) is schema)


def check_run_owner(run_dir: Path, command: str) -> bool:
    """Whether ``run_dir`` holds a run already. Raises ConfigError when it is one of another command."""
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        return False
    with path.open(encoding="utf-8") as file:
        first = file.readline().strip()
    if first != f"command: {command}":
        owner = first.removeprefix("command: ") or "another program"
        raise ConfigError(f"run.dir={run_dir} holds a run of `{owner}`, not of `{command}`; choose another directory")
    return True


def write_run_config(run_dir: Path, root: Section) -> None:
    """Write ``run_dir/config.yaml`` under a temporary name, then rename it. Raises OSError."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / CONFIG_FILE
    partial = path.with_suffix(".yaml.tmp")
    partial.write_text(to_yaml(command_of(root), root), encoding="utf-8")
    partial.replace(path)

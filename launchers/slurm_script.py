"""The script of a Slurm job, from ``slurm/job.sbatch``. Nothing of a configuration reaches the shell unquoted.

A value stands either on an ``#SBATCH`` line, after ``aligner/config/cluster.py`` has checked its characters, or in the
script as a word quoted by :func:`shlex.quote`.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import aligner
from aligner.config.cluster import PORT_RANGE, ClusterConfig, ranks_per_node
from aligner.errors import ConfigError

SUPPORT_FILES = ("env.sh", "task.sh")
FOLDER = "slurm"  # in the run directory: script, log, events
LOG_FILE = "job.log"

_RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ALIGNER_LAUNCHER_PID",
)
_HOST_PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")  # wrong in a container


@dataclass(frozen=True)
class Job:
    """What is submitted: ``arguments`` of ``aligner``, ``run.dir`` not among them; both directories are absolute."""

    cluster: ClusterConfig
    arguments: tuple[str, ...]
    run_dir: Path
    work_dir: Path

    @property
    def folder(self) -> Path:
        return self.run_dir / FOLDER

    @property
    def log(self) -> Path:
        return self.folder / LOG_FILE

    @property
    def ranks(self) -> int:
        return self.cluster.nodes * ranks_per_node(self.cluster)

    @property
    def name(self) -> str:
        return re.sub(r"[^A-Za-z0-9_.-]", "_", f"aligner-{self.arguments[0]}-{self.run_dir.name}")


def templates() -> Path:
    """The folder of script templates: inside the package when installed from a wheel, beside it in a clone."""
    package = Path(aligner.__file__).resolve().parent
    for candidate in (package / "slurm", package.parent / "slurm"):
        if (candidate / "job.sbatch").is_file():
            return candidate
    raise ConfigError(f"no slurm/ folder in {package} or beside it; the installation is incomplete, install it again")


def render(job: Job) -> str:
    """The sbatch script of ``job``. Raises ConfigError for paths that Slurm cannot take."""
    cluster = job.cluster
    container = cluster.container.runtime != "none"
    values = {
        "SBATCH": "\n".join(f"#SBATCH {option}" for option in sbatch_options(job)),
        "RUN": shlex.quote(str(job.run_dir)),
        "JOB_FOLDER": shlex.quote(str(job.folder)),
        "REQUEUE": cluster.requeue,
        "MAX_RESTARTS": str(cluster.max_restarts),
        "RESTART_WINDOW": str(cluster.restart_window),
        "PORT_BASE": str(cluster.port_base),
        "PORT_RANGE": str(PORT_RANGE),
        "UNSET": " ".join((*_RANK_VARIABLES, *(_HOST_PYTHON_VARIABLES if container else ()))),
        "ENVIRONMENT": "\n    ".join(f"export {key}={shlex.quote(value)}" for key, value in cluster.env.items()) or ":",
        "RANKS": str(job.ranks),
        "SRUN": shlex.join(_srun_options(job)),
        "COMMAND": shlex.join([*_apptainer(job), *_executable(cluster), *job.arguments]),
    }
    template = (templates() / "job.sbatch").read_text(encoding="utf-8")
    return re.sub("@([A-Z_]+)@", lambda found: values[found[1]], template)


def sbatch_options(job: Job) -> list[str]:
    """What follows ``#SBATCH``, a line each."""
    cluster = job.cluster
    options = {
        "job-name": job.name,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "nodes": cluster.nodes,
        "ntasks-per-node": ranks_per_node(cluster),
        "gpus-per-node": cluster.gpus_per_node or None,
        "cpus-per-task": cluster.cpus_per_task,
        "mem": cluster.memory,
        "time": cluster.time,
        "signal": f"USR1@{cluster.signal_lead}",
        "chdir": _path("the working directory", job.work_dir),
        "output": _path("run.dir", job.log),
        "open-mode": "append",
    }
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return [*given, "--requeue" if cluster.requeue == "requeue" else "--no-requeue", *cluster.sbatch]


def _path(key: str, path: Path) -> str:
    """``path`` within quotes, where Slurm reads it as it stands."""
    bad = next((character for character in str(path) if character in '%\\"' or not character.isprintable()), None)
    if bad is not None:
        raise ConfigError(
            f"{key}: Slurm would not read {bad!r} in {str(path)!r} as it stands; choose another directory"
        )
    return f'"{path}"'


def _srun_options(job: Job) -> list[str]:
    cluster = job.cluster
    options = [f"--cpus-per-task={cluster.cpus_per_task}"] if cluster.cpus_per_task else []
    if cluster.container.runtime == "pyxis":
        options += [
            f"--container-image={cluster.container.image}",
            f"--container-mounts={','.join(mounts(job))}",
            f"--container-workdir={job.work_dir}",
        ]
    return options


def _apptainer(job: Job) -> list[str]:
    container = job.cluster.container
    if container.runtime != "apptainer":
        return []
    words = ["apptainer", "exec", *(["--nv"] if job.cluster.gpus_per_node else [])]
    for mount in mounts(job):
        words += ["--bind", mount]
    return [*words, "--pwd", str(job.work_dir), str(container.image)]


def mounts(job: Job) -> list[str]:
    """Working directory and run directory at their own places, then those of the configuration."""
    own = [job.work_dir] if job.run_dir.is_relative_to(job.work_dir) else [job.work_dir, job.run_dir]
    for path in own:
        if set(str(path)) & set(",:"):
            raise ConfigError(f"{path} cannot be mounted with a comma or colon in its name; choose another directory")
    return [*(f"{path}:{path}" for path in own), *job.cluster.container.mounts]


def _executable(cluster: ClusterConfig) -> list[str]:
    if cluster.command:
        return list(cluster.command)
    return ["aligner"] if cluster.container.runtime != "none" else [sys.executable, "-m", "aligner"]

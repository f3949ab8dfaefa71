"""The ``cluster`` section of ``aligner submit``: what a job asks Slurm for, and when it is started again.

``conf/cluster/*.yaml``: one file a cluster; any key can be overridden (``cluster.nodes=4``). Imports without torch.
Values end up on ``#SBATCH`` lines and in a shell script, so what they may hold is checked here, character by character.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from aligner.config.section import Section
from aligner.errors import ConfigError

PORT_RANGE = 10000  # MASTER_PORT is cluster.port_base + a number below this, from the job id

#: sbatch options that a key of this section, or the script itself, decides.
OWNED_OPTIONS = {
    "partition": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "nodes": "cluster.nodes",
    "ntasks-per-node": "cluster.tasks_per_node",
    "gpus-per-node": "cluster.gpus_per_node",
    "cpus-per-task": "cluster.cpus_per_task",
    "mem": "cluster.memory",
    "time": "cluster.time",
    "signal": "cluster.signal_lead",
    "requeue": "cluster.requeue",
    "no-requeue": "cluster.requeue",
    "output": "run.dir",
    "error": "run.dir",
    "ntasks": "cluster.nodes and cluster.tasks_per_node",
    "open-mode": None,
    "job-name": None,
    "chdir": None,
    "array": None,
    "wrap": None,
    "test-only": None,
    "parsable": None,
    "wait": None,
}
_SHORT_OPTIONS = {
    "p": "partition",
    "A": "account",
    "q": "qos",
    "N": "nodes",
    "n": "ntasks",
    "c": "cpus-per-task",
    "t": "time",
    "o": "output",
    "e": "error",
    "J": "job-name",
    "D": "chdir",
    "a": "array",
    "W": "wait",
}
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass
class ContainerConfig(Section):
    """The container that ranks run in. The working directory and the run directory are mounted by themselves."""

    runtime: str = "none"  # none | pyxis | apptainer
    image: str | None = None  # pyxis: .sqsh file or registry#name:tag; apptainer: .sif file or docker://name:tag
    mounts: list[str] = field(default_factory=list)  # SOURCE:TARGET, both absolute, or SOURCE:TARGET:ro


@dataclass
class ClusterConfig(Section):
    """What a job asks for. Empty values are left to the cluster."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    nodes: int = 1
    tasks_per_node: int | None = None  # ranks on a node; empty: one a GPU, or 1 without GPUs
    gpus_per_node: int = 0
    cpus_per_task: int | None = None  # CPU cores a rank
    memory: str | None = None  # a node, as 64G; 0: all of it
    time: str | None = None  # limit, [D-]HH:MM:SS; in YAML within quotes
    signal_lead: int = 600  # seconds before the limit at which the ranks are asked to save
    requeue: str = "requeue"  # requeue | chain (a new job takes over, where requeueing is forbidden) | none
    max_restarts: int = 3  # how often the run is started again after crashes; stops on request do not count
    restart_window: int = 86400  # seconds in which max_restarts is counted
    port_base: int = 20000  # ranks meet at a port from here to 9999 above, chosen by the job id
    command: list[str] = field(default_factory=list)  # starts Aligner; empty: this Python, in a container `aligner`
    env: dict[str, str] = field(default_factory=dict)  # environment variables of the ranks
    sbatch: list[str] = field(default_factory=list)  # further sbatch options, each as --name=value
    container: ContainerConfig = field(default_factory=ContainerConfig)


@dataclass
class SubmitRoot(Section):
    """``aligner submit``: besides the overrides of the command that is submitted."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)


def ranks_per_node(cluster: ClusterConfig) -> int:
    """Tasks that srun starts on each node."""
    return cluster.tasks_per_node or max(1, cluster.gpus_per_node)


def time_limit_s(cluster: ClusterConfig) -> int | None:
    """``cluster.time`` in seconds."""
    if cluster.time is None:
        return None
    days, _, clock = cluster.time.rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(those of the ``cluster`` section, the others), both in their order."""
    mine = [word for word in words if re.match(r"[+~]*cluster([.@=]|$)", word)]
    return mine, [word for word in words if word not in mine]


def check_cluster(cluster: ClusterConfig) -> None:
    """Raise ConfigError for a value that Slurm, or the job's script, cannot take."""
    _check_words(cluster)
    _check_numbers(cluster)
    _check_time(cluster)
    _check_container(cluster.container)
    for name, value in cluster.env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"cluster.env: '{name}' is no name of an environment variable")
        if name in _RANK_VARIABLES:
            raise ConfigError(f"cluster.env.{name}: ranks take their place from Slurm; leave it out")
        _refuse_control(f"cluster.env.{name}", value)
    for word in cluster.command:
        _refuse_control("cluster.command", word)
    for line in cluster.sbatch:
        _check_option(line)


def _check_words(cluster: ClusterConfig) -> None:
    for key in ("partition", "account", "qos"):
        value = getattr(cluster, key)
        if value is not None and not re.fullmatch(r"[A-Za-z0-9_.,:@+-]+", value):
            raise ConfigError(f"cluster.{key}={value!r}: only letters, digits and _ . , : @ + - can stand in it")
    if cluster.memory is not None and not re.fullmatch(r"\d+[KMGT]?", cluster.memory):
        raise ConfigError(f"cluster.memory={cluster.memory!r}: not of the form 64G (K, M, G or T; 0: the whole node)")
    if cluster.requeue not in ("requeue", "chain", "none"):
        raise ConfigError(f"cluster.requeue={cluster.requeue!r}: choose requeue, chain or none")


def _check_numbers(cluster: ClusterConfig) -> None:
    lowest = {"nodes": 1, "tasks_per_node": 1, "cpus_per_task": 1, "gpus_per_node": 0, "max_restarts": 0}
    for key, least in {**lowest, "restart_window": 1, "signal_lead": 1}.items():
        value = getattr(cluster, key)
        if value is not None and value < least:
            raise ConfigError(f"cluster.{key}={value}: give {least} or more")
    if cluster.signal_lead > 65535:
        raise ConfigError(f"cluster.signal_lead={cluster.signal_lead}: Slurm takes at most 65535 seconds")
    if not 1024 <= cluster.port_base <= 65535 - PORT_RANGE:
        raise ConfigError(f"cluster.port_base={cluster.port_base}: give 1024 to {65535 - PORT_RANGE}")
    ranks, gpus = ranks_per_node(cluster), cluster.gpus_per_node
    if gpus and ranks > gpus:
        raise ConfigError(
            f"cluster.tasks_per_node={ranks} is above cluster.gpus_per_node={gpus}: a rank needs a GPU of its own; "
            f"give {gpus} or less"
        )


def _check_time(cluster: ClusterConfig) -> None:
    if cluster.time is None:
        return
    if not re.fullmatch(r"(\d+-)?\d{1,3}:[0-5]\d:[0-5]\d", cluster.time):
        raise ConfigError(
            f"cluster.time={cluster.time!r}: not of the form [D-]HH:MM:SS "
            "(YAML reads 4:00:00 without quotes as a number: write time: '4:00:00')"
        )
    seconds = time_limit_s(cluster)
    if seconds is not None and seconds <= cluster.signal_lead:
        raise ConfigError(
            f"cluster.signal_lead={cluster.signal_lead} seconds is not below cluster.time={cluster.time}: ranks would "
            "be stopped at their start; give more time or a shorter lead"
        )


def _check_container(container: ContainerConfig) -> None:
    key = "cluster.container"
    if container.runtime not in ("none", "pyxis", "apptainer"):
        raise ConfigError(f"{key}.runtime={container.runtime!r}: choose none, pyxis or apptainer")
    if container.runtime == "none":
        if container.image is not None or container.mounts:
            raise ConfigError(f"{key}.image and {key}.mounts have no effect with {key}.runtime=none; choose a runtime")
        return
    if not container.image:
        raise ConfigError(f"{key}.runtime={container.runtime} needs {key}.image=<file or name of an image>")
    _refuse_control(f"{key}.image", container.image)
    for mount in container.mounts:
        _refuse_control(f"{key}.mounts", mount)
        if not re.fullmatch(r"/[^:,]*:/[^:,]*(:(ro|rw))?", mount):
            raise ConfigError(f"{key}.mounts: '{mount}' is not of the form /source:/target or /source:/target:ro")


def _check_option(line: str) -> None:
    _refuse_control("cluster.sbatch", line)
    found = re.match(r"--([a-z][a-z0-9-]*)(=|$)|-([A-Za-z])", line)
    if not found:
        raise ConfigError(f"cluster.sbatch: '{line}' is not of the form --name=value")
    name = found[1] or _SHORT_OPTIONS.get(found[3], "")
    if name in OWNED_OPTIONS:
        owner = OWNED_OPTIONS[name]
        change = f"set {owner} instead" if owner else "`aligner submit` decides it; leave it out"
        raise ConfigError(f"cluster.sbatch: '{line}': {change}")


def _refuse_control(key: str, value: str) -> None:
    """Newlines would end a line of the script; other control characters have no business in it."""
    bad = next((character for character in value if not character.isprintable()), None)
    if bad is not None:
        raise ConfigError(f"{key}: {value!r} holds the character {bad!r}; only printable ones can stand there")

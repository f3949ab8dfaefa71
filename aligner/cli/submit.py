"""``aligner submit COMMAND cluster=NAME ...``: a training command as a job on a Slurm cluster.

The command's own configuration is composed and checked first, for the ranks that the job will have, exactly as the
command itself would; then Slurm is asked whether it would take the job; then it is submitted. Before that nothing is
written.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aligner.cli.help import key_lines
from aligner.cli.launch import default_run_dir
from aligner.cli.options import OptionParser
from aligner.config.checks import check
from aligner.config.cluster import ClusterConfig, SubmitRoot, check_cluster, ranks_per_node, split_overrides
from aligner.config.compose import compose, compose_unresolved, config_groups, quote_override
from aligner.config.run_file import check_run_owner
from aligner.config.schema import ROOTS
from aligner.config.section import to_container
from aligner.errors import ConfigError, RunInUseError
from launchers import slurm
from launchers.slurm_script import Job, mounts, render


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code. Raises AlignerError."""
    options = _parse(arguments)
    config_dirs = [Path(path) for path in options.config_dir]
    if options.help:
        print(_help(config_dirs))
        return 0
    command, *overrides = options.words or [""]
    if command not in ROOTS:
        raise ConfigError(f"'{command}': give the command to submit first; it is one of {', '.join(ROOTS)}")
    job = prepare(command, overrides, config_dirs)
    script = render(job)
    if options.dry_run:
        print(script, end="")
        return 0
    _refuse_second_job(job)
    answer = slurm.ask(job, script)
    if options.test_only:
        print(answer)
        return 0
    repeat = ["aligner", "submit", command, *overrides, quote_override("run.dir", str(job.run_dir))]
    identifier = slurm.submit(job, script, [*repeat, *(f"--config-dir={path}" for path in config_dirs)])
    print(_summary(job, identifier))
    return 0


def prepare(command: str, overrides: Sequence[str], config_dirs: Sequence[Path]) -> Job:
    """The checked job of ``aligner <command> <overrides>``; decides ``run.dir``. Raises AlignerError."""
    of_cluster, of_command = split_overrides(overrides)
    if not any(word.lstrip("+").startswith("cluster=") for word in of_cluster):
        available = ", ".join(config_groups(config_dirs, "submit").get("cluster", []))
        raise ConfigError(f"no cluster: give cluster=NAME; available: {available}; --config-dir adds your own")
    cluster = compose("submit", of_cluster, config_dirs).cluster
    check_cluster(cluster)
    root = compose(command, of_command, config_dirs)
    check(root, _world_size(root, cluster))
    run_dir = Path(root.run.dir or default_run_dir(command)).absolute()
    check_run_owner(run_dir, command)
    words = [command, *of_command, quote_override("run.dir", str(run_dir))]
    words += [f"--config-dir={path.absolute()}" for path in config_dirs]
    for word in words:
        if not word.isprintable():
            raise ConfigError(f"{word!r}: only printable characters can stand in the command of a job")
    job = Job(cluster, tuple(words), run_dir, Path.cwd())
    if cluster.container.runtime != "none":
        _warn_of_unseen_paths(job, to_container(root))
    return job


def _warn_of_unseen_paths(job: Job, values: Mapping[str, Any]) -> None:
    """Say which paths of the configuration exist here, but not in the job's container."""
    targets = [mount.split(":")[1] for mount in mounts(job)]
    told: set[Path] = set()  # keys share paths
    for key, text in _texts(values):
        path = Path(text.partition(":")[0]).absolute()  # of file.py:function the file
        if path in told or not path.exists() or any(path.is_relative_to(target) for target in targets):
            continue
        told.add(path)
        print(f"warning: {key}: {path} is on no mount of the container; see cluster.container.mounts", file=sys.stderr)


def _texts(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _texts(value, f"{prefix}{name}.")
        elif isinstance(value, str) and value:
            yield f"{prefix}{name}", value


def _world_size(root: Any, cluster: ClusterConfig) -> int:
    """Ranks of the job. One task may start local ranks by itself; several are the ranks."""
    ranks = cluster.nodes * ranks_per_node(cluster)
    devices: int = root.trainer.devices
    if ranks > 1 and devices != 1:
        raise ConfigError(
            f"trainer.devices={devices} has no effect in a job of several tasks: cluster.nodes={cluster.nodes} x "
            f"cluster.tasks_per_node={ranks_per_node(cluster)} = {ranks} are the ranks; leave it out"
        )
    return ranks if ranks > 1 else devices


def _refuse_second_job(job: Job) -> None:
    """Two jobs cannot train in one run directory, unless the second waits for the first."""
    before = slurm.newest_job(job.run_dir)
    if before is None or any("dependency" in line for line in job.cluster.sbatch):
        return
    facts = slurm.job_facts(before)
    if slurm.is_alive(facts) and facts is not None:
        raise RunInUseError(
            f"{job.run_dir}: job {before} of this run is {facts['JobState']}; wait for it, stop it (scancel {before}) "
            "or choose another run.dir"
        )


def _summary(job: Job, identifier: str) -> str:
    run = shlex.quote(_shown(job.run_dir))
    ranks = f"{job.ranks} rank{'s' * (job.ranks > 1)} on {job.cluster.nodes} node{'s' * (job.cluster.nodes > 1)}"
    again = {"none": "end", "requeue": "requeue", "chain": "chain the next job"}[job.cluster.requeue]
    lines = [
        ("submitted", f"job {identifier}: {ranks}"),
        ("run directory", _shown(job.run_dir)),
        ("log", _shown(job.log)),
        ("follow", f"tail -F {shlex.quote(_shown(job.log))}"),
        ("watch", f"aligner status {run}    squeue -j {identifier}"),
        (f"save and {again}", f"scancel --signal=USR1 {identifier}"),
        ("save and stop", f"scancel --signal=TERM {identifier}"),
        ("cancel", f"scancel {identifier}    # saves if that takes no longer than the cluster's KillWait"),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def _shown(path: Path) -> str:
    """``path`` from here where it is below here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = OptionParser("submit", "Submit a command to a Slurm cluster.", add_help=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--test-only", action="store_true")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    options = parser.parse_intermixed_args(list(arguments))
    if options.dry_run and options.test_only:
        raise ConfigError("--dry-run asks nobody and --test-only asks Slurm; leave one out")
    return options


def _help(config_dirs: Sequence[Path]) -> str:
    clusters = ", ".join(config_groups(config_dirs, "submit").get("cluster", []))
    lines = [
        "aligner submit: run a command as a job on a Slurm cluster",
        "",
        f"usage: aligner submit {{{','.join(ROOTS)}}} cluster=NAME [key=value ...] [options]",
        "",
        f"cluster: {clusters}",
        "",
        "keys of the cluster (the default stands here); all others are those of the command:",
        *key_lines(SubmitRoot, compose_unresolved("submit", (), config_dirs)),
        "",
        "options:",
        "  --dry-run         print the job's script and stop; needs no Slurm",
        "  --test-only       ask Slurm whether and when the job would start, and stop",
        "  --config-dir DIR  search DIR for more cluster/*.yaml, model/*.yaml and recipe/*.yaml",
        "  --help            this text",
    ]
    if shutil.which("sbatch", path=os.environ.get("PATH")) is None:
        lines += ["", "There is no sbatch on this machine: only --dry-run works here."]
    return "\n".join(lines)

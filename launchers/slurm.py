"""Jobs on a Slurm cluster: ask whether Slurm would take one, submit it, read what became of it. Imports without torch.

``python -m launchers.slurm ppo cluster=… …`` is ``aligner submit ppo cluster=… …``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aligner.config.cluster import ClusterConfig
from aligner.errors import AlignerError, ConfigError
from launchers.slurm_script import FOLDER, SUPPORT_FILES, Job, sbatch_options, templates

SCRIPT_FILE = "job.sbatch"
COMMAND_FILE = "command.txt"
EVENTS_FILE = "events.jsonl"
TIMEOUT_S = 60.0
#: States of a job that runs or will run.
ALIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "COMPLETING", "REQUEUED", "REQUEUE_HOLD")

#: Words of sbatch -> the keys that they are about.
_REFUSALS = {
    "partition": ("partition",),
    "account": ("account", "partition"),
    "qos": ("qos",),
    "time limit": ("time",),
    "--time": ("time",),
    "gres": ("gpus_per_node",),
    "memory": ("memory",),
    "feature": ("sbatch",),
    "reservation": ("sbatch",),
    "option": ("sbatch",),
    "node name": ("sbatch",),
    "node count": ("nodes",),
    "node configuration": ("nodes", "tasks_per_node", "cpus_per_task", "gpus_per_node", "memory"),
    "processors": ("nodes", "tasks_per_node", "cpus_per_task"),
}


class SlurmError(AlignerError):
    """Slurm does not answer."""


# --------------------------------------------------------------------------- submission


def ask(job: Job, script: str) -> str:
    """What ``sbatch --test-only`` says of ``script``: when and where it would start.

    Raises:
        ConfigError: sbatch refuses it, in its own words and with the keys they are about; or there is no sbatch.
    """
    done = _run(["sbatch", "--test-only"], environment=submission_environment(job, os.environ), text=script)
    said = _words(done)
    if done.returncode:
        raise ConfigError(_explain(job.cluster, said))
    return said.removeprefix("sbatch: ")


def submit(job: Job, script: str, command: Sequence[str]) -> str:
    """Keep script and command in ``RUN/slurm/`` and submit; returns the job id. Raises ConfigError like :func:`ask`."""
    is_new = not job.run_dir.exists()
    job.folder.mkdir(parents=True, exist_ok=True)
    for name in SUPPORT_FILES:
        _replace(job.folder / name, (templates() / name).read_text(encoding="utf-8"))
    _replace(job.folder / SCRIPT_FILE, script)
    _replace(job.folder / COMMAND_FILE, shlex.join(command) + "\n")
    words = ["sbatch", "--parsable", str(job.folder / SCRIPT_FILE)]
    done = _run(words, environment=submission_environment(job, os.environ))
    if done.returncode:
        if is_new:
            shutil.rmtree(job.run_dir)
        raise ConfigError(_explain(job.cluster, _words(done)))
    identifier = done.stdout.strip().partition(";")[0]
    row = {"time": int(time.time()), "event": "submitted", "job": identifier, "restart": 0, "other": ""}
    with (job.folder / EVENTS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return identifier


def submission_environment(job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` for sbatch: without what belongs to the job that submits, and without ``SBATCH_*`` variables of
    options that the script gives itself, which they would override."""
    given = {re.split(r"[= ]", option.lstrip("-"), maxsplit=1)[0] for option in sbatch_options(job)}
    names = {f"SBATCH_{name.upper().replace('-', '_')}" for name in given} | {"SBATCH_TIMELIMIT", "SBATCH_MEM_PER_NODE"}
    names |= {"SBATCH_NO_REQUEUE", "SBATCH_REQUEUE"}
    if job.cluster.time is None:
        names.discard("SBATCH_TIMELIMIT")
    if job.cluster.memory is None:
        names.discard("SBATCH_MEM_PER_NODE")
    kept = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")
    return {
        name: value
        for name, value in environ.items()
        if name not in names and (not name.startswith("SLURM_") or name in kept)
    }


def _explain(cluster: ClusterConfig, said: str) -> str:
    """One line: sbatch's words, and the keys that they are about with their values."""
    lower = said.lower()
    if "configuration source" in lower or "unable to contact slurm controller" in lower:
        return f"no Slurm can be reached from here ({said}); submit where sinfo works, or use --dry-run"
    keys = list(dict.fromkeys(key for word, names in _REFUSALS.items() if word in lower for key in names))
    values = ", ".join(f"cluster.{key}={_shown(getattr(cluster, key))}" for key in keys)
    message = f"sbatch refuses the job: {said}"
    if values:
        message += f"; change {values}"
    if "partition" in keys and (partitions := _partitions()):
        message += f"; partitions here: {partitions}"
    elif "nodes" in keys and (sizes := _sizes(cluster.partition)):
        message += f"; there are {sizes}"
    return message


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    return "null" if value is None else str(value)


def _partitions() -> str:
    done = _ask_quietly(["sinfo", "-h", "-o", "%R"])
    return ", ".join(dict.fromkeys(done.split()))


def _sizes(partition: str | None) -> str:
    """The nodes of ``partition`` in words: ``4 nodes of 8 CPUs, 64000 MB in main``."""
    words = ["sinfo", "-h", "-o", "%D nodes of %c CPUs and %m MB in %R", *(["-p", partition] if partition else [])]
    return "; ".join(" ".join(line.split()) for line in _ask_quietly(words).splitlines())


# --------------------------------------------------------------------------- jobs


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """What happened to the jobs of a run, oldest first; torn lines are left out."""
    try:
        lines = (run_dir / FOLDER / EVENTS_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("job"), str) and isinstance(row.get("event"), str):
            rows.append(row)
    return rows


def newest_job(run_dir: Path) -> str | None:
    """The id of the job that was last submitted for a run, by a person or by the job before it."""
    for row in reversed(read_events(run_dir)):
        if row["event"] == "chained" and str(row.get("other", "")).isdigit():
            return str(row["other"])
        if row["job"].isdigit():
            return str(row["job"])
    return None


def job_facts(job: str) -> dict[str, str] | None:
    """``scontrol show job`` as names and values (JobState, Reason, NodeList, RunTime, TimeLimit, Restarts …); None:
    Slurm does not know the job any more, or there is no Slurm."""
    text = _ask_quietly(["scontrol", "show", "job", "-o", job])
    facts: dict[str, str] = {}
    for name, value in re.findall(r"(\S+?)=(\S*)", text):
        facts.setdefault(name, value)
    return facts if "JobState" in facts else None


def is_alive(facts: Mapping[str, str] | None) -> bool:
    """Whether a job of these facts runs or is going to."""
    return facts is not None and facts["JobState"] in ALIVE


# --------------------------------------------------------------------------- processes


def _run(words: Sequence[str], environment: Mapping[str, str], text: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words, env=environment, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise ConfigError(
            f"there is no {words[0]} on this machine, so nothing can be submitted; submit from a login node of the "
            "cluster, or look at the script with --dry-run"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{words[0]} has not answered for {TIMEOUT_S:.0f} s; try again later") from None


def _ask_quietly(words: Sequence[str]) -> str:
    """Standard output of a Slurm client; empty when there is none or it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _words(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip().removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines()]
    wanted = [line for line in lines if line and not line.startswith('Try "sbatch --help"')]
    return "; ".join(dict.fromkeys(wanted)) or f"sbatch ended with exit code {done.returncode} and said nothing"


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    from aligner.cli.main import main

    sys.exit(main(["submit", *sys.argv[1:]]))

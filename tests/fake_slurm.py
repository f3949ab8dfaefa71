"""Stand-ins for Slurm's programs: a job's script and ``aligner submit`` run against them, without a cluster."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

# Each notes its arguments in calls.txt. What they answer stands in files of the same folder.
_PROGRAMS = {
    "scontrol": """
        case "$1 $2" in
            "show hostnames") printf 'node1\\nnode2\\n' ;;
            "show job") cat "$here/facts.txt" ;;
            requeue*) cat "$here/requeue.txt" >&2; [ ! -s "$here/requeue.txt" ] ;;
        esac""",
    "squeue": "echo 2030-01-01T00:00:00",
    "sinfo": "echo main",
    "scancel": ":",
    "sbatch": """
        env > "$here/sbatch_environment.txt"
        cat "$here/sbatch.txt" >&2
        [ ! -s "$here/sbatch.txt" ] || exit 1
        case "$*" in *--test-only*) echo 'sbatch: Job 99 to start at once' >&2 ;; *) echo 99 ;; esac""",
    # Starts the ranks; the highest exit code is its own. With signal.txt the script gets that signal first.
    "srun": """
        count=$(printf '%s\\n' "$@" | sed -n 's/^--ntasks=//p')
        while [[ $1 == --* ]]; do shift; done
        [ ! -s "$here/signal.txt" ] || kill -"$(cat "$here/signal.txt")" $PPID
        worst=0
        for ((rank = 0; rank < count; rank++)); do
            SLURM_PROCID=$rank "$@"
            code=$?
            [ $code -le $worst ] || worst=$code
        done
        exit $worst""",
}


class FakeSlurm:
    """A folder of stand-ins and what they were called with."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        for name, body in _PROGRAMS.items():
            path = folder / name
            note = 'echo "$(basename "$0") $*" >> "$here/calls.txt"'
            path.write_text(f'#!/bin/bash\nhere=$(dirname "$0")\n{note}\n{body}\n')
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        for name in ("requeue", "sbatch", "signal"):
            (folder / f"{name}.txt").touch()
        self.set_facts()

    def set_facts(self, state: str = "RUNNING", reason: str = "None", restarts: int = 0) -> None:
        """What ``scontrol show job`` says."""
        (self.folder / "facts.txt").write_text(
            f"JobId=7 JobName=aligner-x JobState={state} Reason={reason} Dependency=(null) Requeue=1 "
            f"Restarts={restarts} NodeList=node[1-2] RunTime=00:00:35 TimeLimit=00:10:00\n"
        )

    def answer(self, name: str, text: str) -> None:
        """``requeue`` and ``sbatch``: refuse with these words; ``signal``: what the script gets while ranks run."""
        (self.folder / f"{name}.txt").write_text(text)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls.txt"
        return path.read_text().splitlines() if path.exists() else []

    def called(self, start: str) -> list[str]:
        return [call for call in self.calls if call.startswith(start)]

    @property
    def environment(self) -> dict[str, str]:
        """This process's, with the stand-ins first in PATH, and without any real job's or rank's variables."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "MASTER_"))}
        return {**kept, "PATH": f"{self.folder}:{os.environ['PATH']}"}

    def run_script(
        self, script: Path, more: Mapping[str, str] = {}, words: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run a job's script as Slurm's node daemon would."""
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}
        return subprocess.run(
            ["bash", str(script), *words],
            env={**self.environment, **job, **more},
            capture_output=True,
            text=True,
            timeout=60,
        )

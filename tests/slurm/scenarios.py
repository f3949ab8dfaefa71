"""What happens to jobs in the tests: each scenario submits one, waits for its moment, acts, and waits for the end.

Scenarios run at the same time, in threads; the jobs queue for the cluster's nodes. Jobs of training run the tiny PPO of
``tests/e2e`` on 2 nodes x 2 tasks. Their reward is a function that can wait at a known row of metrics.jsonl: until the
scenario has acted (``go``), or until the time limit is near and Slurm has sent its signal. Only the first life waits.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.pipeline import overrides, write_chat_model, write_data
from tests.slurm.cluster import Cluster, wait_for

STEPS = 8
HOLD_AFTER = 3  # rows
BEFORE_LIMIT_S = 40
TIMEOUT_S = 840.0
ASK = 'touch "$0"; echo deadline > "$(dirname "$0")/restart_requested"; exit 75'  # as ranks that have saved
REWARD = f"""
import os, time
from pathlib import Path

def score(requests):
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        run = os.environ.get("REWARD_HOLDS")
        limit = float(os.environ["SLURM_JOB_END_TIME"]) - {BEFORE_LIMIT_S}
        while run and len(Path(run, "metrics.jsonl").read_text().splitlines()) >= {HOLD_AFTER}:
            if Path(run, "go").exists() or time.time() > limit:
                break
            time.sleep(0.1)
    return [float(len(request.response) % 5) for request in requests]
"""


@dataclass(frozen=True)
class Outcome:
    """A job at its end."""

    run_dir: Path
    job: str
    facts: dict[str, str]
    printed: str
    status: dict[str, Any]

    @property
    def log(self) -> str:
        return (self.run_dir / "slurm" / "job.log").read_text()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "slurm" / "events.jsonl").read_text().splitlines()]

    @property
    def event_names(self) -> list[str]:
        return [event["event"] for event in self.events if event["event"] != "submitted"]


class Scenarios:
    """All of them, on one cluster and one folder with model, data and reward."""

    def __init__(self, cluster: Cluster, base: Path):
        self.cluster, self.base = cluster, base
        write_chat_model(base / "model")
        write_data(base / "data")
        (base / "reward.py").write_text(REWARD)

    # ------------------------------------------------------------------ the runs

    def straight(self) -> Outcome:
        """Nobody disturbs it."""
        return self.end(*self.submit_ppo("straight"))

    def stop(self) -> Outcome:
        """Asked to save and go on."""
        run_dir, job, printed = self.submit_ppo("stop", holds=True)
        self.wait_for_rows(run_dir)
        self.cluster.run("scancel", "--signal=USR1", job)
        time.sleep(1)
        (run_dir / "go").touch()
        return self.end(run_dir, job, printed)

    def limit(self) -> Outcome:
        """Reaches its time limit: two minutes, with the signal 60 to 90 seconds before. Its second life has more."""
        short = ("cluster.time='00:02:00'", "cluster.signal_lead=60")
        run_dir, job, printed = self.submit_ppo("limit", *short, holds=True)
        wait_for(lambda: self.facts(job)["Restarts"] == "1" or self.is_over(job), TIMEOUT_S, "the limit was reached")
        if not self.is_over(job):
            self.cluster.run("scontrol", "update", f"jobid={job}", "timelimit=10")
        return self.end(run_dir, job, printed)

    def node(self) -> Outcome:
        """Loses its second node, which comes back."""
        run_dir, job, printed = self.submit_ppo("node", holds=True)
        self.wait_for_rows(run_dir)
        lost = self.cluster.run("scontrol", "show", "hostnames", self.facts(job)["NodeList"]).split()[1]
        self.cluster.crash(lost)
        (run_dir / "go").touch()
        time.sleep(2)
        self.cluster.start(lost)
        return self.end(run_dir, job, printed)

    def crash(self) -> Outcome:
        """A rank of the second node is killed in the middle of a step."""
        return self.end(*self.submit_ppo("crash", "+cluster.env.ALIGNER_FAULT='train_policy:4:3:kill'"))

    def cancel(self) -> Outcome:
        """Cancelled by a person."""
        run_dir, job, printed = self.submit_ppo("cancel", holds=True)
        self.wait_for_rows(run_dir)
        (run_dir / "go").touch()
        self.cluster.run("scancel", job)
        return self.end(run_dir, job, printed)

    # ------------------------------------------------------------------ jobs without training

    def crashing(self) -> Outcome:
        """Crashes in every life."""
        return self.end(*self.submit_program("crashing", "exit 70", "cluster.max_restarts=1"))

    def chained(self) -> Outcome:
        """On a site that forbids requeueing: the first job asks to go on, the second finishes."""
        once = f'[ -e "$0" ] && exit 0; {ASK}'
        run_dir, job, printed = self.submit_program("chained", once, "cluster.requeue=chain")
        return self.end_of_chain(run_dir, job, printed)

    def refused(self) -> Outcome:
        """scontrol requeue is refused, although the configuration relies on it."""
        once = f'[ -e "$0" ] && exit 0; while [ ! -e "$(dirname "$0")/go" ]; do sleep 0.2; done; {ASK}'
        run_dir, job, printed = self.submit_program("refused", once)
        wait_for(lambda: self.facts(job).get("JobState") == "RUNNING", TIMEOUT_S, "the job runs")
        self.cluster.run("scontrol", "update", f"jobid={job}", "requeue=0")
        (run_dir / "go").touch()
        return self.end_of_chain(run_dir, job, printed)

    # ------------------------------------------------------------------ parts

    def aligner(self, *words: str) -> subprocess.CompletedProcess[str]:
        """``aligner WORDS`` in the folder, where the cluster's clients work."""
        kept = {k: v for k, v in self.cluster.environment.items() if not k.startswith(("PYTEST", "RANK", "WORLD_SIZE"))}
        return subprocess.run(
            [sys.executable, "-m", "aligner", *words],
            env={**kept, "OMP_NUM_THREADS": "1"},
            cwd=self.base,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def ppo_words(self, name: str) -> list[str]:
        run_dir = self.base / "runs" / name
        return overrides(
            "ppo",
            run_dir,
            self.base / "model",
            self.base / "data",
            f"reward.function='{self.base}/reward.py:score'",
            "critic.init_from=actor",
            "actor.parallel.tensor_model_parallel_size=2",
            "ppo.self_check=false",
            "trainer.save_interval=2",
            f"trainer.max_steps={STEPS}",
            "cluster=local_slurm",
        )

    def submit_ppo(self, name: str, *more: str, holds: bool = False) -> tuple[Path, str, str]:
        run_dir = self.base / "runs" / name
        if holds:
            more = (*more, f"+cluster.env.REWARD_HOLDS='{run_dir}'")
        return self._submit("ppo", *self.ppo_words(name), *more)

    def submit_program(self, name: str, program: str, *more: str) -> tuple[Path, str, str]:
        """A job of one rank that runs a shell program instead of Aligner; ``$0`` is a path in its run directory."""
        run_dir = self.base / "runs" / name
        escaped = program.replace("'", "\\'")
        small = [
            "cluster.nodes=1",
            "cluster.tasks_per_node=1",
            f"cluster.command=[bash,-c,'{escaped}','{run_dir}/once']",
        ]
        sft = overrides("sft", run_dir, self.base / "model", self.base / "data")
        return self._submit("sft", *sft, "cluster=local_slurm", *small, *more)

    def _submit(self, *words: str) -> tuple[Path, str, str]:
        done = self.aligner("submit", *words)
        assert done.returncode == 0, done.stderr
        found = re.search(r"^submitted +job (\d+)", done.stdout)
        assert found, done.stdout
        run_dir = next(word.partition("=")[2] for word in words if word.startswith("run.dir="))
        return Path(run_dir), found[1], done.stdout

    def is_submitted(self, name: str) -> bool:
        return (self.base / "runs" / name / "slurm" / "events.jsonl").exists()

    def is_over(self, job: str) -> bool:
        return self.facts(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def facts(self, job: str) -> dict[str, str]:
        return dict(re.findall(r"(\S+?)=(\S*)", self.cluster.run("scontrol", "show", "job", "-o", job)))

    def wait_for_rows(self, run_dir: Path) -> None:
        """Wait until the run is held."""

        def held() -> bool:
            path = run_dir / "metrics.jsonl"
            return path.exists() and len(path.read_text().splitlines()) >= HOLD_AFTER

        wait_for(held, TIMEOUT_S, f"{run_dir.name} has {HOLD_AFTER} rows")

    def end(self, run_dir: Path, job: str, printed: str) -> Outcome:
        """Wait until the job has ended and nothing is left of it in the queue."""
        try:
            wait_for(lambda: self.is_over(job), TIMEOUT_S, f"job {job} ({run_dir.name}) has ended")
        except AssertionError as error:
            log = run_dir / "slurm" / "job.log"
            raise AssertionError(f"{error}\n{log.read_text()[-3000:] if log.exists() else 'no log'}") from None
        status = self.aligner("status", str(run_dir), "--json")
        assert status.returncode == 0, status.stderr
        return Outcome(run_dir, job, self.facts(job), printed, json.loads(status.stdout))

    def end_of_chain(self, run_dir: Path, job: str, printed: str) -> Outcome:
        """Wait for the job that takes over, too."""
        first = self.end(run_dir, job, printed)
        after = [event["other"] for event in first.events if event["event"] == "chained"]
        return self.end(run_dir, after[0], printed) if after else first

"""What sbatch is asked, what its refusals become, and what is read about jobs."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from aligner.config.cluster import ClusterConfig
from aligner.errors import ConfigError
from launchers import slurm
from launchers.slurm_script import Job
from tests.fake_slurm import FakeSlurm


@pytest.fixture
def job(tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("PATH", fake_slurm.environment["PATH"])
    return Job(ClusterConfig(partition="main", nodes=3), ("sft", "a=b c"), tmp_path / "run", tmp_path)


def test_asks_and_submits(job: Job, fake_slurm: FakeSlurm) -> None:
    assert slurm.ask(job, "#!/bin/bash\n") == "Job 99 to start at once"
    assert not job.run_dir.exists()
    command = ["aligner", "submit", "sft", "a=b c"]
    assert slurm.submit(job, "#!/bin/bash\n", command) == "99"
    assert fake_slurm.called("sbatch") == ["sbatch --test-only", f"sbatch --parsable {job.folder}/job.sbatch"]
    assert sorted(path.name for path in job.folder.iterdir()) == [
        "command.txt",
        "env.sh",
        "events.jsonl",
        "job.sbatch",
        "task.sh",
    ]
    assert shlex.split((job.folder / "command.txt").read_text()) == command
    assert slurm.newest_job(job.run_dir) == "99"


@pytest.mark.parametrize(
    ("said", "keys"),
    [
        ("sbatch: error: invalid partition specified: x\nallocation failure: Invalid partition name", "partition=main"),
        ("sbatch: error: Invalid account or account/partition combination specified", "account=null"),
        ("sbatch: error: Invalid qos specification", "qos=null"),
        ("allocation failure: Requested node configuration is not available", "nodes=3"),
        ("allocation failure: Requested time limit is invalid (missing or exceeds some limit)", "time=null"),
        ("sbatch: unrecognized option '--nonsense=3'\nTry \"sbatch --help\" for more information", "sbatch=[]"),
    ],
)
def test_refusals_are_one_line_with_sbatchs_words_and_the_keys(
    job: Job, fake_slurm: FakeSlurm, said: str, keys: str
) -> None:
    fake_slurm.answer("sbatch", said + "\n")
    for act in (lambda: slurm.ask(job, ""), lambda: slurm.submit(job, "", [])):
        with pytest.raises(ConfigError) as caught:
            act()
        message = str(caught.value)
        assert "\n" not in message and f"cluster.{keys}" in message and "Try" not in message
        assert said.splitlines()[0].removeprefix("sbatch: ").removeprefix("error: ") in message
    assert not job.run_dir.exists()


def test_a_refused_job_leaves_an_existing_run_alone(job: Job, fake_slurm: FakeSlurm) -> None:
    job.run_dir.mkdir()
    (job.run_dir / "config.yaml").write_text("command: sft\n")
    fake_slurm.answer("sbatch", "sbatch: error: no\n")
    with pytest.raises(ConfigError):
        slurm.submit(job, "", [])
    assert (job.run_dir / "config.yaml").exists()


def test_without_sbatch(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no sbatch on this machine"):
        slurm.ask(job, "")
    assert slurm.job_facts("7") is None


def test_variables_of_the_submitting_job_and_of_given_options_stay_behind(tmp_path: Path) -> None:
    environ = {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_JOB_ID": "3",
        "SLURM_JOB_END_TIME": "5",
        "SBATCH_PARTITION": "other",
        "SBATCH_ACCOUNT": "team",
        "SBATCH_TIMELIMIT": "1",
        "SBATCH_SIGNAL": "KILL@1",
        "SBATCH_NO_REQUEUE": "1",
        "SBATCH_JOB_NAME": "x",
    }
    job = Job(ClusterConfig(partition="main", time="01:00:00"), ("sft",), tmp_path, tmp_path)
    kept = slurm.submission_environment(job, environ)
    assert kept == {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "team"}
    free = slurm.submission_environment(Job(ClusterConfig(), ("sft",), tmp_path, tmp_path), environ)
    assert free["SBATCH_PARTITION"] == "other" and free["SBATCH_TIMELIMIT"] == "1"


def test_events_are_read_although_a_line_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "slurm" / "events.jsonl"
    assert slurm.read_events(tmp_path) == [] and slurm.newest_job(tmp_path) is None
    path.parent.mkdir()
    rows = [
        {"time": 1, "event": "submitted", "job": "5", "other": ""},
        {"time": 2, "event": "chained", "job": "5", "other": "6"},
    ]
    path.write_text(json.dumps(rows[0]) + '\n[1]\n{"time": 3, "eve\n' + json.dumps(rows[1]) + '\n{"time": 4')
    assert slurm.read_events(tmp_path) == rows
    assert slurm.newest_job(tmp_path) == "6"


def test_facts_of_a_job(job: Job, fake_slurm: FakeSlurm) -> None:
    fake_slurm.set_facts("PENDING", "BeginTime", 2)
    facts = slurm.job_facts("7")
    assert facts is not None and facts["JobState"] == "PENDING" and facts["Restarts"] == "2" and slurm.is_alive(facts)
    fake_slurm.set_facts("CANCELLED")
    assert not slurm.is_alive(slurm.job_facts("7"))
    (fake_slurm.folder / "facts.txt").write_text("slurm_load_jobs error: Invalid job id specified\n")
    assert slurm.job_facts("7") is None and not slurm.is_alive(None)


def test_module_is_the_command() -> None:
    words = [sys.executable, "-m", "launchers.slurm", "nothing"]
    done = subprocess.run(words, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "give the command to submit first" in done.stderr

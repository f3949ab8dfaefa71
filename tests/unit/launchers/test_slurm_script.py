"""The script of a job: what stands in it, and what it decides when the ranks have ended."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from aligner.config.cluster import ClusterConfig, ContainerConfig
from aligner.errors import ConfigError
from launchers.slurm_script import SUPPORT_FILES, Job, render, sbatch_options, templates
from tests.fake_slurm import FakeSlurm


def job_of(tmp_path: Path, cluster: ClusterConfig | None = None, *words: str, run: str = "run") -> Job:
    return Job(cluster or ClusterConfig(), ("ppo", *words), tmp_path / run, tmp_path)


def write_script(job: Job) -> Path:
    job.folder.mkdir(parents=True, exist_ok=True)
    for name in SUPPORT_FILES:
        shutil.copy(templates() / name, job.folder / name)
    path = job.folder / "job.sbatch"
    path.write_text(render(job))
    return path


# --------------------------------------------------------------------------- what stands in it


def test_options_of_sbatch(tmp_path: Path) -> None:
    cluster = ClusterConfig(
        partition="gpu",
        account="team",
        qos="high",
        nodes=4,
        gpus_per_node=8,
        cpus_per_task=14,
        memory="0",
        time="1-00:00:00",
        signal_lead=300,
        requeue="chain",
        sbatch=["--exclusive"],
    )
    assert sbatch_options(job_of(tmp_path, cluster)) == [
        "--job-name=aligner-ppo-run",
        "--partition=gpu",
        "--account=team",
        "--qos=high",
        "--nodes=4",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--cpus-per-task=14",
        "--mem=0",
        "--time=1-00:00:00",
        "--signal=USR1@300",
        f'--chdir="{tmp_path}"',
        f'--output="{tmp_path}/run/slurm/job.log"',
        "--open-mode=append",
        "--no-requeue",
        "--exclusive",
    ]
    small = sbatch_options(job_of(tmp_path))
    assert "--requeue" in small and not any(option.startswith(("--partition", "--gpus", "--mem")) for option in small)


def test_options_stand_before_the_first_command(tmp_path: Path) -> None:
    lines = render(job_of(tmp_path)).splitlines()
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert options and max(options) < first
    assert not re.search("@[A-Z_]+@", "\n".join(lines))


def test_scripts_pass_shellcheck(tmp_path: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed")
    cluster = ClusterConfig(nodes=2, env={"A": "b c"}, container=ContainerConfig("apptainer", "x.sif", ["/a:/b:ro"]))
    script = write_script(job_of(tmp_path, cluster, "a='b'"))
    words = [str(shellcheck), "--exclude=SC2329", str(script), *(str(script.with_name(name)) for name in SUPPORT_FILES)]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("name", ["100%", 'a"b', "back\\slash", "new\nline"])
def test_run_directories_that_slurm_would_misread_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="choose another directory"):
        render(job_of(tmp_path, run=name))


def test_nothing_of_a_configuration_is_run_by_the_shell(
    tmp_path: Path, fake_slurm: FakeSlurm, rank_program: list[str]
) -> None:
    evil = f"'; touch {tmp_path}/evil; $(touch {tmp_path}/evil) `touch {tmp_path}/evil` \" \\ @RUN@ {{a,b}} *"
    cluster = ClusterConfig(command=[*rank_program, evil], env={"EVIL": evil, "MASTER_ADDR": "10.0.0.1"})
    job = job_of(tmp_path, cluster, f"x={evil}", run="it's $HOME; a run")
    notes = tmp_path / "notes"
    result = fake_slurm.run_script(write_script(job), {"RANK_NOTES": str(notes), "RANK": "5", "WORLD_SIZE": "9"})
    assert result.returncode == 0, result.stdout + result.stderr
    ((words, environment),) = [json.loads(line) for line in notes.read_text().splitlines()]
    assert words == [evil, "ppo", f"x={evil}"]
    assert environment["EVIL"] == evil and environment["MASTER_ADDR"] == "10.0.0.1"
    assert "RANK" not in environment and "WORLD_SIZE" not in environment
    assert not (tmp_path / "evil").exists()
    assert (job.run_dir / "slurm" / "events.jsonl").is_file()


def test_ranks_know_where_to_meet_and_when_the_job_ends(
    tmp_path: Path, fake_slurm: FakeSlurm, rank_program: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # what is set by the user stays
    script = write_script(job_of(tmp_path, ClusterConfig(nodes=2, command=rank_program, cpus_per_task=3)))
    ports = []
    for restart in ("", "1"):
        more = {"RANK_NOTES": str(tmp_path / "notes"), "SLURM_RESTART_COUNT": restart, "SLURM_CPUS_PER_TASK": "3"}
        assert fake_slurm.run_script(script, more).returncode == 0
        rows = [json.loads(line)[1] for line in (tmp_path / "notes").read_text().splitlines()]
        (tmp_path / "notes").unlink()
        assert len(rows) == 2 and {row["MASTER_ADDR"] for row in rows} == {"node1"}
        assert {row["OMP_NUM_THREADS"] for row in rows} == {"3"}
        assert time.localtime(int(rows[0]["SLURM_JOB_END_TIME"])).tm_year == 2030
        ports.append({row["MASTER_PORT"] for row in rows})
    assert ports == [{"20056"}, {"20057"}]


@pytest.mark.parametrize(
    ("runtime", "wanted"),
    [
        (
            "pyxis",
            "--container-image=nvcr.io#a/b:1 --container-mounts={here}:{here},/data:/data:ro "
            "--container-workdir={here} bash {here}/run/slurm/task.sh EXITS aligner ppo a=1",
        ),
        (
            "apptainer",
            "bash {here}/run/slurm/task.sh EXITS apptainer exec --nv --bind {here}:{here} --bind /data:/data:ro "
            "--pwd {here} nvcr.io#a/b:1 aligner ppo a=1",
        ),
    ],
)
def test_containers(tmp_path: Path, fake_slurm: FakeSlurm, runtime: str, wanted: str) -> None:
    container = ContainerConfig(runtime, "nvcr.io#a/b:1", ["/data:/data:ro"])
    cluster = ClusterConfig(gpus_per_node=1, container=container)
    script = write_script(job_of(tmp_path, cluster, "a=1"))
    fake_slurm.run_script(script)
    (call,) = fake_slurm.called("srun")
    call = call.replace(f"{tmp_path}/run/slurm/exit_codes/7.0", "EXITS")
    assert call.endswith(wanted.format(here=tmp_path)), call
    assert "PYTHONPATH" in script.read_text()


def test_a_run_elsewhere_is_mounted_too(tmp_path: Path) -> None:
    cluster = ClusterConfig(container=ContainerConfig("pyxis", "x.sqsh"))
    job = Job(cluster, ("ppo",), tmp_path / "run", tmp_path / "work")
    assert f"--container-mounts={job.work_dir}:{job.work_dir},{job.run_dir}:{job.run_dir}" in render(job)
    with pytest.raises(ConfigError, match="comma or colon"):
        render(Job(cluster, ("ppo",), tmp_path / "a:b", tmp_path / "work"))


def test_default_command_is_this_python(tmp_path: Path) -> None:
    assert f"COMMAND=({shlex.quote(sys.executable)} -m aligner ppo)" in render(job_of(tmp_path))


# --------------------------------------------------------------------------- what it decides


@dataclass(frozen=True)
class Case:
    """Exit codes of the ranks and what Slurm says, and what should come of it."""

    codes: str
    again: str | None  # requeue | chain | None
    event: str
    exit_code: int
    reason: str = "None"
    restarts: int = 0
    signal: str = ""
    mode: str = "requeue"
    crashes: tuple[int, ...] = ()  # seconds ago
    counts: bool = False  # as one more crash


CASES = {
    "finished": Case("0", None, "finished", 0),
    "asked to be started again": Case("75", "requeue", "requeued", 75),
    "asked, chained": Case("75", "chain", "chained", 75, mode="chain"),
    "asked, but the site starts nothing again": Case("75", None, "ended", 75, mode="none"),
    "stopped by a person": Case("76", None, "ended", 76),
    "configuration error of one rank": Case("8,2", None, "ended", 2),
    "checkpoint error": Case("5", None, "ended", 5),
    "in use": Case("9,8", None, "ended", 9),
    "interrupted": Case("130,8", None, "ended", 130),
    "a bug": Case("8,70", "requeue", "requeued", 70, counts=True),
    "hung": Case("72", "requeue", "requeued", 72, counts=True),
    "killed": Case("-9,8", "requeue", "requeued", 137, counts=True),
    "killed, chained": Case("-9", "chain", "chained", 137, mode="chain", counts=True),
    "killed, older crashes are out of the window": Case(
        "-9", "requeue", "requeued", 137, crashes=(200, 200, 200), counts=True
    ),
    "killed once too often": Case("-9", None, "ended", 137, crashes=(90, 50), counts=True),
    "asked again after crashes": Case("75", "requeue", "requeued", 75, crashes=(90, 50, 20)),
    "cancelled": Case("76", None, "cancelled", 76, signal="TERM"),
    "cancelled before it could save": Case("-15", None, "cancelled", 143, signal="TERM"),
    "cancelled although it asked": Case("75", None, "cancelled", 75, signal="TERM"),
    "node lost": Case("-15", None, "requeued", 143, signal="TERM", restarts=1),
    "node lost, chained": Case(
        "-15", "chain", "chained", 143, signal="TERM", reason="NodeDown", mode="chain", counts=True
    ),
    "time limit, saved in time": Case("75", "requeue", "requeued", 75, signal="TERM", reason="TimeLimit"),
    "time limit, saved at the limit": Case(
        "76", "requeue", "requeued", 76, signal="TERM", reason="TimeLimit", counts=True
    ),
    "time limit, not saved": Case("-15", "requeue", "requeued", 143, signal="TERM", reason="TimeLimit", counts=True),
}


@pytest.mark.parametrize("name", CASES)
def test_decision(tmp_path: Path, fake_slurm: FakeSlurm, rank_program: list[str], name: str) -> None:
    case = CASES[name]
    cluster = ClusterConfig(
        nodes=2, command=rank_program, requeue=case.mode, max_restarts=2, restart_window=100, signal_lead=1
    )
    job = job_of(tmp_path, cluster)
    script = write_script(job)
    crashes = job.run_dir / "slurm_crashes.txt"
    crashes.write_text("".join(f"{time.time() - age:.0f} exit_code=70\n" for age in case.crashes))
    fake_slurm.set_facts("COMPLETING" if case.signal else "RUNNING", case.reason, case.restarts)
    fake_slurm.answer("signal", case.signal)
    more = {"RANK_CODES": case.codes, "RANK_NOTES": str(tmp_path / "notes"), "RANK_RUN": str(job.run_dir)}
    result = fake_slurm.run_script(script, more)
    assert result.returncode == case.exit_code, result.stdout + result.stderr
    again = "requeue" if fake_slurm.called("scontrol requeue 7") else None
    if fake_slurm.called(f"sbatch --parsable --dependency=afterany:7 {script}"):
        again = "chain"
    assert again == case.again, result.stdout
    events = [json.loads(line) for line in (job.folder / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["started", case.event]
    assert len(crashes.read_text().splitlines()) - len(case.crashes) == case.counts
    assert not fake_slurm.called("scancel")


def test_a_refused_requeue_becomes_a_chained_job(
    tmp_path: Path, fake_slurm: FakeSlurm, rank_program: list[str]
) -> None:
    job = job_of(tmp_path, ClusterConfig(command=rank_program))
    fake_slurm.answer("requeue", "Requested operation is presently disabled for job 7")
    more = {"RANK_CODES": "75", "RANK_NOTES": str(tmp_path / "notes"), "RANK_RUN": str(job.run_dir)}
    result = fake_slurm.run_script(write_script(job), {**more, "SLURM_CONF": "/x", "SLURM_RESTART_COUNT": "0"})
    assert "scontrol requeue was refused (Requested operation is presently disabled for job 7)" in result.stdout
    assert "job 99 takes over" in result.stdout
    environment = (fake_slurm.folder / "sbatch_environment.txt").read_text().splitlines()
    assert [line for line in environment if line.startswith("SLURM_")] == ["SLURM_CONF=/x"]


def test_when_nothing_can_be_submitted_the_log_says_how_to_continue(
    tmp_path: Path, fake_slurm: FakeSlurm, rank_program: list[str]
) -> None:
    job = job_of(tmp_path, ClusterConfig(command=rank_program, requeue="chain"))
    fake_slurm.answer("sbatch", "sbatch: error: limits")
    more = {"RANK_CODES": "75", "RANK_NOTES": str(tmp_path / "notes"), "RANK_RUN": str(job.run_dir)}
    result = fake_slurm.run_script(write_script(job), more)
    assert result.returncode == 75
    assert f"to continue: sbatch {job.folder}/job.sbatch" in result.stdout and "limits" in result.stdout


def test_a_signal_for_the_script_alone_reaches_the_ranks(
    tmp_path: Path, fake_slurm: FakeSlurm, rank_program: list[str]
) -> None:
    job = job_of(tmp_path, ClusterConfig(command=rank_program))
    fake_slurm.answer("signal", "TERM")  # and scontrol says that the job runs on
    more = {"RANK_CODES": "76", "RANK_NOTES": str(tmp_path / "notes")}
    assert fake_slurm.run_script(write_script(job), more).returncode == 76
    assert fake_slurm.called("scancel") == ["scancel --signal=TERM 7"]


def test_a_request_of_an_earlier_life_is_not_taken_for_this_ones(
    tmp_path: Path, fake_slurm: FakeSlurm, rank_program: list[str]
) -> None:
    job = job_of(tmp_path, ClusterConfig(command=rank_program))
    script = write_script(job)
    (job.run_dir / "restart_requested").write_text("deadline")
    result = fake_slurm.run_script(script, {"RANK_CODES": "2", "RANK_NOTES": str(tmp_path / "notes")})
    assert result.returncode == 2 and not fake_slurm.called("scontrol requeue")


def test_nccl_settings_stand_in_one_place() -> None:
    root = Path(__file__).resolve().parents[3]
    files = [path for folder in ("aligner", "conf", "launchers", "slurm") for path in (root / folder).rglob("*.*")]
    texts = {str(path.relative_to(root)): path for path in files if path.suffix in (".py", ".yaml", ".sh", ".sbatch")}
    found = [name for name, path in texts.items() if re.search(r"\bNCCL_[A-Z]", path.read_text(encoding="utf-8"))]
    assert found == ["slurm/env.sh"]

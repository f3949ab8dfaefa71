"""``aligner submit``: what is checked before anything is asked or written, and what is printed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from aligner.cli.main import main
from tests.fake_slurm import FakeSlurm

WORDS = ["data.train=t.jsonl", "data.global_batch_size=4"]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "bin")
    for name, value in {"PATH": fake.environment["PATH"], "ALIGNER_X": "1"}.items():
        monkeypatch.setenv(name, value)
    work = tmp_path / "work"
    (work / "model").mkdir(parents=True)
    (work / "t.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    monkeypatch.chdir(work)
    return fake


def submit(*words: str) -> int:
    return main(["submit", "sft", "model.path=org/model", *WORDS, *words])


def test_submits_and_says_how_to_go_on(fake: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("cluster=local_slurm", "run.dir=runs/a b", "trainer.max_steps=3") == 0
    printed = capsys.readouterr().out
    for text in (
        "job 99: 4 ranks on 2 nodes",
        "runs/a b/slurm/job.log",
        "tail -F 'runs/a b/slurm/job.log'",
        "aligner status 'runs/a b'",
        "squeue -j 99",
        "scancel --signal=USR1 99",
        "scancel --signal=TERM 99",
        "scancel 99",
    ):
        assert text in printed
    folder = Path("runs/a b/slurm").absolute()
    script = (folder / "job.sbatch").read_text()
    assert "cluster" not in script.partition("COMMAND=(")[2].partition("\n")[0]
    repeat = shlex.split((folder / "command.txt").read_text())
    assert repeat[:3] == ["aligner", "submit", "sft"] and "cluster=local_slurm" in repeat
    assert repeat[-1] == f"run.dir='{folder.parent}'"
    assert [call.split()[1] for call in fake.called("sbatch")] == ["--test-only", "--parsable"]


def test_the_repeated_command_composes(fake: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("cluster=local_slurm", "run.dir=runs/a b") == 0
    repeat = shlex.split(Path("runs/a b/slurm/command.txt").read_text())
    fake.set_facts("COMPLETED")
    assert main(repeat[1:]) == 0


def test_dry_run_prints_the_script_and_asks_nobody(fake: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("cluster=gpu_pyxis", "cluster.account=team", "data.global_batch_size=8", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("#!/bin/bash") and "#SBATCH --account=team" in printed
    assert not fake.calls and not Path("runs").exists()


def test_paths_outside_the_container_are_told(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    words = ["cluster=gpu_pyxis", "data.global_batch_size=8", f"model.tokenizer={tmp_path}/other", "--dry-run"]
    assert submit(*words) == 0
    told = capsys.readouterr().err
    path = f"{tmp_path}/other"
    assert told == f"warning: model.tokenizer: {path} is on no mount of the container; see cluster.container.mounts\n"
    assert submit(*words, f"cluster.container.mounts=['{tmp_path}:{tmp_path}:ro']") == 0
    assert submit("cluster=local_slurm", f"model.tokenizer={tmp_path}/other", "--dry-run") == 0
    assert not capsys.readouterr().err


def test_test_only_submits_nothing(fake: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("cluster=local_slurm", "--test-only") == 0
    assert "Job 99 to start at once" in capsys.readouterr().out
    assert not fake.called("sbatch --parsable") and not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cluster=local_slurm", "trainer.max_step=3"], "nearest key: trainer.max_steps"),
        (["cluster=local_slurm", "data.global_batch_size=3"], "4 data-parallel ranks"),
        (["cluster=local_slurm", "cluster.nodes=1", "actor.parallel.tensor_model_parallel_size=4"], "the 2 ranks"),
        (["cluster=local_slurm", "trainer.devices=4"], "has no effect in a job of several tasks"),
        (["cluster=local_slurm", "data.train=no.jsonl"], "no such file"),
        (["cluster=elsewhere"], "no such cluster"),
        (["cluster.nodes=2"], "give cluster=NAME; available: gpu_apptainer"),
        (["cluster=local_slurm", "cluster.requeue=no"], "choose requeue, chain or none"),
        (["cluster=local_slurm", "run.dir=100%"], "choose another directory"),
        (["cluster=local_slurm", "run.dir='a\nb'"], "printable"),
        (["cluster=local_slurm", "--dry-run", "--test-only"], "leave one out"),
    ],
)
def test_configuration_errors_come_before_slurm(
    fake: FakeSlurm, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert submit(*words) == (3 if "data.train=no.jsonl" in words else 2)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and says in error
    assert not fake.calls and not Path("runs").exists()


def test_one_task_starts_local_ranks(fake: FakeSlurm) -> None:
    one = ["cluster=local_slurm", "cluster.nodes=1", "cluster.tasks_per_node=1"]
    assert submit(*one, "trainer.devices=4", "run.dir=a") == 0
    assert submit(*one, "trainer.devices=8", "run.dir=b") == 2


def test_commands_that_are_no_runs(fake: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["report", "x"], ["cluster=local_slurm"]):
        assert main(["submit", *words]) == 2
        assert "one of sft, rm, ppo, generate, evaluate" in capsys.readouterr().err


def test_bad_partition(fake: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answer("sbatch", "sbatch: error: invalid partition specified: nope\n")
    assert submit("cluster=local_slurm", "cluster.partition=nope") == 2
    assert "cluster.partition=nope; partitions here: main" in capsys.readouterr().err
    assert not fake.called("sbatch --parsable") and not Path("runs").exists()


def test_a_second_job_for_a_run_is_refused_while_the_first_lives(
    fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit("cluster=local_slurm", "run.dir=runs/a") == 0
    assert submit("cluster=local_slurm", "run.dir=runs/a") == 9
    assert "job 99 of this run is RUNNING" in capsys.readouterr().err
    assert submit("cluster=local_slurm", "run.dir=runs/a", "cluster.sbatch=['--dependency=afterany:99']") == 0
    fake.set_facts("FAILED")
    assert submit("cluster=local_slurm", "run.dir=runs/a") == 0


def test_a_run_of_another_command_is_refused(fake: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.yaml").write_text("command: ppo\n")
    assert submit("cluster=local_slurm", "run.dir=runs/a") == 2
    assert "holds a run of `ppo`" in capsys.readouterr().err


def test_own_clusters_and_help(fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "conf" / "cluster").mkdir(parents=True)
    (tmp_path / "conf" / "cluster" / "ours.yaml").write_text("defaults: [local_slurm]\npartition: ours\n")
    assert submit("cluster=ours", f"--config-dir={tmp_path / 'conf'}", "--dry-run") == 0
    script = capsys.readouterr().out
    assert "#SBATCH --partition=ours" in script and f"--config-dir={tmp_path / 'conf'}" in script
    assert main(["submit", "--help", f"--config-dir={tmp_path / 'conf'}"]) == 0
    text = capsys.readouterr().out
    assert "local_slurm, ours" in text and "cluster.signal_lead=600" in text

"""The command line before ranks start: help, printed configurations, refusals, who is a rank."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from aligner.cli.commands import COMMANDS
from aligner.cli.launch import default_run_dir, external_world_size
from aligner.cli.main import main
from aligner.config.schema import ROOTS
from aligner.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not a rank, in an empty directory."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``aligner *words``."""
    code = main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_lists_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ((), ("--help",), ("-h",)):
        code, out, _ = run(capsys, *words)
        assert code == 0
        assert all(f"  {command}" in out for command in COMMANDS) and "exit codes: 0 success" in out


@pytest.mark.parametrize("command", ROOTS)
def test_command_help_lists_groups_and_overrides(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert "  model: llama3_70b, llama3_8b" in out and "  +recipe: " in out
    assert "  trainer.devices=1 " in out and "# local ranks" in out
    assert ("  ppo.kl.coef=0.05" in out) == (command == "ppo")


def test_cfg_job_prints_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "ppo", "model=llama3_8b", "--cfg", "job", "ppo.clip_ratio=0.3")
    values = yaml.safe_load(out)
    assert code == 0 and values["ppo"]["clip_ratio"] == 0.3 and values["critic"]["model"]["path"] == "${model.path}"
    code, out, _ = run(capsys, "ppo", "model=llama3_8b", "--cfg", "job", "--resolve")
    assert yaml.safe_load(out)["critic"]["model"]["path"] == "meta-llama/Llama-3.1-8B-Instruct"
    code, out, _ = run(capsys, "ppo", "--cfg", "job")
    assert code == 0 and yaml.safe_load(out)["model"]["path"] == "???"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("pppo",), "no such command; nearest: ppo"),
        (("ppo", "-m", "trainer.seed=1,2"), "--multirun"),
        (("ppo", "--multirun"), "--multirun"),
        (("ppo", "--resolve"), "--resolve has an effect with --cfg job only"),
        (("ppo", "--cfg", "all"), "--cfg"),
        (("ppo", "--nonsense"), "--nonsense"),
        (("ppo", "--cfg", "job", "--resolve"), "give the value or leave --resolve out"),
        (("ppo",), "needs model.path"),
        (("sft", "model=smollm2_135m", "data.train=none.jsonl"), "data.train=none.jsonl: no such file"),
        (
            ("sft", "model.path=./none", "data.train=builtin:demonstrations"),
            "actor.model.path=./none: no such dir",
        ),
        (("sft", "model.path=a/b", "data.train=builtin:demonstrations", "trainer.device=2"), "trainer.devices"),
        (("report",), "run"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run(capsys, *words)
    assert code in (2, 3, 4) and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and expected in err
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_is_quick_and_torch_free() -> None:
    program = (
        "import sys; from aligner.cli.main import main;"
        "code = main(['ppo', 'model=llama3_8b', 'ppo.clip=1']);"
        "sys.exit(99 if 'torch' in sys.modules else code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2, result.stderr
    assert "nearest key: ppo.clip_ratio" in result.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5  # seconds of CPU


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m aligner ppo --help | head -1"
    result = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout.startswith("aligner ppo: ") and result.stderr == ""


def test_who_is_a_rank() -> None:
    assert external_world_size({}) is None
    assert external_world_size({"RANK": "1", "WORLD_SIZE": "4"}) == 4
    step = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert external_world_size(step) is None  # a batch script
    assert external_world_size({**step, "SLURM_STEP_NUM_TASKS": "4"}) == 4
    assert external_world_size({**step, "SLURM_STEP_NUM_TASKS": "1"}) is None  # srun --pty bash
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        external_world_size({"RANK": "1"})


def test_default_run_directories_differ(tmp_path: Path) -> None:
    first = default_run_dir("ppo")
    assert first.startswith("runs/ppo/20") and "=" not in first
    Path(first).mkdir(parents=True)
    assert default_run_dir("ppo") != first

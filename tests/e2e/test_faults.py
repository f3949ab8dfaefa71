"""A PPO run on two ranks in which something fails: it is started again and ends like one in which nothing did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aligner.checkpoint.lease import process_exists
from aligner.cli.status import read_status
from aligner.monitoring.lives import read_lives
from tests.e2e.pipeline import assert_same_run, metrics, overrides, write_chat_model, write_data
from tests.slurm.cluster import wait_for

STEPS = 3
REWARD = """
def score(requests):
    return [float(len(request.response) % 5) for request in requests]
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("faults")
    write_chat_model(directory / "model")
    write_data(directory / "data")
    (directory / "reward.py").write_text(REWARD)
    return directory


def words(base: Path, run_dir: Path, *more: str) -> list[str]:
    return overrides(
        "ppo",
        run_dir,
        base / "model",
        base / "data",
        f"reward.function={base}/reward.py:score",
        "critic.init_from=actor",
        "ppo.validation_prompts=0",
        "ppo.self_check=false",
        "trainer.devices=2",
        "trainer.save_interval=1",
        "trainer.max_restarts=2",
        f"trainer.max_steps={STEPS}",
        *more,
    )


def ppo(base: Path, run_dir: Path, *more: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "ALIGNER_FAULT": fault}
    command = [sys.executable, "-m", "aligner", "ppo", *words(base, run_dir, *more)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def straight(base: Path) -> Path:
    done = ppo(base, base / "straight")
    assert done.returncode == 0, done.stderr
    return base / "straight"


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("train_policy:2:1:kill", "rank 1 was killed by SIGKILL; restart 1 of 2 from the last checkpoint"),
        ("rollout:2:0:exception", "rank 0 failed; restart 1 of 2 from the last checkpoint"),
        ("values:2:1:hang", "hung; restart 1 of 2 from the last checkpoint"),
    ],
)
def test_a_crash_is_made_good(fault: str, line: str, base: Path, straight: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    more = ("trainer.phase_timeouts={values:10}", "checkpoint.async_save=false")  # step 1 is saved when step 2 begins
    done = ppo(base, run_dir, *more, fault=fault)
    assert done.returncode == 0, done.stderr
    assert line in done.stderr and "restart 2" not in done.stderr
    assert f"continues {run_dir} after step 1" in done.stdout
    reason = read_lives(run_dir)[0].reason or ""
    assert "injected fault" in reason if fault.endswith("exception") else f"{reason}; restart 1" in done.stderr
    kept = run_dir / "errors" / "restart_1"
    if fault.endswith("exception"):
        assert f"injected fault {fault}" in (kept / "rank_0.txt").read_text()
    if fault.endswith("hang"):
        assert all((kept / f"stacks_rank_{rank}.txt").is_file() for rank in (0, 1))
        assert "in _fire" in (kept / "stacks_rank_1.txt").read_text()
    assert_same_run(run_dir, straight, STEPS)


def test_a_full_disk_costs_one_checkpoint(base: Path, straight: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = ppo(base, run_dir, fault="write:1:0:disk_full")
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stdout + done.stderr and "restart" not in done.stderr
    published = sorted(path.name for path in (run_dir / "checkpoints").glob("*step_*"))
    assert published == ["step_00000002", "step_00000003"]
    assert_same_run(run_dir, straight, STEPS)


def test_ranks_of_a_killed_launcher_end_and_say_so(base: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "ALIGNER_FAULT": "rollout:2:1:hang"}
    launcher = subprocess.Popen([sys.executable, "-m", "aligner", "ppo", *words(base, run_dir)], env=variables)
    try:
        wait_for(lambda: (run_dir / "faults").is_dir(), 120, "the fault has happened")
    finally:
        launcher.kill()
        launcher.wait()
    (life,) = read_lives(run_dir)
    wait_for(lambda: not process_exists(life.pid), 30, "rank 0 has ended")
    (life,) = read_lives(run_dir)
    assert (life.reason, life.exit_code) == ("the launcher is gone, so its ranks end", 130)
    assert read_status(run_dir).state == "failed"


TP2 = "critic.parallel.tensor_model_parallel_size=2"


@pytest.mark.parametrize(
    ("layout", "rank", "reason"),
    [
        ((), 0, "critic: the loss is nan"),
        ((TP2,), 0, "critic: the loss is nan"),
        ((TP2,), 1, "critic: the gradient norm is nan"),  # one rank computes wrongly: the others see it too
    ],
)
def test_a_loss_that_is_not_a_number_ends_the_run(
    layout: tuple[str, ...], rank: int, reason: str, base: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    done = ppo(base, run_dir, *layout, fault=f"train_critic:2:{rank}:nan")
    assert done.returncode == 7, done.stderr
    assert done.stderr.count(reason) == 1 and "restart" not in done.stderr
    assert sorted(path.name for path in (run_dir / "errors" / "step_00000002").iterdir()) == ["rank_0", "rank_1"]
    assert [row["step"] for row in metrics(run_dir)] == [1]

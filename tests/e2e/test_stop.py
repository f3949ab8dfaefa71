"""A run that is stopped, wherever that is, saves, says how to go on, and ends like one that never was.

The reward is a Python function that sends signals to its own process, so every stop is asked for at a known place: the
first call of PPO's step 2 (SCORE), of its validation, ...
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from aligner.monitoring.lives import read_lives
from tests.e2e.pipeline import assert_same_run, metrics, overrides, write_chat_model, write_data

STEPS = 3
REWARD = """
import os, signal
from pathlib import Path

def score(requests):
    directory = Path(os.environ["REWARD_DIRECTORY"])
    directory.mkdir(exist_ok=True)
    calls = len(list(directory.iterdir()))
    (directory / str(calls)).touch()
    if os.environ.get("REWARD_SIGNAL") and calls == int(os.environ["REWARD_CALL"]):
        os.kill(os.getpid(), getattr(signal, os.environ["REWARD_SIGNAL"]))
    return [float(len(request.response) % 5) for request in requests]
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stop")
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
        "ppo.rollout_chunk_size=2",
        "ppo.self_check=false",
        "trainer.val_check_interval=2",
        f"trainer.max_steps={STEPS}",
        *more,
    )


def aligner(arguments: Sequence[str], directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "REWARD_DIRECTORY": str(directory), **environment}
    command = [sys.executable, "-m", "aligner", *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def straight(base: Path) -> Path:
    run_dir = base / "straight"
    done = aligner(["ppo", *words(base, run_dir)], base / "straight-calls")
    assert done.returncode == 0, done.stderr
    return run_dir


# call of the reward: 0 is step 1, 1 step 2, 2 the validation after step 2, 3 step 3, 4 the last validation
PLACES = {
    "step 1, while scoring": ("SIGTERM", 0, 76, 0, "4 samples of step 1"),
    "step 2, while scoring": ("SIGUSR1", 1, 75, 1, "4 samples of step 2"),
    "validation after step 2": ("SIGINT", 2, 76, 2, ""),
    "the last validation": ("SIGTERM", 4, 76, 3, ""),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_stopped_run_ends_like_an_uninterrupted_one(place: str, base: Path, straight: Path, tmp_path: Path) -> None:
    name, call, code, step, kept = PLACES[place]
    run_dir, calls = tmp_path / "run", tmp_path / "calls"
    stopped = aligner(["ppo", *words(base, run_dir)], calls, REWARD_SIGNAL=name, REWARD_CALL=str(call))
    assert stopped.returncode == code, stopped.stderr
    assert f"stopped by {name} after step {step}; saved {run_dir}/checkpoints/step_{step:08d}" in stopped.stderr
    assert kept in stopped.stderr
    assert (run_dir / "restart_requested").exists() == (code == 75)
    assert not (run_dir / "lease.json").exists()

    resumed = aligner(["ppo", *words(base, run_dir)], tmp_path / "more calls")
    assert resumed.returncode == 0, resumed.stderr
    assert ("with 4 samples that are already there" in resumed.stdout) == bool(kept)
    assert not (run_dir / "restart_requested").exists()
    assert_same_run(run_dir, straight, STEPS)


def test_two_ranks_stop_together_when_one_of_them_is_asked_to(base: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = words(base, run_dir, "trainer.devices=2", "trainer.max_steps=2")
    done = aligner(["ppo", *arguments], tmp_path / "calls", REWARD_SIGNAL="SIGUSR1", REWARD_CALL="1")
    assert done.returncode == 75, done.stderr
    assert done.stderr.count("stopped by SIGUSR1 after step 1") == 1
    again = aligner(["ppo", *arguments], tmp_path / "more calls")
    assert again.returncode == 0, again.stderr
    assert [row["step"] for row in metrics(run_dir)] == [1, 2]


def test_a_run_stops_before_its_time_is_over(base: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = words(base, run_dir, "trainer.max_steps=100000", "trainer.max_time=00:00:20")
    done = aligner(["ppo", *arguments], tmp_path / "calls")
    assert done.returncode == 75, done.stderr
    (life,) = read_lives(run_dir)
    assert life.end_time is not None and life.end_time - life.start_time < 30
    assert "stopped by deadline after step" in done.stderr and "asks to be started again" in done.stderr


def test_a_second_process_is_refused_and_a_finished_run_says_so(base: Path, straight: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "REWARD_DIRECTORY": str(tmp_path / "calls")}
    endless = words(base, run_dir, "trainer.max_steps=100000")
    first = subprocess.Popen([sys.executable, "-m", "aligner", "ppo", *endless], env=variables)
    try:
        while not (run_dir / "metrics.jsonl").exists():
            assert first.poll() is None
            time.sleep(0.1)
        second = aligner(["ppo", *endless], tmp_path / "calls")
        assert second.returncode == 9 and f"process {first.pid}" in second.stderr, second.stderr
    finally:
        first.send_signal(signal.SIGTERM)
        assert first.wait(120) == 76

    again = aligner(["ppo", *words(base, straight)], tmp_path / "calls")
    assert again.returncode == 0 and "already finished" in again.stdout
    fewer = aligner(["ppo", *words(base, straight, "trainer.max_steps=2")], tmp_path / "calls")
    assert fewer.returncode == 2 and "already at step 3" in fewer.stderr

"""Kills random ranks of a PPO run at random moments until it is through, and compares it with an undisturbed run.

A moment is a SIGKILL to one rank: at a random time after training began, or as soon as a save is being written. After
each one every checkpoint that was complete before must still be there and sound, and the run is started again.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from aligner.checkpoint import manifest
from tests.distributed.spawn import run_ranks
from tests.e2e.pipeline import assert_same_run, overrides, write_chat_model, write_data

STEPS = 8
RANKS = 2
LAYOUTS = {"dp2": [], "tp2": ["actor.parallel.tensor_model_parallel_size=2"]}
LIFE_TIMEOUT_S = 300.0
KILLS_A_RUN = 5  # a run that is killed more often is let through


@dataclass(frozen=True)
class Moment:
    """One kill, and what was found after it."""

    layout: str
    aimed_at: str  # "time" | "save"
    rank: int
    seconds: float  # after training began
    phase: str  # what the disk shows: "between saves" | "inside a save"
    checkpoints: int  # complete ones after the kill, verified by their checksums
    steps_done: int  # of the newest


@dataclass(frozen=True)
class Files:
    """What every run starts from."""

    model: Path
    data: Path
    reward: Path


def prepare(directory: Path) -> Files:
    """A tiny model, tiny data, and the reward model's run."""
    from tests.e2e.pipeline import run_command

    model, data = write_chat_model(directory / "model"), write_data(directory / "data")
    reward = directory / "rm"
    run_ranks(1, run_command, "rm", overrides("rm", reward, model, data, "trainer.max_steps=2"))
    return Files(model, data, reward)


def command(files: Files, run_dir: Path, layout: str) -> list[str]:
    """A PPO run that saves every step in the background, samples in chunks and keeps everything."""
    words = overrides(
        "ppo",
        run_dir,
        files.model,
        files.data,
        f"reward.init_from={files.reward}",
        f"trainer.max_steps={STEPS}",
        f"trainer.devices={RANKS}",
        "trainer.save_interval=1",
        "ppo.rollout_chunk_size=2",
        "ppo.validation_prompts=0",
        "ppo.kl.controller=adaptive",
        "ppo.kl.target=0.1",
        "ppo.kl.horizon=20",
        *LAYOUTS[layout],
    )
    return [sys.executable, "-m", "aligner", "ppo", *words]


def torture(directory: Path, files: Files, layout: str, kills: int, seed: int) -> tuple[list[Moment], int]:
    """``kills`` moments in as many runs as they need, and the number of these; all must end like the undisturbed one.

    Raises AssertionError for a lost or damaged checkpoint, a life that does not go on, and another result.
    """
    choice = random.Random(f"{seed} {layout}")
    straight = directory / f"straight-{layout}"
    seconds = _undisturbed(command(files, straight, layout), straight)
    moments: list[Moment] = []
    runs = 0
    while len(moments) < kills:
        run_dir = directory / f"killed-{layout}-{len(moments)}"
        words = command(files, run_dir, layout)
        for _ in range(min(KILLS_A_RUN, kills - len(moments))):
            moment = _kill_once(words, run_dir, layout, seconds, choice)
            if moment is None:  # the run was through before its moment
                break
            moments.append(moment)
            print(f"{len(moments)}/{kills} {json.dumps(asdict(moment))}", flush=True)
        _run_to_the_end(words, run_dir)
        assert_same_run(run_dir, straight, STEPS)
        shutil.rmtree(run_dir)
        runs += 1
    return moments, runs


def _undisturbed(words: Sequence[str], run_dir: Path) -> float:
    """Run to the end; returns the seconds from the first step's start to the last save."""
    process = _start(words, run_dir)
    began = _wait_for_training(process, run_dir)
    assert process.wait(LIFE_TIMEOUT_S) == 0, _log(run_dir)
    return time.monotonic() - began


def _kill_once(
    words: Sequence[str], run_dir: Path, layout: str, seconds: float, choice: random.Random
) -> Moment | None:
    """Start a life, kill one of its ranks, wait for its end, check what is on the disk."""
    aim, rank = choice.choice(("time", "time", "save")), choice.randrange(RANKS)
    process = _start(words, run_dir)
    began = _wait_for_training(process, run_dir)
    delay = choice.uniform(0.0, seconds / 2 if aim == "time" else 0.05)
    if aim == "save":
        while process.poll() is None and not _being_written(run_dir):
            time.sleep(0.001)
    time.sleep(delay)
    before = _complete(run_dir)
    inside = _being_written(run_dir)
    victim = _rank_process(process, rank)
    if victim is None:
        assert process.wait(LIFE_TIMEOUT_S) == 0, _log(run_dir)
        return None
    victim.send_signal(signal.SIGKILL)
    code = process.wait(60)
    assert code != 0, f"a killed rank must not look like success\n{_log(run_dir)}"
    after = _complete(run_dir)
    assert before <= after, f"checkpoints {sorted(before - after)} are lost"
    for name in after:
        path = run_dir / "checkpoints" / name
        problems = [manifest.file_problem(path, file, entry) for file, entry in manifest.read(path).files.items()]
        assert not any(problems), f"{path} is damaged: {problems}"
    newest = max((int(name.removeprefix("step_")) for name in after), default=0)
    phase = "inside a save" if inside else "between saves"
    return Moment(layout, aim, rank, round(time.monotonic() - began, 2), phase, len(after), newest)


def _run_to_the_end(words: Sequence[str], run_dir: Path) -> None:
    process = _start(words, run_dir)
    assert process.wait(LIFE_TIMEOUT_S) == 0, _log(run_dir)


# ------------------------------------------------------------------ processes and files


def _start(words: Sequence[str], run_dir: Path) -> subprocess.Popen:
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{run_dir}.log", "a", encoding="utf-8") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        return subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment)


def _wait_for_training(process: subprocess.Popen, run_dir: Path) -> float:
    """Wait until this life has opened its metrics, just before its first step."""
    lives = run_dir / "lives.jsonl"
    known = lives.read_text().count('"start_step"') if lives.exists() else 0
    deadline = time.monotonic() + LIFE_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        if lives.exists() and lives.read_text().count('"start_step"') > known:
            return time.monotonic()
        time.sleep(0.005)
    raise AssertionError(f"the life did not begin\n{_log(run_dir)}")


def _rank_process(launcher: subprocess.Popen, rank: int) -> psutil.Process | None:
    try:
        for child in psutil.Process(launcher.pid).children():
            if child.environ().get("RANK") == str(rank):
                return child
    except psutil.Error:
        pass
    return None


def _complete(run_dir: Path) -> set[str]:
    return {path.parent.name for path in (run_dir / "checkpoints").glob("step_*/manifest.json")}


def _being_written(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob(".tmp-*"))


def _log(run_dir: Path) -> str:
    path = Path(f"{run_dir}.log")
    return path.read_text(encoding="utf-8")[-4000:] if path.exists() else ""

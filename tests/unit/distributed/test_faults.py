"""Injected faults: what is accepted, where they fire, and that they fire once."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest

from aligner.distributed import faults
from aligner.errors import ConfigError


@pytest.fixture(autouse=True)
def no_faults_afterwards(monkeypatch: pytest.MonkeyPatch) -> object:
    yield
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    faults.configure(Path(), 0)


def configure(monkeypatch: pytest.MonkeyPatch, run_dir: Path, text: str, rank: int = 0, step: int = 2) -> None:
    monkeypatch.setenv(faults.VARIABLE, text)
    faults.configure(run_dir, rank)
    faults.set_step(step)


@pytest.mark.parametrize(
    "text", ["rollout", "rollout:2:0", "rollout:2:0:explode", "rollout:x:0:kill", ":2:0:kill", "rollout:2:0:kill:often"]
)
def test_a_malformed_fault_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="give phase:step:rank:kind"):
        configure(monkeypatch, tmp_path, text)


def test_a_fault_that_could_never_fire_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no phase 'rolout'; nearest: rollout"):
        configure(monkeypatch, tmp_path, "save:1:0:kill,rolout:2:0:kill")
    with pytest.raises(ConfigError, match="there is no loss in phase 'rollout'"):
        configure(monkeypatch, tmp_path, "rollout:2:0:nan")


def test_nothing_happens_without_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, tmp_path, "")
    faults.hit("rollout")
    assert not faults.poisons_loss() and not list(tmp_path.iterdir())


def test_a_fault_fires_at_its_place_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "values:2:1:exception"
    for rank, step, phase in ((0, 2, "values"), (1, 1, "values"), (1, 2, "rollout")):
        configure(monkeypatch, tmp_path, text, rank, step)
        faults.hit(phase)
    configure(monkeypatch, tmp_path, text, 1, 2)
    with pytest.raises(RuntimeError, match="injected fault values:2:1:exception"):
        faults.hit("values")


@pytest.mark.parametrize(("suffix", "times"), [("", 1), (":always", 3)])
def test_once_a_run_directory_or_always(
    suffix: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fired = 0
    for _life in range(3):
        configure(monkeypatch, tmp_path, f"rollout:2:0:exception{suffix}")
        try:
            faults.hit("rollout")
        except RuntimeError:
            fired += 1
    assert fired == times


def test_any_step_and_rank_fire_once_on_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 1):
        configure(monkeypatch, tmp_path, "save:*:*:disk_full, rollout:1:0:kill", rank, 7)
        with pytest.raises(OSError) as caught:
            faults.hit("save")
        assert caught.value.errno == errno.ENOSPC
        faults.hit("save")


def test_the_loss_of_one_rank_is_poisoned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, tmp_path, "train_policy:2:0:nan")
    faults.hit("train_critic")
    assert not faults.poisons_loss()
    faults.hit("train_policy")
    assert [faults.poisons_loss() for _ in range(2)] == [True, False]


def test_a_forked_writer_is_killed_once_and_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, tmp_path, "write:2:0:kill")
    ends = []
    for _save in range(2):
        child = os.fork()
        if child == 0:
            faults.hit("write")
            os._exit(0)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert ends == [-signal.SIGKILL, 0]


def test_a_hang_lasts_until_the_process_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, tmp_path, "data:2:0:hang")
    before = signal.signal(signal.SIGUSR1, lambda *_: None)  # a request to stop does not wake it up
    child = os.fork()
    if child == 0:
        faults.hit("data")
        os._exit(0)
    signal.signal(signal.SIGUSR1, before)
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGKILL):
        time.sleep(0.3)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        os.kill(child, number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

"""Stop requests of one process (several ranks: tests/distributed/test_stop_agreement.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from aligner.distributed import stop
from aligner.distributed.stop import Stopped, StopRequest, StopSignals


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    signals = StopSignals()
    signals.install()
    yield signals
    signals.uninstall()


@pytest.mark.parametrize(("name", "restart"), [("SIGTERM", False), ("SIGINT", False), ("SIGUSR1", True)])
def test_a_signal_becomes_a_request(signals: StopSignals, name: str, restart: bool) -> None:
    assert signals.poll() is None and not signals.asked
    signals.check()
    os.kill(os.getpid(), getattr(signal, name))
    assert signals.asked
    assert signals.poll() == StopRequest(name, restart)
    with pytest.raises(Stopped) as caught:
        signals.check()
    assert caught.value.request == StopRequest(name, restart)
    assert (caught.value.step, caught.value.message) == (None, None)
    assert str(caught.value) == f"stopped by {name}"
    caught.value.message = "saved"
    assert str(caught.value) == "saved"


def test_an_agreed_request_stays(signals: StopSignals) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signals.poll() == StopRequest("SIGUSR1", restart=True)
    os.kill(os.getpid(), signal.SIGTERM)  # Slurm at the time limit, while the run saves
    assert signals.poll() == StopRequest("SIGUSR1", restart=True)


def test_the_order_of_requests_of_one_poll() -> None:
    ordered = [
        StopRequest("deadline", restart=True),
        StopRequest("a wish", restart=True),
        StopRequest("SIGUSR1", restart=True),
        StopRequest("SIGTERM", restart=False),
        StopRequest("SIGINT", restart=False),
        StopRequest("the run directory was taken over", restart=False),
    ]
    for strongest in range(len(ordered)):
        signals = StopSignals()
        for request in ordered[strongest::-1] + ordered[:strongest]:
            signals.request(request.reason, request.restart)
        assert signals.poll() == ordered[strongest]


def test_a_request_from_a_thread() -> None:
    signals = StopSignals()
    thread = threading.Thread(target=signals.request, args=("lost", False))
    thread.start()
    thread.join()
    assert signals.poll() == StopRequest("lost", restart=False)


def test_handlers_are_restored() -> None:
    before = {number: signal.getsignal(number) for number in stop.SIGNALS}
    signals = StopSignals()
    signals.install()
    signals.install()
    assert all(signal.getsignal(number) != before[number] for number in stop.SIGNALS)
    signals.uninstall()
    signals.uninstall()
    assert {number: signal.getsignal(number) for number in stop.SIGNALS} == before


def test_the_second_interrupt_ends_at_once(signals: StopSignals, monkeypatch: pytest.MonkeyPatch) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)  # the same key press, from the terminal and from a launcher
    assert signals.poll() == StopRequest("SIGINT", restart=False)
    monkeypatch.setattr(stop, "SAME_PRESS_S", 0.01)
    time.sleep(0.02)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)


PROGRAM = """
import os, signal
from aligner.distributed.stop import StopSignals
signals = StopSignals()
signals.install()
for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    os.kill(os.getpid(), number)
"""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_0_says_one_line_a_signal(rank: str) -> None:
    environ = {**os.environ, "RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=True)
    expected = [
        "SIGTERM: stopping after saving",
        "SIGINT: stopping after saving; again to end at once",
        "SIGUSR1: stopping after saving",
    ]
    assert [line for line in done.stderr.splitlines() if line] == (expected if rank == "0" else [])

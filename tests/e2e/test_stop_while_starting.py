"""A stop that is asked for while a rank still imports its libraries is neither lost nor the end of the rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.pipeline import overrides, write_chat_model, write_data


def holds(pid: int, number: signal.Signals) -> bool:
    """Whether ``number`` would stay pending in process ``pid``."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(line.split()[1] for line in lines if line.startswith("SigBlk:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGTERM, 76)])
def test_stop_while_starting(tmp_path: Path, number: signal.Signals, code: int) -> None:
    model, data, run_dir = write_chat_model(tmp_path / "model"), write_data(tmp_path / "data"), tmp_path / "run"
    words = overrides("sft", run_dir, model, data, "trainer.max_steps=1000")
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29077"}
    ignored = ["bash", "-c", 'trap "" USR1; exec "$@"', "bash"]  # as a job's task does
    process = subprocess.Popen(
        [*ignored, sys.executable, "-m", "aligner", "sft", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **ranks},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not holds(process.pid, number):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code, output
    assert f"stopped by {number.name}" in output
    assert (run_dir / "restart_requested").exists() == (code == 75)

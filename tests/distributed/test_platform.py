"""Who a process is, and a process group without any environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from aligner.distributed.platform import RankEnvironment, rank_environment
from aligner.errors import ConfigError

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "MASTER_ADDR": "node1",
}


def test_torchrun_comes_first() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    found = rank_environment({**SLURM, **torchrun, "MASTER_ADDR": "host", "MASTER_PORT": "1234"})
    assert found == RankEnvironment(3, 4, 1, 2, ("host", 1234))


def test_srun() -> None:
    found = rank_environment(SLURM)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 8, 1, 4)
    assert found.master is not None and found.master[0] == "node1"
    other = rank_environment({**SLURM, "SLURM_JOB_ID": "78"}).master
    assert other is not None and other[1] != found.master[1], "jobs on one host need ports of their own"
    assert rank_environment({**SLURM, "MASTER_PORT": "999"}).master == ("node1", 999)


def test_a_batch_script_is_not_a_step() -> None:
    assert rank_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}).world_size == 1


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "zero", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK is 'zero'"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "MASTER_ADDR is not set"),
    ],
)
def test_incomplete_environment_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rank_environment(environ)


def test_a_single_process_needs_no_environment() -> None:
    code = (
        "import torch, torch.distributed as dist\n"
        "from aligner.distributed import platform\n"
        "first = platform.initialize(threads=1)\n"
        "assert platform.initialize() == first and torch.get_num_threads() == 1\n"
        "x = torch.ones(2); dist.all_reduce(x); assert x.tolist() == [1, 1]\n"
        "platform.shutdown(); assert not dist.is_initialized() and platform.world_size() == 1\n"
        "print('fine')"
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MASTER_")) and "RANK" not in k}
    run = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert run.stdout.strip() == "fine", run.stderr

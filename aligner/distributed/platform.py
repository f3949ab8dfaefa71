"""CUDA with NCCL where there is a GPU, CPU with gloo elsewhere; and the life of this rank's process group."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from aligner.distributed import cpu_compat
from aligner.errors import ConfigError

DEFAULT_TIMEOUT_S = 1800.0

#: Matrix products that oneDNN keeps compiled, unless ONEDNN_PRIMITIVE_CACHE_CAPACITY is set before the first of them.
#: It compiles for every shape, about 1 MiB and a few milliseconds each, so for every number of tokens in a pack;
#: its own limit of 1024 grows to a GiB. One pass over a pack needs about 25, a decoding step fewer.
CPU_KERNELS = 128

#: Warnings of torch and Megatron about each other that a user can do nothing about.
_NOISE = (
    "full scope is deprecated",
    "When using async grad allreduce it is recommended",
    ".*is deprecated. Please use `torch.distributed.",
    "Please use DTensor instead",
    "`load_state_dict` is deprecated and will be removed",
    "The .grad attribute of a Tensor that is not a leaf Tensor",
)

_at_shutdown: list[Callable[[], None]] = []
_timeout_s = DEFAULT_TIMEOUT_S


@dataclass(frozen=True)
class Platform:
    """``kind``: ``cpu`` or ``cuda``; ``backend``: of the default process group; ``device``: this rank's."""

    kind: str
    backend: str
    device: torch.device


@dataclass(frozen=True)
class RankEnvironment:
    """This process among its peers. ``master`` is ``(address, port)``; None for a process that is alone."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master: tuple[str, int] | None


def current() -> Platform:
    """The platform of this process (detection only); adapts Megatron where there is no CUDA."""
    cpu_compat.install()
    if torch.cuda.is_available():
        return Platform(
            "cuda",
            "cpu:gloo,cuda:nccl",
            torch.device("cuda", torch.cuda.current_device()),
        )
    return Platform("cpu", "gloo", torch.device("cpu"))


def synchronize() -> None:
    """Wait until the device has done all that this process gave it; nothing to wait for on a CPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class SideStream:
    """A device stream that begins behind what has been queued, and does not wait for what training queues later.

    ``with stream():`` around copies, as often as needed. Without a device there is nothing to do.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def __call__(self) -> AbstractContextManager[Any]:
        """What is queued inside goes to this stream."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()


def peak_device_memory_gib() -> float | None:
    """Most memory that tensors of this process took on its device at once, since the start, in GiB. None on a CPU."""
    return torch.cuda.max_memory_allocated() / 1024**3 if torch.cuda.is_available() else None


def rank_environment(environ: Mapping[str, str] = os.environ) -> RankEnvironment:
    """Read who this process is: from torchrun's variables, else Slurm's, else it is alone.

    Raises:
        ConfigError: the variables are incomplete or are not numbers.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        world = _number(environ, "WORLD_SIZE")
        return RankEnvironment(
            rank=_number(environ, "RANK"),
            world_size=world,
            local_rank=_number(environ, "LOCAL_RANK", default=0),
            local_world_size=_number(environ, "LOCAL_WORLD_SIZE", default=world),
            master=(_text(environ, "MASTER_ADDR"), _number(environ, "MASTER_PORT")),
        )
    # A batch script has SLURM_PROCID too; only a step started by srun has SLURM_STEP_NUM_TASKS.
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        world = _number(environ, "SLURM_STEP_NUM_TASKS")
        return RankEnvironment(
            rank=_number(environ, "SLURM_PROCID"),
            world_size=world,
            local_rank=_number(environ, "SLURM_LOCALID"),
            local_world_size=_number(environ, "SLURM_NTASKS_PER_NODE", default=1),
            master=(_slurm_master(environ), _slurm_port(environ)),
        )
    return RankEnvironment(rank=0, world_size=1, local_rank=0, local_world_size=1, master=None)


def _text(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise ConfigError(f"environment variable {name} is not set; start ranks with aligner, torchrun or srun")
    return value


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and name not in environ:
        return default
    value = _text(environ, name)
    if not value.isdigit():
        raise ConfigError(f"environment variable {name} is '{value}', but a number is needed")
    return int(value)


def _slurm_master(environ: Mapping[str, str]) -> str:
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    nodes = environ.get("SLURM_STEP_NODELIST") or _text(environ, "SLURM_JOB_NODELIST")
    try:
        hosts = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout.split()
        return hosts[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise ConfigError(f"cannot read the first host of '{nodes}' from scontrol ({error}); set MASTER_ADDR") from None


def _slurm_port(environ: Mapping[str, str]) -> int:
    """MASTER_PORT, else one that differs between jobs (and steps of a job) on the same host: 20000-59999."""
    if environ.get("MASTER_PORT"):
        return _number(environ, "MASTER_PORT")
    return 20000 + (_number(environ, "SLURM_JOB_ID") * 16 + _number(environ, "SLURM_STEP_ID", default=0) % 16) % 40000


def initialize(threads: int | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Platform:
    """Start this rank: threads, device and default process group. A collective of all ranks; a second call only
    returns the platform.

    Args:
        threads: CPU threads of this rank; None: ``OMP_NUM_THREADS`` where it is set, else cores / local ranks.
        timeout_s: seconds after which a collective that a peer does not join fails, in any group.
    """
    global _timeout_s
    environment = rank_environment()
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, (len(os.sched_getaffinity(0))) // environment.local_world_size)
    if threads is not None:
        torch.set_num_threads(threads)
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(CPU_KERNELS))
    if torch.cuda.is_available():
        torch.cuda.set_device(environment.local_rank % torch.cuda.device_count())
    platform = current()
    if dist.is_initialized():
        return platform
    _timeout_s = timeout_s
    timeout = collective_timeout()
    if environment.master is None:
        dist.init_process_group(
            platform.backend,
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            timeout=timeout,
        )
        return platform
    address, port = environment.master
    if address in ("localhost", "127.0.0.1", "::1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host name need not resolve
    os.environ.update(
        RANK=str(environment.rank),
        WORLD_SIZE=str(environment.world_size),
        LOCAL_RANK=str(environment.local_rank),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )
    dist.init_process_group(platform.backend, init_method="env://", timeout=timeout)
    return platform


def collective_timeout() -> timedelta:
    """What :func:`initialize` was given; torch's new groups do not take it from the default group."""
    return timedelta(seconds=_timeout_s)


def at_shutdown(callback: Callable[[], None]) -> None:
    """Run ``callback`` (once) when the process group ends; for values that hold groups."""
    if callback not in _at_shutdown:
        _at_shutdown.append(callback)


def shutdown() -> None:
    """End the process group and forget everything built on it. Not a collective: a failing rank may call it."""
    while _at_shutdown:
        _at_shutdown.pop()()
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """This process's global rank; 0 before :func:`initialize`."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks; 1 before :func:`initialize`."""
    return dist.get_world_size() if dist.is_initialized() else 1

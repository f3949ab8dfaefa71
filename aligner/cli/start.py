"""The start of one rank: agree on the run directory, lease it, find what to continue from, watch over the rank."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from aligner.checkpoint import manifest
from aligner.checkpoint.checkpointer import Checkpointer
from aligner.checkpoint.lease import LOST, Lease
from aligner.cli.launch import default_run_dir
from aligner.config.run_file import CONFIG_FILE, check_run_owner, command_of, write_run_config
from aligner.config.schema import TrainerConfig
from aligner.config.sources import MODEL_DIRECTORY
from aligner.distributed import faults, platform
from aligner.distributed.collectives import broadcast_object, on_all_ranks
from aligner.distributed.context import RunContext
from aligner.distributed.deadline import parse_duration, slurm_end_time
from aligner.distributed.stop import StopSignals
from aligner.distributed.watchdog import Watchdog
from aligner.errors import ConfigError
from aligner.monitoring import lives
from aligner.monitoring.logger import METRICS_FILE, TENSORBOARD_DIR
from aligner.phases.sources import SOURCES_FILE
from aligner.rollout.buffer import kept_samples

_AFTER_WATCHDOG_S = 300.0  # collectives time out after the watchdog, which says more


def start_rank(root: Any, signals: StopSignals | None = None) -> RunContext:
    """Initialise this rank, lease ``run.dir`` (rank 0 decides which), find the checkpoint to continue from. Collective.

    What an earlier life has left for its end is removed: tracebacks, stacks, a request to be started again.

    Raises:
        ConfigError: the run directory cannot be written or belongs to another command.
        RunInUseError: another process uses it.
    """
    began = time.time()
    trains = isinstance(root.trainer, TrainerConfig)
    supervised = root.trainer if trains else TrainerConfig()
    longest = max(supervised.hang_timeout, *supervised.phase_timeouts.values(), 0.0)
    found = platform.initialize(threads=root.trainer.threads, timeout_s=longest + _AFTER_WATCHDOG_S)
    signals = signals or StopSignals()
    run_dir = Path(broadcast_object(root.run.dir or default_run_dir(command_of(root))))
    lease = on_all_ranks(lambda: _take(run_dir, root, signals) if platform.rank() == 0 else None)
    watchdog = Watchdog()
    context = RunContext(
        run_dir,
        platform.rank(),
        platform.world_size(),
        found,
        deadline=on_all_ranks(lambda: _deadline(root.trainer, began) if trains and platform.rank() == 0 else None),
        stop=signals,
        watchdog=watchdog,
        holds_run=lease.holds if lease is not None else lambda: True,
    )
    if lease is not None:
        context.held.callback(lease.release)
    on_all_ranks(lambda: faults.configure(run_dir, context.rank))
    watchdog.start(
        run_dir,
        context.rank,
        supervised.hang_timeout,
        supervised.phase_timeouts,
        world_size=context.world_size,
    )
    context.held.callback(watchdog.stop)
    watchdog.enter("startup")
    faults.hit("startup")
    if not trains:
        return context
    with watchdog.idle():  # checksums of all files: minutes for a large model
        resume_from = Checkpointer(run_dir).newest()
    return _begin_life(context, resume_from)


def _begin_life(context: RunContext, resume_from: Path | None) -> RunContext:
    if context.rank == 0:
        step = step_of(resume_from)
        lives.begin_life(context.run_dir, start_step=step, start_samples=kept_samples(context.run_dir, step + 1))
    return replace(context, resume_from=resume_from)


def step_of(checkpoint: Path | None) -> int:
    """Finished steps of a run that continues from ``checkpoint``."""
    return manifest.read(checkpoint).step if checkpoint is not None else 0


def _take(run_dir: Path, root: Any, signals: StopSignals) -> Lease:
    """Make ``run_dir`` this process's: check its owner, lease it, clear what earlier lives left. Rank 0."""
    try:
        exists = check_run_owner(run_dir, command_of(root))
        run_dir.mkdir(parents=True, exist_ok=True)
        lease = Lease.acquire(
            run_dir, on_lost=lambda: signals.request(LOST, restart=False), give_up=lambda: signals.asked
        )
        lives.clear_endings(run_dir)
        if not exists or not hasattr(root, "checkpoint"):  # of a continued run: when the changes are accepted
            write_run_config(run_dir, root)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"run.dir={run_dir}: cannot be written ({reason}); choose another directory") from None
    return lease


def _deadline(trainer: TrainerConfig, began: float) -> float | None:
    """When this life must have ended: ``trainer.max_time`` after its start, or Slurm's limit of the job."""
    ends = [slurm_end_time(os.environ)]
    if trainer.max_time is not None:
        ends.append(began + parse_duration(trainer.max_time))
    return min((end for end in ends if end is not None), default=None)


def tidy_up(run_dir: Path | None) -> None:
    """Remove a run directory that this process made and in which nothing was trained, sampled or kept."""
    if run_dir is None or not (run_dir / CONFIG_FILE).is_file():
        return
    metrics = run_dir / METRICS_FILE
    own = {CONFIG_FILE, SOURCES_FILE, MODEL_DIRECTORY, *lives.FILES, "lease.json"}
    errors = run_dir / lives.ERRORS_DIRECTORY
    if not any(errors.glob("[!.]*")):  # watchdogs of other ranks still have their hidden files there
        own.add(errors.name)
    kept = {path.name for path in run_dir.iterdir()} - own
    if not kept or (kept <= {METRICS_FILE, TENSORBOARD_DIR} and not metrics.stat().st_size):
        shutil.rmtree(run_dir, ignore_errors=True)

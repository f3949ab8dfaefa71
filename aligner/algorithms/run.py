"""The step counter and the cadence that every method shares: resume, log, validate, save, finish.

A method owns its loop and asks this object what is due; there is no base class. A finished step is logged on rank 0,
then saved when a save is due, so a checkpoint never lacks the metrics of its own step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from aligner.checkpoint.checkpointer import Checkpointer
from aligner.checkpoint.stateful import Stateful
from aligner.config.schema import TrainerConfig
from aligner.data.packing import Pack
from aligner.distributed.collectives import agree, all_gather_objects
from aligner.distributed.context import RunContext
from aligner.errors import ConfigError, TrainingError
from aligner.models.role_model import RoleModel
from aligner.monitoring.logger import MetricsLogger
from aligner.monitoring.metrics import PEAK_MEMORY, ROLLOUT_TOKENS_PER_SECOND, TOKENS_PER_SECOND, timer_metrics
from aligner.monitoring.progress import StepProgress
from aligner.monitoring.timers import PhaseTimers, peak_memory_gib, slowest


class Counters:
    """What a run has consumed so far; saved with every checkpoint."""

    def __init__(self) -> None:
        self.samples = 0
        self.tokens = 0

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples, "tokens": self.tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.samples, self.tokens = int(state["samples"]), int(state["tokens"])


class TrainingRun:
    """One life of a run: restores the newest checkpoint, counts steps, logs and saves.

    ``models`` and ``stateful`` are what a checkpoint consists of, by name. Use as a context manager.
    """

    def __init__(
        self,
        title: str,
        context: RunContext,
        trainer: TrainerConfig,
        models: Mapping[str, RoleModel],
        stateful: Mapping[str, Stateful],
        shown: Sequence[str] = (),
    ):
        self.context = context
        self.trainer = trainer
        self.models = dict(models)
        self.counters = Counters()
        self.stateful = {"counters": self.counters, **stateful}
        self.checkpointer = Checkpointer(context.run_dir)
        self.step = self._restore()
        self.progress = StepProgress(title, trainer.max_steps, rank=context.rank, initial=self.step, shown=shown)
        self.timers = PhaseTimers(on_enter=self.progress.phase)
        self.logger = self._open_logger()
        self._step_started = time.perf_counter()

    def __enter__(self) -> TrainingRun:
        self.progress.__enter__()
        if self.step:
            self.progress.message(f"continues {self.context.run_dir} after step {self.step}")
        if self.step == self.trainer.max_steps:
            self.progress.message(f"already finished: trainer.max_steps={self.trainer.max_steps}; nothing to do")
        return self

    def __exit__(self, *exc: object) -> None:
        self.progress.__exit__(*exc)
        self.logger.close()

    def _restore(self) -> int:
        newest = self.checkpointer.newest()
        if newest is None:
            return 0
        step = self.checkpointer.load(newest, self.models, self.stateful)
        if step > self.trainer.max_steps:
            raise ConfigError(
                f"trainer.max_steps={self.trainer.max_steps}, but {newest} is already at step {step}; "
                f"give trainer.max_steps={step} or more, or another run.dir"
            )
        return step

    def _open_logger(self) -> MetricsLogger:
        error: Exception | None = None
        logger = None
        try:
            logger = MetricsLogger(self.context.run_dir, self.context.rank, resumed_step=self.step or None)
        except Exception as found:
            error = found
        agree(error)
        assert logger is not None
        return logger

    def steps(self) -> Iterator[int]:
        """The steps still to do, counted from 1. The caller finishes each with :meth:`finish_step`."""
        while self.step < self.trainer.max_steps:
            self._step_started = time.perf_counter()
            yield self.step + 1

    def validation_due(self, step: int) -> bool:
        """At every ``trainer.val_check_interval`` steps and at the last one."""
        return _due(step, self.trainer.val_check_interval, self.trainer.max_steps)

    def save_due(self, step: int) -> bool:
        """At every ``trainer.save_interval`` steps and at the last one."""
        return _due(step, self.trainer.save_interval, self.trainer.max_steps)

    def finish_step(self, step: int, metrics: Mapping[str, float], *, samples: int, tokens: int) -> None:
        """Log ``step``, count ``samples`` and ``tokens``, save when due. Collective."""
        self.step = step
        self.counters.samples += samples
        self.counters.tokens += tokens
        if self.save_due(step):
            with self.timers("checkpoint"):
                self.checkpointer.save(step, self.models, self.stateful)
        timing = {**self.timers.take(), "step": time.perf_counter() - self._step_started}
        gathered = all_gather_objects((timing, peak_memory_gib()))
        seconds = slowest([part for part, _ in gathered])
        row = {
            **metrics,
            TOKENS_PER_SECOND: tokens / seconds["step"],
            **timer_metrics(seconds),
            PEAK_MEMORY: max(peak for _, peak in gathered),
        }
        if "rollout" in seconds:
            row[ROLLOUT_TOKENS_PER_SECOND] = tokens / seconds["rollout"]
        self.logger.log(step, row)
        self.progress.advance(row)

    @contextmanager
    def dump_on_failure(self, step: int, save: Callable[[Path], None]) -> Iterator[None]:
        """When training must stop inside the block, every rank keeps its data of the step and the error says where.

        ``save`` writes the step's batch into the directory it is given.
        """
        try:
            yield
        except TrainingError as error:
            directory = self.context.run_dir / "errors" / f"step_{step:08d}"
            save(directory / f"rank_{self.context.rank}")
            raise TrainingError(f"step {step}: {error}; the step's data is kept in {directory}") from error


def _due(step: int, interval: int, last: int) -> bool:
    return step == last or (interval > 0 and step % interval == 0)


def save_packs(packs: Sequence[Pack], directory: Path) -> None:
    """Write micro-batches as ``micro_batches.safetensors``, for :meth:`TrainingRun.dump_on_failure`."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{i}.{name}": tensor
        for i, pack in enumerate(packs)
        for name, tensor in (("tokens", pack.tokens_T), ("cu_seqlens", pack.cu_seqlens))
    }
    save_file(tensors, directory / "micro_batches.safetensors")

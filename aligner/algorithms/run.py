"""The step counter and the cadence that every method shares: resume, log, validate, save, finish.

A method owns its loop and asks this object what is due; there is no base class. A finished step is logged on rank 0,
then saved when a save is due, so a checkpoint never lacks the metrics of its own step. The seconds of a save therefore
stand in the next step's row.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from aligner.checkpoint.checkpointer import Checkpointer
from aligner.checkpoint.stateful import Stateful
from aligner.config.schema import TrainerConfig
from aligner.data.packing import Pack
from aligner.distributed import platform
from aligner.distributed.collectives import all_gather_objects, all_reduce_sums, on_all_ranks
from aligner.distributed.context import RunContext
from aligner.distributed.topology import Topology
from aligner.errors import ConfigError, TrainingError
from aligner.models.role_model import RoleModel
from aligner.monitoring import metrics as names
from aligner.monitoring.logger import METRICS_FILE, MetricsLogger
from aligner.monitoring.progress import StepProgress
from aligner.monitoring.timers import PhaseTimers, peak_memory_gib, slowest
from aligner.monitoring.writing import write_on_first_rank, writing


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
        self.timers = PhaseTimers(on_enter=self.progress.phase, synchronize=platform.synchronize)
        self.logger = self._open_logger()
        self._row_started = time.perf_counter()

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
        def open_files() -> MetricsLogger:
            with writing(self.context.run_dir / METRICS_FILE):
                return MetricsLogger(self.context.run_dir, self.context.rank, resumed_step=self.step or None)

        return on_all_ranks(open_files)

    def steps(self) -> Iterator[int]:
        """The steps still to do, counted from 1. The caller finishes each with :meth:`finish_step`."""
        self._row_started = time.perf_counter()
        while self.step < self.trainer.max_steps:
            yield self.step + 1

    def validation_due(self, step: int) -> bool:
        """At every ``trainer.val_check_interval`` steps and at the last one."""
        return _due(step, self.trainer.val_check_interval, self.trainer.max_steps)

    def save_due(self, step: int) -> bool:
        """At every ``trainer.save_interval`` steps and at the last one."""
        return _due(step, self.trainer.save_interval, self.trainer.max_steps)

    def finish_step(
        self, step: int, metrics: Mapping[str, float], *, samples: int, tokens: int, tokens_in: str = "step"
    ) -> None:
        """Count ``samples`` and ``tokens`` of ``step``, log it, then save when due. Collective.

        ``tokens`` over the seconds of phase ``tokens_in`` is the throughput; ``step``: of the whole step.
        """
        self.step = step
        self.counters.samples += samples
        self.counters.tokens += tokens
        row = {**metrics, names.CONSUMED_SAMPLES: self.counters.samples, **self._speed_and_memory(tokens, tokens_in)}
        path = self.context.run_dir / METRICS_FILE
        write_on_first_rank(path, lambda: self.logger.log(step, row))
        self.progress.advance(row)
        if self.save_due(step):
            self._save(step)

    def _save(self, step: int) -> None:
        with self.timers("checkpoint"):
            saved = self.checkpointer.save(step, self.models, self.stateful)
        if step == self.trainer.max_steps:  # no row follows
            self.progress.message(f"saved {saved} in {self.timers.take()['checkpoint']:.1f} s")

    def _speed_and_memory(self, tokens: int, tokens_in: str) -> dict[str, float]:
        """The slowest rank's seconds since the last row, throughput, and the largest rank's memory. Collective."""
        phases = self.timers.take()
        now = time.perf_counter()
        timing = {**phases, "step": now - self._row_started}
        self._row_started = now
        gathered = all_gather_objects((timing, peak_memory_gib(), platform.peak_device_memory_gib()))
        seconds = slowest([part for part, _, _ in gathered])
        row = {
            names.TOKENS_PER_SECOND: tokens / seconds[tokens_in],
            **names.timer_metrics(seconds),
            names.PEAK_MEMORY: max(peak for _, peak, _ in gathered),
        }
        if "rollout" in seconds:
            row[names.ROLLOUT_TOKENS_PER_SECOND] = tokens / seconds["rollout"]
        on_device = [peak for _, _, peak in gathered if peak is not None]
        if on_device:
            row[names.DEVICE_PEAK_MEMORY] = max(on_device)
        return row

    @contextmanager
    def dump_on_failure(self, step: int, save: Callable[[Path], None]) -> Iterator[None]:
        """When training must stop inside the block, every rank keeps its data of the step and the error says where.

        ``save`` writes the step's batch into the directory it is given.
        """
        try:
            yield
        except TrainingError as error:
            directory = self.context.run_dir / "errors" / f"step_{step:08d}"
            kept = f"the step's data is kept in {directory}"
            try:
                save(directory / f"rank_{self.context.rank}")
            except OSError as full:
                kept = f"the step's data could not be kept in {directory} ({full.strerror or full})"
            raise TrainingError(f"step {step}: {error}; {kept}") from error


def _due(step: int, interval: int, last: int) -> bool:
    return step == last or (interval > 0 and step % interval == 0)


def count_tokens(packs: Sequence[Pack], topology: Topology) -> int:
    """Real tokens of the packs of all data-parallel ranks, padding excluded. Collective."""
    mine = float(sum(pack.num_tokens for pack in packs))
    return int(all_reduce_sums({"tokens": mine}, topology.pg.dp)["tokens"])


def save_packs(
    directory: Path,
    packs: Sequence[Pack],
    sources: Sequence[str],
    loss_masks: Sequence[torch.Tensor] | None = None,
) -> None:
    """Keep this rank's micro-batches, so that their loss can be computed again.

    ``micro_batches.safetensors`` holds ``<i>.tokens``, ``<i>.cu_seqlens`` (the last segment may be padding) and, where
    tokens are what is counted, ``<i>.loss_mask`` of micro-batch i. ``sources.json`` lists for each micro-batch the
    ``file:line`` of each real segment, in order; ``sources`` has them by row of the packs.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for i, pack in enumerate(packs):
        tensors[f"{i}.tokens"], tensors[f"{i}.cu_seqlens"] = pack.tokens_T, pack.cu_seqlens
        if loss_masks is not None:
            tensors[f"{i}.loss_mask"] = loss_masks[i]
    save_file(tensors, directory / "micro_batches.safetensors")
    places = [[sources[row] for row in pack.rows] for pack in packs]
    (directory / "sources.json").write_text(json.dumps(places, indent=1) + "\n", encoding="utf-8")

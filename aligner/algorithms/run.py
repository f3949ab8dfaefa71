"""The step counter and the cadence that every method shares: resume, log, validate, save, stop, finish.

A method owns its loop and tells this object when a step is done; there is no base class. Invariants:

- A finished step is logged on rank 0, then saved when a save is due, so a checkpoint never lacks the metrics of its own
  step. The seconds of a save therefore stand in the next step's row.
- A stop is agreed by all ranks, at the end of a step or where :meth:`TrainingRun.poll` is called, which is never
  between the first optimizer step of an iteration and its end. What is saved is the state after the last finished step.
- At a stop the save comes before a validation that is due; the next life makes up for it before it goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aligner.algorithms.lives import ask_for_restart
from aligner.algorithms.resume import accept_resume, renew_random_states, schedule_remarks
from aligner.algorithms.saving import Keep, RunSaver
from aligner.checkpoint.lease import LOST
from aligner.checkpoint.stateful import Stateful
from aligner.distributed import faults, platform
from aligner.distributed.collectives import all_gather_objects, on_all_ranks
from aligner.distributed.context import RunContext
from aligner.distributed.deadline import Deadline
from aligner.distributed.stop import Stopped, StopRequest
from aligner.errors import RunInUseError, TrainingError
from aligner.models.role_model import RoleModel
from aligner.monitoring import metrics as names
from aligner.monitoring.logger import METRICS_FILE, MetricsLogger
from aligner.monitoring.progress import StepProgress
from aligner.monitoring.timers import PhaseTimers, peak_memory_gib, slowest
from aligner.monitoring.writing import write_on_first_rank, writing

Validation = Callable[[int], dict[str, float]]  # of the policy after a step; calls TrainingRun.poll between its batches


class Counters:
    """What a run has consumed so far, and the step whose validation is still due; saved with every checkpoint."""

    def __init__(self) -> None:
        self.samples = 0
        self.tokens = 0
        self.unvalidated: dict[str, float] | None = None  # metrics of a finished step that has no row yet

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples, "tokens": self.tokens, "unvalidated": self.unvalidated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.samples, self.tokens = int(state["samples"]), int(state["tokens"])
        self.unvalidated = state["unvalidated"]


class TrainingRun:
    """One life of a run: restores the checkpoint it continues from, counts steps, logs and saves.

    Use as a context manager. Collective, as are all its methods.

    Args:
        root: the configuration of the command; ``trainer``, ``checkpoint`` and ``run`` are used.
        models, stateful: what a checkpoint consists of, by name.
        identity: what the run is (``phases/identity.py``): checked against the checkpoint, and saved with the next.
        validate: gives the metrics of a validation after a step.
        validates_saves: a step that is saved is validated, whatever ``trainer.val_check_interval``.
        shown: metrics worth a place in the progress line.
    """

    def __init__(
        self,
        title: str,
        root: Any,
        context: RunContext,
        models: Mapping[str, RoleModel],
        stateful: Mapping[str, Stateful],
        *,
        identity: Mapping[str, Any] | None = None,
        validate: Validation | None = None,
        validates_saves: bool = False,
        shown: Sequence[str] = (),
    ):
        self.context = context
        self.trainer = root.trainer
        self.counters = Counters()
        self.validate = validate
        self._validates_saves = validates_saves
        self._stateful = {"counters": self.counters, **stateful}
        self._saver = RunSaver(context, root.checkpoint, models, self._stateful, identity or {}, self._message)
        remarks = accept_resume(context, root, identity or {})
        self.step = self._saver.restore()
        renew_random_states(context, root, models)
        self._saver.settle()
        self._deadline = Deadline(context.deadline)
        self.progress = StepProgress(title, root.trainer.max_steps, rank=context.rank, initial=self.step, shown=shown)
        self.timers = PhaseTimers(on_enter=self._enter_phase, synchronize=platform.synchronize)
        had_rows = _has_rows(context.run_dir / METRICS_FILE)
        self.logger = self._open_logger()
        self._row_started = time.perf_counter()
        self._messages = [*remarks, *schedule_remarks(root, models, self.step)]
        if context.resume_from is None and had_rows:
            self._messages.append(f"{context.run_dir} has no checkpoint: its steps were never saved, so it starts anew")

    # ------------------------------------------------------------------ begin and end

    def __enter__(self) -> TrainingRun:
        self.progress.__enter__()
        for message in self._messages:
            self.progress.message(message)
        if self.step:
            self.progress.message(f"continues {self.context.run_dir} after step {self.step}")
        if self.finished:
            self.progress.message(f"already finished: trainer.max_steps={self.trainer.max_steps}; nothing to do")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, Stopped):
                self._end_stopped(error)
            elif isinstance(error, TrainingError):  # all ranks have it: what is being saved can be completed
                self._saver.complete()
        finally:
            self.progress.__exit__(None, None, None)
            self.logger.close()

    def keep_unfinished(self, keep: Keep) -> None:
        """``keep`` is called at a stop with the newest checkpoint, to save what is done of the step after it."""
        self._saver.keep_unfinished = keep

    @property
    def finished(self) -> bool:
        """Whether there is no step left to do."""
        return self.step >= self.trainer.max_steps and self.counters.unvalidated is None

    def _end_stopped(self, stopped: Stopped) -> None:
        """Save the state after the last finished step and say how to go on.

        Raises:
            RunInUseError: the run directory is another process's by now, so nothing is saved.
        """
        if stopped.request.reason == LOST:
            raise RunInUseError(f"{self.context.run_dir}: {LOST} after step {self.step}, so this one saves nothing")
        with self.timers("checkpoint"):
            saved = self._saver.save_for_stop(self.step)
        restart = ask_for_restart(self.context, stopped.request, self.step)
        stopped.request = StopRequest(stopped.request.reason, restart)
        stopped.step = self.step
        again = "asks to be started again" if restart else "start the same command with the same run.dir to continue"
        stopped.message = f"stopped by {stopped.request.reason} after step {self.step}; {saved}; {again}"

    def _open_logger(self) -> MetricsLogger:
        logged = self.step - 1 if self.counters.unvalidated is not None else self.step

        def open_files() -> MetricsLogger:
            with writing(self.context.run_dir / METRICS_FILE):
                return MetricsLogger(self.context.run_dir, self.context.rank, resumed_step=logged or None)

        return on_all_ranks(open_files)

    def _message(self, text: str) -> None:
        if hasattr(self, "progress"):
            self.progress.message(text)
        elif self.context.rank == 0:
            print(text, flush=True)

    def _enter_phase(self, phase: str) -> None:
        self.progress.phase(phase)
        self.context.watchdog.enter(phase)
        faults.hit(phase)

    # ------------------------------------------------------------------ steps

    def steps(self) -> Iterator[int]:
        """The steps still to do, counted from 1. The caller finishes each with :meth:`finish_step`."""
        if self.trainer.save_interval and self.step < self.trainer.max_steps:
            self._saver.prepare()
        self._row_started = time.perf_counter()
        if self.counters.unvalidated is not None:
            self._finish_row(self.step, self.counters.unvalidated)
        while self.step < self.trainer.max_steps:
            faults.set_step(self.step + 1)
            self._ask_before_deadline(between_steps=True)
            self.poll()
            yield self.step + 1

    def poll(self) -> None:
        """Raise :class:`Stopped` on all ranks when one of them was asked to stop; publish what was saved meanwhile.

        Collective. Call it only where the state after the last finished step can still be saved: before the first
        optimizer step of an iteration.
        """
        self.context.watchdog.beat()
        self._saver.poll()
        self._ask_before_deadline(between_steps=False)
        self.context.stop.check()

    def _ask_before_deadline(self, *, between_steps: bool) -> None:
        if self.context.rank == 0 and self._deadline.is_near(between_steps=between_steps):
            self.context.stop.request("deadline", restart=True)

    def validation_due(self, step: int) -> bool:
        """At every ``trainer.val_check_interval`` steps and at the last one."""
        return _due(step, self.trainer.val_check_interval, self.trainer.max_steps)

    def save_due(self, step: int) -> bool:
        """At every ``trainer.save_interval`` steps and at the last one."""
        return _due(step, self.trainer.save_interval, self.trainer.max_steps)

    def finish_step(
        self, step: int, metrics: Mapping[str, float], *, samples: int, tokens: int, tokens_in: str = "step"
    ) -> None:
        """Count ``samples`` and ``tokens`` of ``step``; validate, log and save it when that is due.

        ``tokens`` over the seconds of phase ``tokens_in`` is the throughput; ``step``: of the whole step.
        """
        self.step = step
        self.counters.samples += samples
        self.counters.tokens += tokens
        seconds = self.timers.peek()
        self._deadline.note_step(time.perf_counter() - self._row_started - seconds.get("checkpoint", 0.0))
        row = {**metrics, names.CONSUMED_SAMPLES: self.counters.samples, **self._saver.metrics()}
        self._finish_row(step, row, tokens, tokens_in)

    def _finish_row(self, step: int, row: Mapping[str, float], tokens: int = 0, tokens_in: str = "step") -> None:
        """Validate, log, save. A stop before the end leaves the row in the state that is saved."""
        validates = self.validate is not None and (
            self.validation_due(step) or (self._validates_saves and self.save_due(step))
        )
        row = dict(row)
        if validates and self.validate is not None:
            self.counters.unvalidated = row
            self._saver.settle()
            self._ask_before_deadline(between_steps=True)
            self.poll()
            with self.timers("validation"):
                row |= self.validate(step)
            self.counters.unvalidated = None
        row |= self._speed_and_memory(tokens, tokens_in)
        write_on_first_rank(self.context.run_dir / METRICS_FILE, lambda: self.logger.log(step, row))
        self.progress.advance(row)
        self._saver.settle()
        if self.save_due(step):
            with self.timers("checkpoint"):
                self._saver.save(step, row, is_last=step == self.trainer.max_steps)
            self._deadline.note_save(self._saver.longest_save_s)

    def _speed_and_memory(self, tokens: int, tokens_in: str) -> dict[str, float]:
        """The slowest rank's seconds since the last row, throughput, and the largest rank's memory. Collective."""
        phases = self.timers.take()
        now = time.perf_counter()
        timing = {**phases, "step": now - self._row_started}
        self._row_started = now
        gathered = all_gather_objects((timing, peak_memory_gib(), platform.peak_device_memory_gib()))
        seconds = slowest([part for part, _, _ in gathered])
        row = {
            **names.timer_metrics(seconds),
            **self._saver.stall(seconds),
            names.PEAK_MEMORY: max(peak for _, peak, _ in gathered),
        }
        if tokens and tokens_in in seconds:
            row[names.TOKENS_PER_SECOND] = tokens / seconds[tokens_in]
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


def _has_rows(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _due(step: int, interval: int, last: int) -> bool:
    return step == last or (interval > 0 and step % interval == 0)

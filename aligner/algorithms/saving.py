"""When and what a training run saves; what it says and logs about it.

Invariant: what is saved is the state after the last finished step, also when a stop interrupts the next one: components
are snapshot by :meth:`RunSaver.settle`, and models do not change before the first optimizer step of an iteration.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aligner.checkpoint.checkpointer import Checkpointer, SaveReport
from aligner.checkpoint.retention import Retention
from aligner.checkpoint.stateful import Stateful
from aligner.config.schema import CheckpointConfig
from aligner.distributed.context import RunContext
from aligner.distributed.random_state import rng_state
from aligner.errors import CheckpointError
from aligner.models.role_model import RoleModel
from aligner.monitoring import metrics as names

Keep = Callable[[Path], str]  # keeps what is done of an interrupted step beside a checkpoint; says what
_REMEMBERED_STEPS = 8


class RunSaver:
    """The checkpoints of one life. All methods but :meth:`metrics` are collective."""

    def __init__(
        self,
        context: RunContext,
        config: CheckpointConfig,
        models: Mapping[str, RoleModel],
        stateful: Mapping[str, Stateful],
        identity: Mapping[str, Any],
        say: Callable[[str], None],
    ):
        retention = Retention(config.keep_last, config.keep_every, config.best_metric, config.best_mode)
        self.checkpointer = Checkpointer(
            context.run_dir, retention=retention, async_save=config.async_save, may_publish=context.holds_run
        )
        self.keep_unfinished: Keep | None = None
        self.longest_save_s = 0.0
        self._resume_from = context.resume_from
        self._models, self._stateful, self._identity = dict(models), dict(stateful), identity
        self._say = say
        self._newest: tuple[int, Path] | None = None  # the newest published step of this run
        self._state: dict[str, Any] = {}
        self._rng: dict[str, Any] = {}
        self._row: dict[str, float] = {}  # metrics of saves that no row has yet
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED_STEPS)  # of steps that no save disturbed
        self._disturbed = False

    def restore(self) -> int:
        """Continue from the checkpoint of the context; returns its step, 0 for a new run. :meth:`settle` is next."""
        step = 0
        if self._resume_from is not None:
            step = self.checkpointer.load(self._resume_from, self._models, self._stateful)
            self._newest = (step, self._resume_from)
        return step

    def prepare(self) -> None:
        """Do before training what the first save in the background would wait for."""
        self.checkpointer.prepare(self._models)

    def settle(self) -> None:
        """Take the state of every component and of the random generators: this is what the next save writes."""
        self._state = {name: component.state_dict() for name, component in self._stateful.items()}
        self._rng = rng_state()

    def save(self, step: int, row: Mapping[str, float], *, is_last: bool) -> None:
        """Save the settled state after ``step``; in the background where that is configured and training goes on.

        Raises:
            CheckpointError: the run's last checkpoint cannot be written. Any other is only said, and training goes on.
        """
        self._disturbed = True
        report = self._save(step, row, wait=is_last)
        if is_last and report is not None and report.error:
            raise CheckpointError(f"the last checkpoint cannot be written: {report.error}; {self._remedy()}")
        self._tell(report)
        if is_last and report is not None:
            self._say(f"saved {report.path} in {report.write_s:.1f} s")

    def save_for_stop(self, step: int) -> str:
        """Save the settled state unless that step is saved already; then what is done of the next. Says what was."""
        self.complete()
        if step == 0 and self.keep_unfinished is None:
            return "nothing to save yet"
        if self._newest is None or self._newest[0] != step or self._state["counters"]["unvalidated"] is not None:
            report = self._save(step, {}, wait=True)
            if report is not None and report.error:
                raise CheckpointError(f"step {step} cannot be saved before stopping: {report.error}; {self._remedy()}")
            self._tell(report)
        assert self._newest is not None
        said = f"saved {self._newest[1]}"
        kept = self.keep_unfinished(self._newest[1]) if self.keep_unfinished is not None else ""
        return f"{said} and {kept}" if kept else said

    def poll(self) -> None:
        """Publish the save in flight when it is written; never waits."""
        if self.checkpointer.in_flight:
            self._tell(self.checkpointer.poll())

    def complete(self) -> None:
        """Wait for the save in flight."""
        if self.checkpointer.in_flight:
            self._tell(self.checkpointer.finish())

    def metrics(self) -> dict[str, float]:
        """What the row of this step says about saves since the row before."""
        row, self._row = self._row, {}
        return row

    def stall(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """How much longer a step took because of a save, from its timers: what blocked, and what went slower."""
        blocked = seconds.get("checkpoint", 0.0)
        alone = seconds["step"] - blocked - seconds.get("validation", 0.0)
        disturbed, self._disturbed = self._disturbed, self.checkpointer.in_flight
        if not disturbed:
            self._seconds.append(alone)
            return {}
        slower = max(0.0, alone - statistics.median(self._seconds)) if self._seconds else 0.0
        return {names.CHECKPOINT_STALL: blocked + slower}

    def _save(self, step: int, row: Mapping[str, float], *, wait: bool) -> SaveReport | None:
        self.complete()
        return self.checkpointer.save(
            step, self._models, self._state, identity=self._identity, rng=self._rng, metrics=row, wait=wait
        )

    def _tell(self, report: SaveReport | None) -> None:
        if report is None:
            return
        if report.error:
            self._say(f"step {report.step} could not be saved: {report.error}; training goes on, {self._remedy()}")
            self._row[names.CHECKPOINT_FAILED] = 1.0
            return
        self._newest = (report.step, report.path)
        self.longest_save_s = max(self.longest_save_s, report.stall_s + report.write_s)
        self._row[names.CHECKPOINT_WRITE] = report.write_s

    def _remedy(self) -> str:
        there = f"the checkpoint to continue from is {self._newest[1]}" if self._newest else "there is no earlier one"
        return f"{there}; make room on the disk"

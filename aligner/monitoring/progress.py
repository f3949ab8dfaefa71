"""What a user sees while a run goes on: a progress bar on a terminal, one line a step elsewhere.

Rank 0 alone shows anything.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class StepProgress:
    """Progress over ``total`` steps of one stage; use as a context manager.

    ``shown`` are the metric names (``metrics.py``) worth a place in the line; names that a step does not have are left
    out. ``initial`` steps are already done (a resumed run).
    """

    def __init__(
        self,
        title: str,
        total: int,
        *,
        rank: int = 0,
        initial: int = 0,
        shown: Sequence[str] = (),
        console: Console | None = None,
    ):
        self._title, self._total, self._done, self._shown = title, total, initial, tuple(shown)
        self._console = console or Console(highlight=False)
        self._visible = rank == 0
        self._live = self._visible and self._console.is_terminal
        self._started = time.perf_counter()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("[cyan]{task.fields[phase]}[/] {task.fields[numbers]}"),
            console=self._console,
            disable=not self._live,
        )
        self._task = self._bar.add_task(escape(title), total=total, completed=initial, phase="", numbers="")

    def __enter__(self) -> StepProgress:
        self._started = time.perf_counter()
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._bar.update(self._task, phase="")
        self._bar.stop()

    def phase(self, name: str) -> None:
        """Show what the step is doing now (terminal only); fits ``PhaseTimers(on_enter=progress.phase)``."""
        if self._live:
            self._bar.update(self._task, phase=escape(name))

    def advance(self, metrics: Mapping[str, float]) -> None:
        """One step is done; ``metrics`` are what was logged for it."""
        self._done += 1
        if not self._visible:
            return
        numbers = "  ".join(f"{short_name(n)} {format_number(metrics[n])}" for n in self._shown if n in metrics)
        if self._live:
            self._bar.update(self._task, advance=1, numbers=escape(numbers))
        else:
            seconds = time.perf_counter() - self._started
            self._print(f"{self._title} step {self._done}/{self._total}  {numbers}  [{seconds:.0f}s]")

    def message(self, text: str) -> None:
        """Print one line above the bar."""
        if self._visible:
            self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def short_name(name: str) -> str:
    """A metric's name without its group, but with ``val``: ``train/loss`` → ``loss``, ``val/loss`` → ``val_loss``."""
    group, _, rest = name.rpartition("/")
    return f"val_{rest}" if group.startswith("val") else rest


def format_number(value: float) -> str:
    """Four significant digits, without exponents where they are not needed."""
    return str(value) if isinstance(value, int) else f"{value:.4g}"

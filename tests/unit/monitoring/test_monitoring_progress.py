"""Progress: a bar on a terminal, one line a step elsewhere, nothing on other ranks."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from aligner.monitoring.progress import StepProgress, format_number, short_name


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    yield io.StringIO()


def run_two_steps(stream: io.StringIO, terminal: bool, rank: int = 0) -> str:
    console = Console(file=stream, force_terminal=terminal, width=140)
    shown = ("train_rollouts/rewards_mean", "val/loss")
    with StepProgress("ppo [x]", 5, rank=rank, initial=3, shown=shown, console=console) as progress:
        progress.message("kept [bold] as it is")
        for value in (0.5, 0.123456):
            progress.phase("rollout")
            progress.advance({"train_rollouts/rewards_mean": value, "hidden": 1.0})
    return stream.getvalue()


def test_plain_lines_when_not_on_a_terminal(stream: io.StringIO) -> None:
    lines = run_two_steps(stream, terminal=False).splitlines()
    assert lines[0] == "kept [bold] as it is"
    assert lines[1].startswith("ppo [x] step 4/5  rewards_mean 0.5  [")
    assert lines[2].startswith("ppo [x] step 5/5  rewards_mean 0.1235  [")
    assert len(lines) == 3 and "\x1b" not in "".join(lines)


def test_a_bar_on_a_terminal(stream: io.StringIO) -> None:
    output = run_two_steps(stream, terminal=True)
    assert "5/5" in output and "rewards_mean 0.1235" in output and "━" in output


@pytest.mark.parametrize("terminal", [False, True])
def test_other_ranks_are_silent(stream: io.StringIO, terminal: bool) -> None:
    assert run_two_steps(stream, terminal, rank=1) == ""


def test_names_and_numbers() -> None:
    assert short_name("train_optim/clip_fraction") == "clip_fraction"
    assert short_name("val/accuracy") == short_name("val_rollouts/accuracy") == "val_accuracy"
    assert [format_number(value) for value in (3, 0.00001234, 123456.0)] == ["3", "1.234e-05", "1.235e+05"]

"""The table of phases is that of the timers in the code; time-outs are for phases that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from aligner.config.checks import check
from aligner.config.compose import compose
from aligner.config.phases import PHASES
from aligner.errors import ConfigError

ALGORITHMS = Path(__file__).resolve().parents[3] / "aligner" / "algorithms"


def timed(file: str) -> set[str]:
    """Names of the timers in one file of ``algorithms/``."""
    calls = (node for node in ast.walk(ast.parse((ALGORITHMS / file).read_text())) if isinstance(node, ast.Call))
    return {
        call.args[0].value
        for call in calls
        if ast.unparse(call.func).rpartition(".")[2] == "timers" and isinstance(call.args[0], ast.Constant)
    }


@pytest.mark.parametrize("command", PHASES)
def test_phases_are_those_of_the_timers(command: str) -> None:
    around = timed("run.py") | {"startup"}
    files = [path.name for path in ALGORITHMS.glob(f"{command}*.py")]
    own = set().union(*(timed(file) for file in files))
    assert set(PHASES[command]) == own | around
    assert len(set(PHASES[command])) == len(PHASES[command])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trian=5", "trainer.phase_timeouts.trian has no effect: there is no such phase; nearest: train"),
        ("rollout=5", "trainer.phase_timeouts.rollout has no effect"),  # of another command
        ("train=0", "trainer.phase_timeouts.train=0.0: must be a number above 0"),
    ],
)
def test_a_time_out_without_effect_is_refused(override: str, message: str) -> None:
    root = compose("sft", ["model.path=m", "data.train=t.jsonl", f"trainer.phase_timeouts.{override}"])
    with pytest.raises(ConfigError, match=message):
        check(root, 1)

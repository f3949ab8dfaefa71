"""``aligner demo``: the whole pipeline on SmolLM2-135M-Instruct, from supervised fine-tuning to a report.

Every stage is an ordinary ``aligner`` command in a process of its own, shown before it runs, so that each can be
copied and changed; its settings are ``conf/recipe/demo_*.yaml``. The model is prepared once and reused.

What an earlier demo left in DIR is deleted first, and nothing else: DIR is known by its marker file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule

from aligner.cli.options import OptionParser
from aligner.errors import AlignerError, CheckpointError, ConfigError
from aligner.monitoring.logger import read_metrics
from aligner.monitoring.metrics import VAL_ACCURACY, VAL_MARGIN

SUMMARY_FILE = "summary.json"
MARKER_FILE = ".aligner-demo"  # in DIR: its stage outputs are a demo's and may be deleted by the next one
_STAGE_OUTPUTS = (
    "sft",
    "samples",
    "samples.jsonl",
    "pairs.jsonl",
    "pairs_heldout.jsonl",
    "rm",
    "ppo",
    "evaluation",
    SUMMARY_FILE,
    "report.html",
)
_SUMMARY_FIELDS = (
    "reward_mean",
    "rule_score_mean",
    "rule_score_interval",
    "eos_rate",
    "response_length_mean",
    "kl_to_sft",
    "win_rate_vs_sft",
    "win_rate_interval",
)


class StageFailed(AlignerError):
    """A stage ended with an error, which it has printed itself."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code. Raises AlignerError."""
    parser = OptionParser("demo", "SFT, reward model, PPO and evaluation of a 135M chat model, then a report.")
    parser.add_argument(
        "--dir", type=Path, default=Path("runs/demo"), help="where everything goes (default: runs/demo)"
    )
    parser.add_argument("--devices", type=int, default=1, help="local ranks; with 2 the models are data-parallel")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for every training stage (trainer.max_steps=4)")
    options = parser.parse_args(list(arguments))
    Demo(options.dir, options.devices, options.overrides).run()
    return 0


class Demo:
    """The stages of one demo and how long each took."""

    def __init__(self, directory: Path, devices: int, overrides: Sequence[str] = ()):
        self.directory = directory
        self.devices = devices
        self.overrides = list(overrides)
        self.console = Console(highlight=False)
        self.seconds: dict[str, float] = {}

    def run(self) -> None:
        """Run all stages and leave ``summary.json`` and ``report.html``. Raises :class:`StageFailed`; ConfigError when
        the directory holds what no demo wrote, CheckpointError when it cannot be written."""
        place = self.directory
        try:
            _claim(place)
        except OSError as error:
            raise CheckpointError(
                f"{place} cannot be written ({error.strerror or error}); choose another --dir"
            ) from error
        model = Path(os.environ.get("ALIGNER_MODELS", "models")) / "smollm2-135m-instruct"
        if not (model / "config.json").is_file():
            self.stage("convert", "convert", "smollm2_135m", str(model))
        try:
            for name in _STAGE_OUTPUTS:
                _remove(place / name)
        except OSError as error:
            raise CheckpointError(
                f"an earlier demo's files in {place} cannot be deleted ({error}); choose another --dir"
            ) from error
        self.seconds.clear()
        started = time.perf_counter()
        train, heldout = place / "pairs.jsonl", place / "pairs_heldout.jsonl"
        self.train("sft", "sft")
        self.train("samples", "generate", f"actor.init_from={place}/sft", f"output={place}/samples.jsonl")
        self.stage("pairs", "pairs", f"{place}/samples.jsonl", str(train), "--held-out", str(heldout))
        self.train("rm", "rm", f"reward.init_from={place}/sft", f"data.train={train}", f"data.validation={heldout}")
        self.train("ppo", "ppo", f"actor.init_from={place}/sft", f"reward.init_from={place}/rm")
        checkpoints = [f"evaluation.checkpoints.{name}={place}/{name}" for name in ("sft", "ppo")]
        self.train("evaluate", "evaluate", f"reward.init_from={place}/rm", *checkpoints)
        self.write_summary(time.perf_counter() - started)
        self.stage("report", "report", str(place))

    def train(self, name: str, command: str, *words: str) -> None:
        """A stage that takes Hydra overrides: its recipe, its places, the ranks, and the user's overrides."""
        run_dir = self.directory / {"evaluate": "evaluation"}.get(name, name)
        mine = self.overrides if command in ("sft", "rm", "ppo") else []
        self.stage(
            name,
            command,
            f"+recipe=demo_{name}",
            f"run.dir={run_dir}",
            f"trainer.devices={self.devices}",
            *words,
            *mine,
        )

    def stage(self, name: str, *words: str) -> None:
        """Run ``aligner WORDS``, shown first; its time counts as ``name``."""
        self.console.print(Rule(name))
        self.console.print("aligner " + " ".join(words), style="dim", markup=False, soft_wrap=True)
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "aligner", *words], check=False)
        self.seconds[name] = round(time.perf_counter() - started, 1)
        if done.returncode:
            failed = StageFailed(
                f"the demo's stage '{name}' ended with exit code {done.returncode}; see its error above"
            )
            failed.exit_code = done.returncode if done.returncode > 0 else 1
            raise failed

    def write_summary(self, wall_seconds: float) -> None:
        """Write ``summary.json`` from what the stages left."""
        results = json.loads((self.directory / "evaluation" / "results.json").read_text(encoding="utf-8"))
        summary: dict[str, Any] = {"wall_seconds": round(wall_seconds, 1), "seconds": dict(self.seconds)}
        for name in ("base", "sft", "ppo"):
            summary[name] = _chosen(results["rows"][name])
        last = read_metrics(self.directory / "rm" / "metrics.jsonl")[-1]
        summary["reward_model"] = {"accuracy": last[VAL_ACCURACY], "margin": last[VAL_MARGIN]}
        path = self.directory / SUMMARY_FILE
        path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        self.console.print(f"all stages took {wall_seconds / 60:.1f} minutes; summary: {path}", markup=False)


def _chosen(row: Mapping[str, Any]) -> dict[str, Any]:
    return {field: row[field] for field in _SUMMARY_FIELDS}


def _claim(directory: Path) -> None:
    """Mark ``directory`` as a demo's. ConfigError when it has files of a stage's name and no mark."""
    marker = directory / MARKER_FILE
    if not marker.is_file():
        found = [name for name in _STAGE_OUTPUTS if os.path.lexists(directory / name)]
        if found:
            raise ConfigError(
                f"{directory} holds files that no demo wrote ({', '.join(found)}), and a demo replaces files of these "
                "names; choose another --dir"
            )
    directory.mkdir(parents=True, exist_ok=True)
    marker.write_text("Written by `aligner demo`: the next demo in this directory replaces the outputs of this one.\n")


def _remove(path: Path) -> None:
    """Delete what an earlier demo left at ``path``."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()

"""Reading a run directory for the report.

A run directory holds ``metrics.jsonl``, ``config.yaml`` and ``samples/*.jsonl`` (training), or ``results.json``,
``samples.jsonl`` and ``config.yaml`` (evaluation). A directory of several stages holds run directories and,
optionally, ``summary.json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aligner.errors import CheckpointError
from aligner.monitoring.logger import METRICS_FILE, read_metrics
from aligner.monitoring.numbers import decode_tree
from aligner.monitoring.samples import SAMPLES_DIR, read_samples

CONFIG_FILE = "config.yaml"
RESULTS_FILE = "results.json"
SAMPLES_FILE = "samples.jsonl"
SUMMARY_FILE = "summary.json"
_STAGE_ORDER = ("sft", "pairs", "rm", "ppo", "evaluation")


@dataclass(frozen=True)
class RunRecord:
    """What one run left. ``rows`` are its metrics by step, ``results`` an evaluation's ``results.json``."""

    name: str
    directory: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    config: str = ""
    samples: list[dict[str, Any]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, where it was logged."""
        points = [(row["step"], float(row[metric])) for row in self.rows if isinstance(row.get(metric), (int, float))]
        return [step for step, _ in points], [value for _, value in points]

    def metric_names(self) -> list[str]:
        """Every metric logged, in order of first appearance."""
        names: dict[str, None] = {}
        for row in self.rows:
            for name, value in row.items():
                if name not in ("step", "time") and isinstance(value, (int, float)):
                    names[name] = None
        return list(names)


@dataclass(frozen=True)
class Project:
    """One run, or the stages of several with their ``summary``."""

    directory: Path
    runs: list[RunRecord]
    summary: dict[str, Any]

    @property
    def is_single(self) -> bool:
        """Whether the directory itself is the run."""
        return len(self.runs) == 1 and self.runs[0].directory == self.directory

    @property
    def evaluation(self) -> RunRecord | None:
        """The last run with evaluation results."""
        found = [run for run in self.runs if run.results]
        return found[-1] if found else None


def read_project(directory: Path) -> Project:
    """Read ``directory``. Raises :class:`CheckpointError` when it is not a run or a file in it is damaged."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; give the run.dir of a run")
    if _is_run(directory):
        runs = [_read_run(directory)]
    else:
        stages = sorted((path for path in directory.iterdir() if path.is_dir() and _is_run(path)), key=_stage_key)
        runs = [_read_run(path) for path in stages]
    if not runs:
        raise CheckpointError(
            f"{directory} is not a run: neither it nor a directory in it holds {METRICS_FILE} or {RESULTS_FILE}; "
            "give the run.dir of an sft, rm, ppo or evaluate run, or of a demo"
        )
    summary = directory / SUMMARY_FILE
    return Project(directory, runs, _read_json(summary) if summary.exists() else {})


def _is_run(directory: Path) -> bool:
    return (directory / METRICS_FILE).is_file() or (directory / RESULTS_FILE).is_file()


def _stage_key(path: Path) -> tuple[int, str]:
    known = path.name in _STAGE_ORDER
    return (_STAGE_ORDER.index(path.name) if known else len(_STAGE_ORDER), path.name)


def _read_run(directory: Path) -> RunRecord:
    metrics, config = directory / METRICS_FILE, directory / CONFIG_FILE
    results, samples = directory / RESULTS_FILE, directory / SAMPLES_FILE
    files = sorted((directory / SAMPLES_DIR).glob("*.jsonl"))
    if samples.is_file():
        files.append(samples)
    return RunRecord(
        name=directory.resolve().name,
        directory=directory,
        rows=read_metrics(metrics) if metrics.is_file() else [],
        config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        samples=[row for file in files for row in read_samples(file)],
        results=_read_json(results) if results.is_file() else {},
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); write it again by running its stage again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return decode_tree(value)

"""The report: one HTML page about a run, or about the stages of a demo, that opens from disk anywhere.

Plots are inlined, nothing is loaded from elsewhere, and there is no script in the page.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aligner.monitoring import metrics as names
from aligner.monitoring import report_page as html
from aligner.monitoring.charts import GROUPS, Chart, line_chart, phase_chart
from aligner.monitoring.report_headline import cards, headline, is_number, number
from aligner.monitoring.run_record import Project, RunRecord, read_project

REPORT_FILE = "report.html"
_SAMPLES_OPEN, _SAMPLES_SHOWN = 8, 64  # prompts shown at once, and at most
_UNGROUPED = 9  # up to this many charts of a run stand without headings
_OTHER_PHASE = "other"  # the part of a step outside every phase


def build_report(run_dir: Path, output: Path | None = None) -> Path:
    """Write the report of ``run_dir`` to ``output`` (default: ``run_dir/report.html``) and return its path.

    ``run_dir`` is a run directory or a directory of several (``run_record.py``). The file is replaced atomically.
    Raises :class:`aligner.errors.CheckpointError` when ``run_dir`` is not a run or a file in it is damaged.
    """
    project = read_project(Path(run_dir))
    sections = [("results", "Results", headline(project))]
    for run in project.runs:
        prefix = "" if project.is_single else f"{run.name}-"
        label = "" if project.is_single else f"{run.name}: "
        sections.append((f"{prefix}curves", f"{label}{'curves' if label else 'Curves'}", _curves(run)))
        sections.append((f"{prefix}phases", f"{label}{'phase times' if label else 'Phase times'}", _phases(run)))
    sections.append(("samples", "Before and after", _samples(project)))
    sections.append(("configuration", "Configuration", _configuration(project)))
    name = project.directory.resolve().name
    footer = f"Written by aligner report on {datetime.datetime.now():%Y-%m-%d %H:%M}."
    page = html.page(f"Run {name}", _subtitle(project), cards(project), sections, footer)
    path = Path(output) if output is not None else project.directory / REPORT_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, path)
    return path


def _subtitle(project: Project) -> str:
    parts = [str(project.directory)]
    if not project.is_single:
        parts.append("stages: " + ", ".join(run.name for run in project.runs))
    elif project.runs[0].rows:
        parts.append(f"{len(project.runs[0].rows)} steps logged")
    times = [row["time"] for run in project.runs for row in run.rows if isinstance(row.get("time"), (int, float))]
    if times:
        parts.append(f"last step on {datetime.datetime.fromtimestamp(max(times)):%Y-%m-%d %H:%M}")
    return " · ".join(parts)


# --------------------------------------------------------------------------- curves and phases


def _curves(run: RunRecord) -> str:
    """Charts of everything logged, under headings when there are many; metrics in no chart come last, one each."""
    series = {name: run.series(name) for name in run.metric_names() if not name.startswith(names.TIMERS_PREFIX)}
    if not series:
        return html.note("No steps were logged yet.") if not run.results else ""
    span = (run.rows[0]["step"], run.rows[-1]["step"])
    groups: dict[str, list[str]] = {}
    drawn: set[str] = set()
    for group, members in GROUPS.items():
        for chart in members:
            drawn |= chart.metrics()
            uri = line_chart(chart, series, span)
            if uri is not None:
                groups.setdefault(group, []).append(html.figure(chart.title, chart.caption, uri))
    for name in series:
        uri = line_chart(Chart(name, ((name, name),)), series, span) if name not in drawn else None
        if uri is not None:
            groups.setdefault("More", []).append(html.figure(name, "", uri))
    if sum(len(figures) for figures in groups.values()) <= _UNGROUPED:
        return html.charts([figure for figures in groups.values() for figure in figures])
    return "".join(f"<h3>{html.text(group)}</h3>" + html.charts(figures) for group, figures in groups.items())


def _phases(run: RunRecord) -> str:
    """Stacked seconds a phase over steps, and their totals. What no phase covers is shown as ``other``."""
    rows = [row for row in run.rows if any(name.startswith(names.TIMERS_PREFIX) for name in row)]
    phases: dict[str, list[float]] = {}
    for name in run.metric_names():
        if name.startswith(names.TIMERS_PREFIX) and name != names.STEP_TIME:
            values = [row.get(name, 0.0) for row in rows]
            phases[name.removeprefix(names.TIMERS_PREFIX)] = [v if math.isfinite(v) else 0.0 for v in values]
    if not phases:
        return ""
    covered = [math.fsum(values) for values in zip(*phases.values(), strict=True)]
    other = [max(0.0, row.get(names.STEP_TIME, 0.0) - inside) for row, inside in zip(rows, covered, strict=True)]
    if math.fsum(other) > 0.005 * math.fsum(covered):
        phases[_OTHER_PHASE] = other
    total = math.fsum(math.fsum(values) for values in phases.values()) or 1.0
    body = [
        [phase, f"{math.fsum(v):.1f}", f"{math.fsum(v) / len(rows):.2f}", f"{math.fsum(v) / total:.0%}"]
        for phase, v in phases.items()
    ]
    uri = phase_chart([row["step"] for row in rows], phases)
    chart = html.charts([html.figure("Seconds a phase", "the slowest rank", uri, wide=True)])
    return chart + html.table(["phase", "seconds", "a step", "share"], body)


# --------------------------------------------------------------------------- samples and configuration


def _samples(project: Project) -> str:
    """Responses to the same prompt side by side: an evaluation's checkpoints, or a run's first and last step."""
    source = project.evaluation
    if source is None or not source.samples:
        with_samples = [run for run in project.runs if run.samples]
        if not with_samples:
            return ""
        source = with_samples[-1]
    columns, prompts = _side_by_side(source.samples)
    blocks = []
    for (prompt, _), answers in list(prompts.items())[:_SAMPLES_SHOWN]:
        shown = [(who, str(answers[who]["response"]), _chips(answers[who])) for who in columns if who in answers]
        blocks.append(html.sample(prompt, shown))
    count = f"the first {len(blocks)} of {len(prompts)}" if len(prompts) > len(blocks) else f"all {len(prompts)}"
    about = f"Prompts in the order of the file, none picked: {count}. Columns: {', '.join(columns)}."
    rest = blocks[_SAMPLES_OPEN:]
    folded = html.details(f"{len(rest)} more", f'<div class="inside">{"".join(rest)}</div>') if rest else ""
    return html.note(about) + "".join(blocks[:_SAMPLES_OPEN]) + folded


def _side_by_side(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[list[str], dict[tuple[str, int], dict[str, Mapping[str, Any]]]]:
    """Column names, and for every (prompt, number of the sample) the row of each column. Rows of many steps are
    reduced to the first and the last step."""
    by_step = all("model" not in row for row in rows)
    if by_step:
        steps = sorted({int(row.get("step", 0)) for row in rows})
        kept = {steps[0]: f"step {steps[0]}", steps[-1]: f"step {steps[-1]}"}
        named = [(kept[int(row.get("step", 0))], row) for row in rows if int(row.get("step", 0)) in kept]
        columns = list(dict.fromkeys(kept.values()))
    else:
        named = [(str(row.get("model", "")), row) for row in rows]
        columns = list(dict.fromkeys(name for name, _ in named))
    seen: dict[tuple[str, str], int] = {}
    prompts: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for name, row in named:
        nth = seen.get((name, row["prompt"]), 0)
        seen[name, row["prompt"]] = nth + 1
        prompts.setdefault((row["prompt"], nth), {})[name] = row
    return columns, prompts


def _chips(row: Mapping[str, Any]) -> list[str]:
    """What was measured on a response, in a few words each."""
    chips = []
    for name, value in row.items():
        if name in ("prompt", "response", "model", "step") or value is None:
            continue
        if name == "finish_reason":
            chips.append({"stop": "ended", "length": "truncated"}.get(str(value), str(value)))
        elif name == "tokens":
            chips.append(f"{value} tokens")
        elif is_number(value):
            chips.append(f"{name.replace('_', ' ')} {number(value, '.3g')}")
        elif isinstance(value, str) and len(value) <= 40:
            chips.append(f"{name.replace('_', ' ')} {value}")
    return chips


def _configuration(project: Project) -> str:
    blocks = [
        html.details(f"{run.name}/config.yaml", f"<pre>{html.text(run.config)}</pre>")
        for run in project.runs
        if run.config
    ]
    return "".join(blocks)

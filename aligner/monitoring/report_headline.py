"""The top of the report: cards, the evaluation's table with intervals, stage times, a run's metrics first and last."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from aligner.monitoring import metrics as names
from aligner.monitoring import report_page as html
from aligner.monitoring.charts import COLORS, interval_chart
from aligner.monitoring.run_record import Project, RunRecord

# (label, metric, number format) of a single run's cards and headline table, as far as logged; the first make the cards
_RUN_LINES = (
    ("Reward", names.REWARDS_MEAN, ".3f"),
    ("Reward, validation prompts", names.VAL_ROLLOUT_REWARDS_MEAN, ".3f"),
    ("KL from the reference, nats a response", names.INIT_POLICY_KL, ".3f"),
    ("Ended by itself", names.EOS_RATE, ".0%"),
    ("Training loss", names.TRAIN_LOSS, ".3f"),
    ("Validation loss", names.VAL_LOSS, ".3f"),
    ("Held-out accuracy", names.VAL_ACCURACY, ".0%"),
    ("Held-out margin", names.VAL_MARGIN, ".3f"),
    ("Reward with KL penalty", names.REWARDS_WITH_KL_MEAN, ".3f"),
    ("Response length, tokens", names.RESPONSE_LENGTH_MEAN, ".1f"),
    ("Entropy, nats a token", names.ENTROPY, ".3f"),
    ("Clip fraction", names.CLIP_FRACTION, ".1%"),
    ("Value loss", names.CRITIC_LOSS, ".4g"),
    ("Explained variance", names.EXPLAINED_VARIANCE, ".3f"),
    ("Gradient norm", names.TRAIN_GRAD_NORM, ".4g"),
    ("Gradient norm, actor", names.ACTOR_GRAD_NORM, ".4g"),
    ("Gradient norm, critic", names.CRITIC_GRAD_NORM, ".4g"),
    ("Tokens a second", names.TOKENS_PER_SECOND, ".0f"),
    ("Seconds a step", names.STEP_TIME, ".2f"),
    ("Peak memory, GiB", names.PEAK_MEMORY, ".2f"),
)
_CARD_METRICS = {metric for _, metric, _ in _RUN_LINES[:7]}
_CARD_FIELDS = ("rule_score_", "win_rate_", "eos_rate")  # fields of an evaluation's row that make cards
_JUDGE_LABELS = {"reward": "reward model"}

Rows = dict[str, dict[str, Any]]
Line = tuple[str, str, str, str]  # label, field, field of its interval, number format


def evaluation_rows(project: Project) -> tuple[Rows, str, str]:
    """Rows by checkpoint, the baseline and the checkpoint KL is measured from: of results.json, else of the summary."""
    if project.evaluation is not None:
        results = project.evaluation.results
        found = results.get("rows")
        items = found.items() if isinstance(found, dict) else ()
        rows = {str(name): row for name, row in items if isinstance(row, dict)}
        first = next(iter(rows), "")
        return rows, str(results.get("baseline", first)), str(results.get("kl_from", first))
    rows = {name: row for name, row in project.summary.items() if isinstance(row, dict) and "eos_rate" in row}
    return rows, "sft", "sft"


def result_lines(rows: Rows, baseline: str, kl_from: str) -> list[Line]:
    """What the evaluation's table shows, as far as some row has it."""
    overall = f"win_rate_vs_{baseline}"
    fields = dict.fromkeys(field for row in rows.values() for field in row)
    judges = [
        field.removeprefix(f"{overall}_by_")
        for field in fields
        if field.startswith(f"{overall}_by_") and not field.endswith("_interval")
    ]
    wins: list[Line] = [
        (
            f"Win rate vs {baseline}, {_JUDGE_LABELS.get(judge, judge)}",
            f"{overall}_by_{judge}",
            f"{overall}_by_{judge}_interval",
            ".0%",
        )
        for judge in judges
    ] or [(f"Win rate vs {baseline}", overall, "win_rate_interval", ".0%")]
    lines: list[Line] = [
        ("Rule score", "rule_score_mean", "rule_score_interval", ".3f"),
        ("Reward model score", "reward_mean", "reward_interval", ".3f"),
        *wins,
        ("Ended by itself", "eos_rate", "eos_rate_interval", ".0%"),
        ("Response length, tokens", "response_length_mean", "response_length_interval", ".1f"),
        (f"KL from {kl_from}, nats a response", f"kl_to_{kl_from}", "kl_interval", ".2f"),
    ]
    return [line for line in lines if any(is_number(row.get(line[1])) for row in rows.values())]


def cards(project: Project) -> str:
    """The few numbers that say whether it worked: last checkpoint against first, last step against first."""
    items: list[tuple[str, str, str, str]] = []
    rows, baseline, kl_from = evaluation_rows(project)
    if rows:
        first, last = list(rows)[0], list(rows)[-1]
        lines = result_lines(rows, baseline, kl_from)
        for label, field, interval, style in [line for line in lines if line[1].startswith(_CARD_FIELDS)][:4]:
            value, detail = number(rows[last].get(field), style), interval_text(rows[last], interval, style)
            if field.startswith("win_rate"):
                items.append((f"{last}: {label[:1].lower()}{label[1:]}", "", value, detail))
            else:
                before = number(rows[first].get(field), style) if first != last else ""
                items.append((f"{label}, {first} → {last}" if before else label, before, value, detail))
    reward_model = project.summary.get("reward_model")
    if isinstance(reward_model, dict) and is_number(reward_model.get("accuracy")):
        margin = f"margin {number(reward_model['margin'], '.2f')}" if is_number(reward_model.get("margin")) else ""
        items.append(("Reward model accuracy", "", number(reward_model["accuracy"], ".0%"), margin))
    if project.is_single:
        items += _run_cards(project.runs[0])
    seconds = project.summary.get("wall_seconds")
    if isinstance(seconds, (int, float)):
        items.append(("Wall clock", "", duration(seconds), "all stages"))
    return html.cards(items)


def _run_cards(run: RunRecord) -> list[tuple[str, str, str, str]]:
    items = []
    for label, metric, style in _RUN_LINES:
        steps, values = run.series(metric)
        if metric not in _CARD_METRICS or not values:
            continue
        short = label.split(", nats")[0]
        if len(values) > 1:
            before, after = number(values[0], style), number(values[-1], style)
            items.append((short, before, after, f"step {steps[0]} → step {steps[-1]}"))
        else:
            items.append((short, "", number(values[-1], style), f"step {steps[-1]}"))
    _, times = run.series(names.STEP_TIME)
    finite = [value for value in times if math.isfinite(value)]
    if finite:
        total = math.fsum(finite)
        items.append(("Time in steps", "", duration(total), f"{duration(total / len(finite))} a step"))
    return items


def headline(project: Project) -> str:
    """The section below the cards."""
    parts = []
    rows, baseline, kl_from = evaluation_rows(project)
    if rows:
        parts.append(_evaluation(project, rows, baseline, kl_from))
    seconds = project.summary.get("seconds")
    if isinstance(seconds, dict):
        stages = [(str(name), float(value), duration(value)) for name, value in seconds.items() if is_number(value)]
        if stages:
            parts.append("<h3>Where the time went</h3>" + html.parts_bar("Seconds a stage", stages, COLORS))
    if project.is_single and project.runs[0].rows:
        parts.append(_first_and_last(project.runs[0]))
    elif not parts:
        parts.append(html.note("No evaluation has been run yet; the curves of the stages follow."))
    return "".join(parts)


def _evaluation(project: Project, rows: Rows, baseline: str, kl_from: str) -> str:
    """Table and interval plots of an evaluation."""
    lines = result_lines(rows, baseline, kl_from)
    about = "Means over held-out prompts, intervals below."
    results = project.evaluation.results if project.evaluation is not None else {}
    if is_number(results.get("prompts")):
        confidence = results.get("confidence")
        level = f"{confidence:.0%} " if isinstance(confidence, float) else ""
        about = f"Means over {results['prompts']} prompts with {level}intervals; ties count half in win rates."
    body: list[list[str | tuple[str, str]]] = []
    figures = []
    for label, field, interval, style in lines:
        cells = [(number(row.get(field), style), interval_text(row, interval, style)) for row in rows.values()]
        body.append([label, *cells])
        values = {name: _edges(row, field, interval) for name, row in rows.items() if is_number(row.get(field))}
        if any(low < high for _, low, high in values.values()):
            figures.append(html.figure(label, "", interval_chart(values, percent=style.endswith("%"))))
    drawn = "<h3>With intervals</h3>" + html.charts(figures) if figures else ""
    return html.note(about) + html.table(["", *rows], body) + drawn


def _edges(row: Mapping[str, Any], field: str, interval: str) -> tuple[float, float, float]:
    value = row[field]
    low, high = row[interval] if is_interval(row.get(interval)) else (value, value)
    return value, low, high


def _first_and_last(run: RunRecord) -> str:
    """Headline metrics in words, then every metric under its name."""
    labelled = [(label, metric, style) for label, metric, style in _RUN_LINES if run.series(metric)[1]]
    every = [(metric, metric, ".4g") for metric in run.metric_names()]
    head = ["", "first", "last", "lowest", "highest"]
    top = html.table(head, [_extremes(run, *line) for line in labelled]) if labelled else ""
    table = html.table(["metric", *head[1:]], [_extremes(run, *line) for line in every])
    return top + '<div class="gap"></div>' + html.details(f"All {len(every)} metrics", table, is_open=not labelled)


def _extremes(run: RunRecord, label: str, metric: str, style: str) -> list[str]:
    _, values = run.series(metric)
    finite = [value for value in values if math.isfinite(value)]
    low, high = (number(min(finite), style), number(max(finite), style)) if finite else ("–", "–")
    return [label, number(values[0], style), number(values[-1], style), low, high]


# --------------------------------------------------------------------------- numbers


def is_number(value: Any) -> bool:
    """Whether ``value`` is an int or a float (not a bool)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_interval(value: Any) -> bool:
    """Whether ``value`` is a pair of numbers ``[low, high]``."""
    return isinstance(value, list) and len(value) == 2 and all(is_number(edge) for edge in value)


def number(value: Any, style: str = ".4g") -> str:
    """``value`` under a format specification; a dash when it is no number, its name when it is not finite."""
    if not is_number(value):
        return "–"
    if isinstance(value, int) and style == ".4g":
        return f"{value}"
    return format(value, style) if math.isfinite(value) else str(value)


def interval_text(row: Mapping[str, Any], field: str, style: str) -> str:
    """``0.41 to 0.52``; empty when the row has none or it is a point."""
    pair = row.get(field)
    if not is_interval(pair) or not pair[0] < pair[1]:  # type: ignore[index]
        return ""
    return f"{number(pair[0], style)} to {number(pair[1], style)}"  # type: ignore[index]


def duration(seconds: float) -> str:
    """Seconds in words: ``12.3 s``, ``4 min 5 s``, ``2 h 10 min``."""
    if not math.isfinite(seconds) or seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"

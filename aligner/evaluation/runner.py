"""Comparison of checkpoints from their evaluated responses: pure arithmetic, then a table and two files.

``results.json``: ``{"baseline", "kl_from", "prompts", "confidence", "rows": {checkpoint: row}}``; :func:`compare`
lists a row's fields. ``samples.jsonl``: one line a response (format in ``aligner/monitoring/samples.py``).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aligner.errors import DataError
from aligner.evaluation.judges import Judge, judge_both_ways, reward_model_judge, rule_judge
from aligner.evaluation.responses import EvaluatedResponse
from aligner.evaluation.statistics import Estimate, bootstrap_mean, paired_difference, win_rate
from aligner.monitoring.numbers import encode_tree
from aligner.monitoring.samples import write_samples

RESULTS_FILE = "results.json"
SAMPLES_FILE = "samples.jsonl"

Responses = Mapping[str, Sequence[EvaluatedResponse]]


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`. ``rows`` maps a checkpoint's name to its row."""

    baseline: str
    kl_from: str
    prompts: int
    confidence: float
    rows: dict[str, dict[str, Any]]
    responses: Responses

    def write(self, directory: Path) -> None:
        """Write ``results.json`` and ``samples.jsonl``, each under a temporary name first. Call on rank 0 alone."""
        directory.mkdir(parents=True, exist_ok=True)
        result = {name: getattr(self, name) for name in ("baseline", "kl_from", "prompts", "confidence", "rows")}
        temporary = directory / (RESULTS_FILE + ".tmp")
        text = json.dumps(encode_tree(result), ensure_ascii=False, indent=2, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")
        write_samples(directory / SAMPLES_FILE, self.samples())
        os.replace(temporary, directory / RESULTS_FILE)

    def samples(self) -> list[dict[str, Any]]:
        """Rows of ``samples.jsonl``: responses to one prompt follow each other, in the order of the checkpoints."""
        rows = []
        for index in range(len(self.responses[self.baseline])):
            for name, responses in self.responses.items():
                values = asdict(responses[index])
                values["tokens"] = values.pop("num_tokens")
                del values["prompt_index"]
                rows.append({"model": name} | {key: value for key, value in values.items() if value is not None})
        return rows

    def print(self, console: Console | None = None) -> None:
        """Print the rows as a table, one column a checkpoint."""
        table = Table(
            box=SIMPLE_HEAD, title=f"{self.prompts} prompts, {self.confidence:.0%} intervals", title_justify="left"
        )
        table.add_column("", no_wrap=True)
        for name in self.rows:
            table.add_column(escape(name), justify="right")
        for label, key, interval, style in _table_lines(self.rows, self.baseline, self.kl_from):
            table.add_row(escape(label), *(_cell(row, key, interval, style) for row in self.rows.values()))
        (console or Console()).print(table)


def compare(
    responses: Responses,
    *,
    baseline: str | None = None,
    kl_from: str | None = None,
    judges: Mapping[str, Judge] | None = None,
    bootstrap_samples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Comparison:
    """Compare checkpoints on the same prompts.

    ``responses`` maps a checkpoint's name to its responses; position i holds the same prompt for every checkpoint.
    Several samples of a prompt share its ``prompt_index``; they are averaged before any interval is computed, so the
    unit is the prompt.
    ``baseline`` (win rates, differences) and ``kl_from`` (the checkpoint ``kl`` was measured from) default to the
    first. ``judges`` default to ``rule`` and ``reward``, where those scores are there.

    A row holds, each ``_interval`` a pair ``[low, high]``: ``responses``, ``reward_mean``, ``reward_interval``,
    ``rule_score_mean``, ``rule_score_interval``, ``eos_rate``, ``eos_rate_interval``, ``response_length_mean``,
    ``response_length_interval`` (tokens), ``kl_to_<kl_from>``, ``kl_interval`` (nats a response; 0 for ``kl_from``
    itself), ``reward_difference`` and ``rule_score_difference`` to the baseline with intervals, and for every judge
    ``win_rate_vs_<baseline>_by_<judge>`` and its interval. ``win_rate_vs_<baseline>``, ``win_rate_interval`` and
    ``win_rate_judge`` repeat the first judge's. The baseline's win rate against itself is 0.5 by definition. What was
    not measured has no field.

    Raises :class:`DataError` when prompts differ between checkpoints, when a score is missing in some responses only,
    or is not finite.
    """
    names = list(responses)
    if not names or not responses[names[0]]:
        raise DataError("nothing to compare: give at least one checkpoint with at least one response")
    baseline, kl_from = baseline or names[0], kl_from or names[0]
    for what, name in (("evaluation.baseline", baseline), ("evaluation.kl_from", kl_from)):
        if name not in responses:
            raise DataError(f"{what} is {name!r}, which is none of the compared checkpoints ({', '.join(names)})")
    _check_prompts(responses)
    measured = {name: _check_measured(name, responses[name]) for name in names}
    if judges is None:
        judges = _default_judges(set.intersection(*measured.values()))
    settings = {"samples": bootstrap_samples, "confidence": confidence, "seed": seed}
    rows = {}
    for name in names:
        rows[name] = _means(responses[name], measured[name], settings)
        rows[name] |= _kl(responses[name], name == kl_from, kl_from, measured[name], settings)
        rows[name] |= _differences(responses[name], responses[baseline], measured[name] & measured[baseline], settings)
        rows[name] |= _win_rates(name, baseline, responses, judges, confidence)
    prompts = len({response.prompt_index for response in responses[names[0]]})
    return Comparison(baseline, kl_from, prompts, confidence, rows, responses)


def _check_prompts(responses: Responses) -> None:
    names = list(responses)
    expected = [(response.prompt_index, response.prompt) for response in responses[names[0]]]
    for name in names[1:]:
        found = [(response.prompt_index, response.prompt) for response in responses[name]]
        if len(found) != len(expected):
            raise DataError(
                f"checkpoint {name!r} has {len(found)} responses and {names[0]!r} has {len(expected)}; "
                "compare them on the same prompts"
            )
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            if one != other:
                raise DataError(
                    f"response {index}: checkpoint {name!r} answers {_place(other)} and {names[0]!r} answers "
                    f"{_place(one)}; compare them on the same prompts in the same order"
                )


def _place(prompt: tuple[int, str]) -> str:
    return f"prompt {prompt[0]}, {prompt[1][:60]!r}"


def _check_measured(name: str, responses: Sequence[EvaluatedResponse]) -> set[str]:
    """The scores that every response of a checkpoint has."""
    measured = set()
    for score in ("reward", "rule_score", "kl"):
        values = [getattr(response, score) for response in responses]
        missing = sum(value is None for value in values)
        if 0 < missing < len(values):
            raise DataError(f"checkpoint {name!r}: {missing} of {len(values)} responses have no {score}")
        if missing:
            continue
        for index, value in enumerate(values):
            if not math.isfinite(value):
                raise DataError(f"checkpoint {name!r}, response {index}: {score} is {value}; it must be finite")
        measured.add(score)
    return measured


def _by_prompt(responses: Sequence[EvaluatedResponse], value: str | Callable[[int], float]) -> list[float]:
    """One number a prompt, in order of first appearance: the mean over its samples of a field or of ``value(i)``."""
    groups: dict[int, list[float]] = {}
    for index, response in enumerate(responses):
        number = getattr(response, value) if isinstance(value, str) else value(index)
        groups.setdefault(response.prompt_index, []).append(float(number))
    return [math.fsum(group) / len(group) for group in groups.values()]


def _mean(responses: Sequence[EvaluatedResponse], name: str, settings: Mapping[str, Any]) -> Estimate:
    return bootstrap_mean(_by_prompt(responses, name), **settings)


def _put(row: dict[str, Any], value_key: str, interval_key: str, estimate: Estimate) -> None:
    row[value_key], row[interval_key] = estimate.value, estimate.interval


def _means(responses: Sequence[EvaluatedResponse], measured: set[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row that need no other checkpoint."""
    row: dict[str, Any] = {"responses": len(responses)}
    for score in ("reward", "rule_score"):
        if score in measured:
            _put(row, f"{score}_mean", f"{score}_interval", _mean(responses, score, settings))
    ended = win_rate(_by_prompt(responses, "ended"), confidence=settings["confidence"])
    _put(row, "eos_rate", "eos_rate_interval", ended)
    length = _mean(responses, "num_tokens", settings)
    _put(row, "response_length_mean", "response_length_interval", length)
    return row


def _kl(
    responses: Sequence[EvaluatedResponse], own: bool, kl_from: str, measured: set[str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """KL from the reference checkpoint; 0 by definition for that checkpoint itself (``own``)."""
    row: dict[str, Any] = {}
    if own:
        _put(row, f"kl_to_{kl_from}", "kl_interval", Estimate(0.0, 0.0, 0.0, len(responses)))
    elif "kl" in measured:
        _put(row, f"kl_to_{kl_from}", "kl_interval", _mean(responses, "kl", settings))
    return row


def _differences(
    ours: Sequence[EvaluatedResponse],
    theirs: Sequence[EvaluatedResponse],
    measured: set[str],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Paired differences of the scores to the baseline's."""
    row: dict[str, Any] = {}
    for score in ("reward", "rule_score"):
        if score in measured:
            estimate = paired_difference(_by_prompt(ours, score), _by_prompt(theirs, score), **settings)
            _put(row, f"{score}_difference", f"{score}_difference_interval", estimate)
    return row


def _default_judges(measured: set[str]) -> dict[str, Judge]:
    """A judge for every score that all checkpoints have; the rule's first."""
    judges: dict[str, Judge] = {}
    if "rule_score" in measured:
        judges["rule"] = rule_judge()
    if "reward" in measured:
        judges["reward"] = reward_model_judge()
    return judges


def _win_rates(
    name: str, baseline: str, responses: Responses, judges: Mapping[str, Judge], confidence: float
) -> dict[str, Any]:
    """Win rates of checkpoint ``name`` against ``baseline`` by every judge."""
    row: dict[str, Any] = {}
    ours, theirs = responses[name], responses[baseline]
    for judge_name, judge in judges.items():

        def preference(index: int, judge: Judge = judge) -> float:
            return judge_both_ways(judge, ours[index].prompt, ours[index], theirs[index])

        if name == baseline:
            estimate = Estimate(0.5, 0.5, 0.5, len(ours))
        else:
            estimate = win_rate(_by_prompt(ours, preference), confidence=confidence)
        key = f"win_rate_vs_{baseline}_by_{judge_name}"
        _put(row, key, f"{key}_interval", estimate)
        if "win_rate_judge" not in row:
            _put(row, f"win_rate_vs_{baseline}", "win_rate_interval", estimate)
            row["win_rate_judge"] = judge_name
    return row


def _table_lines(rows: Mapping[str, Mapping[str, Any]], baseline: str, kl_from: str) -> list[tuple[str, str, str, str]]:
    """(label, field, field of its interval or "", number format) of the printed table."""
    lines = [
        ("reward model score", "reward_mean", "reward_interval", ".3f"),
        ("rule score", "rule_score_mean", "rule_score_interval", ".3f"),
        ("ended by itself", "eos_rate", "eos_rate_interval", ".0%"),
        ("response length (tokens)", "response_length_mean", "", ".1f"),
        (f"KL from {kl_from} (nats)", f"kl_to_{kl_from}", "kl_interval", ".2f"),
    ]
    prefix = f"win_rate_vs_{baseline}_by_"
    for key in rows[baseline]:
        if key.startswith(prefix) and not key.endswith("_interval"):
            judge = key.removeprefix(prefix)
            label = {"reward": "reward model"}.get(judge, judge)
            lines.append((f"win rate, {label}", key, f"{key}_interval", ".0%"))
    return [line for line in lines if any(line[1] in row for row in rows.values())]


def _cell(row: Mapping[str, Any], key: str, interval: str, style: str) -> str:
    if key not in row:
        return "–"
    text = format(row[key], style)
    if interval in row and row[interval][0] < row[interval][1]:
        low, high = row[interval]
        style = style.replace(".3f", ".2f")
        text += f"\n[dim]\\[{format(low, style)}, {format(high, style)}][/]"
    return text

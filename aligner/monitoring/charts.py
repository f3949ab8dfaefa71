"""Which metrics a report draws, and drawing them: matplotlib figures as SVG data URIs, nothing loaded from outside."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from aligner.monitoring import metrics as names

COLORS = ("#2563eb", "#ea580c", "#059669", "#7c3aed", "#dc2626", "#0891b2", "#ca8a04", "#db2777", "#64748b")
_INK, _FAINT = "#475569", "#e2e8f0"
_STYLE: dict[Any, Any] = {
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "aligner",
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica", "Arial", "Liberation Sans", "DejaVu Sans"],
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": "#cbd5e1",
    "axes.labelcolor": _INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "grid.color": _FAINT,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}
_MARKED = 40  # up to this many points, each one is marked


@dataclass(frozen=True)
class Chart:
    """One chart: ``lines`` are (metric, label); ``band`` are the metrics of a shaded range's lower and upper edge;
    ``spread`` is the metric of a standard deviation shaded around the first line."""

    title: str
    lines: tuple[tuple[str, str], ...]
    caption: str = ""
    band: tuple[str, str] | None = None
    spread: str | None = None

    def metrics(self) -> set[str]:
        """Every metric the chart shows."""
        shown = {metric for metric, _ in self.lines} | set(self.band or ())
        return shown | ({self.spread} if self.spread else set())


def _one(title: str, metric: str, caption: str = "") -> Chart:
    return Chart(title, ((metric, title),), caption)


GROUPS: dict[str, tuple[Chart, ...]] = {
    "Loss": (
        Chart("Loss", ((names.TRAIN_LOSS, "training"), (names.VAL_LOSS, "validation")), "nats"),
        Chart(
            "Accuracy",
            ((names.TRAIN_ACCURACY, "training"), (names.VAL_ACCURACY, "held out")),
            "share of pairs with chosen above rejected",
        ),
        Chart(
            "Margin",
            ((names.TRAIN_MARGIN, "training"), (names.VAL_MARGIN, "held out")),
            "mean of chosen minus rejected score",
        ),
        Chart(
            "Held-out scores",
            ((names.VAL_REWARD_MEAN, "mean"),),
            "mean ± std; they standardise rewards in PPO",
            spread=names.VAL_REWARD_STD,
        ),
    ),
    "Reward and KL": (
        Chart(
            "Reward",
            ((names.REWARDS_MEAN, "raw"), (names.REWARDS_WITH_KL_MEAN, "with KL penalty")),
            "mean of a step; shaded: ± std of the raw reward",
            spread=names.REWARDS_STD,
        ),
        _one("Reward on validation prompts", names.VAL_ROLLOUT_REWARDS_MEAN, "the same prompts and seeds every time"),
        Chart(
            "Lowest and highest reward",
            ((names.REWARDS_MIN, "lowest"), (names.REWARDS_MAX, "highest")),
            "raw, over a step's responses",
        ),
        Chart(
            "KL from the reference",
            (
                (names.INIT_POLICY_KL, "k1"),
                (names.INIT_POLICY_KL_K3, "k3"),
                (names.VAL_ROLLOUT_KL, "validation prompts, k1"),
            ),
            "nats a response",
        ),
        _one("KL coefficient", names.KL_COEF),
    ),
    "Policy update": (
        Chart("Entropy", ((names.ENTROPY, "rollout"), (names.OPTIM_ENTROPY, "training")), "nats a token"),
        _one("Probability ratio", names.PPO_RATIO, "new over old policy, mean"),
        _one("Clip fraction", names.CLIP_FRACTION, "share of tokens on which the clip binds"),
        _one("Approximate KL of the update", names.APPROX_KL, "nats a token"),
        _one("Policy loss", names.ACTOR_LOSS),
        Chart(
            "Engine vs trainer log-probs",
            ((names.ENGINE_LOGPROB_DIFF_MEAN, "mean"), (names.ENGINE_LOGPROB_DIFF_MAX, "max")),
            "absolute difference a token, nats",
        ),
    ),
    "Value function": (
        _one("Value loss", names.CRITIC_LOSS),
        _one("Explained variance", names.EXPLAINED_VARIANCE, "1 is a perfect critic, 0 a constant one"),
        _one("Value clip fraction", names.VALUE_CLIP_FRACTION, "share of tokens on which the clip binds"),
        Chart(
            "Advantages", ((names.ADVANTAGES_MEAN, "mean"),), "mean ± std before whitening", spread=names.ADVANTAGES_STD
        ),
        Chart("Returns", ((names.RETURNS_MEAN, "mean"),), "mean ± std", spread=names.RETURNS_STD),
        Chart("Values", ((names.VALUES_MEAN, "mean"),), "mean ± std", spread=names.VALUES_STD),
    ),
    "Responses": (
        Chart(
            "Response length",
            ((names.RESPONSE_LENGTH_MEAN, "mean"), (names.VAL_ROLLOUT_RESPONSE_LENGTH_MEAN, "validation prompts")),
            "tokens; shaded: shortest to longest",
            band=(names.RESPONSE_LENGTH_MIN, names.RESPONSE_LENGTH_MAX),
        ),
        Chart(
            "How responses end",
            (
                (names.EOS_RATE, "by themselves"),
                (names.TRUNCATION_RATE, "truncated"),
                (names.VAL_ROLLOUT_EOS_RATE, "by themselves, validation prompts"),
            ),
            "share of responses",
        ),
        _one("Prompt length", names.PROMPT_LENGTH_MEAN, "tokens, mean"),
    ),
    "Optimizer": (
        Chart(
            "Gradient norm",
            (
                (names.TRAIN_GRAD_NORM, "model"),
                (names.ACTOR_GRAD_NORM, "actor"),
                (names.CRITIC_GRAD_NORM, "critic"),
            ),
            "before clipping",
        ),
        Chart(
            "Learning rate",
            ((names.TRAIN_LR, "model"), (names.ACTOR_LR, "actor"), (names.CRITIC_LR, "critic")),
        ),
    ),
    "Speed and memory": (
        Chart(
            "Throughput",
            ((names.TOKENS_PER_SECOND, "training"), (names.ROLLOUT_TOKENS_PER_SECOND, "rollout")),
            "tokens a second; training of PPO: sampled tokens over the whole step",
        ),
        Chart(
            "Peak memory",
            ((names.PEAK_MEMORY, "host"), (names.DEVICE_PEAK_MEMORY, "device")),
            "GiB, the largest process",
        ),
        _one("Tokens with loss", names.TRAIN_TOKENS, "in the global batch"),
        _one("Samples consumed", names.CONSUMED_SAMPLES),
    ),
}


def line_chart(chart: Chart, series: Mapping[str, tuple[list[int], list[float]]], span: tuple[int, int]) -> str | None:
    """``chart`` as a data URI, or None when nothing of it was logged. ``series`` maps a metric to steps and values;
    non-finite values are gaps. ``span`` is the run's first and last step, the same for all its charts."""
    lines = [(metric, label) for metric, label in chart.lines if series.get(metric, ([], []))[0]]
    if not lines:
        return None
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.0, 2.3))
        axes = figure.subplots(gridspec_kw={"left": 0.135, "right": 0.985, "bottom": 0.19, "top": 0.90})
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
        _shade(axes, chart, lines[0][0], series)
        for color, (metric, label) in zip(COLORS, lines, strict=False):
            steps, values = series[metric]
            marker = "o" if len(steps) <= _MARKED else ""
            axes.plot(steps, _finite(values), color=color, linewidth=1.7, marker=marker, markersize=3, label=label)
        if len(lines) > 1:
            _legend_above(axes, columns=3 if len(lines) > 2 else 2)
        _step_axis(axes)
        margin = 0.04 * (span[1] - span[0]) or 0.5
        axes.set_xlim(span[0] - margin, span[1] + margin)
        return _data_uri(figure)


def _shade(axes: Axes, chart: Chart, first: str, series: Mapping[str, tuple[list[int], list[float]]]) -> None:
    """Draw a chart's band or spread behind its lines."""
    if chart.band:
        points = _joined(series, *chart.band)
    elif chart.spread and first == chart.lines[0][0]:
        points = [(step, mean - std, mean + std) for step, mean, std in _joined(series, first, chart.spread)]
    else:
        return
    low, high = _finite([low for _, low, _ in points]), _finite([high for _, _, high in points])
    axes.fill_between([step for step, _, _ in points], low, high, color=COLORS[0], alpha=0.10, linewidth=0)


def _joined(
    series: Mapping[str, tuple[list[int], list[float]]], one: str, other: str
) -> list[tuple[int, float, float]]:
    """(step, value of ``one``, value of ``other``) where both were logged."""
    values = dict(zip(*series.get(other, ([], [])), strict=True))
    return [
        (step, value, values[step]) for step, value in zip(*series.get(one, ([], [])), strict=True) if step in values
    ]


def phase_chart(steps: Sequence[int], phases: Mapping[str, Sequence[float]]) -> str:
    """Seconds a phase, stacked over steps. ``phases`` maps a phase to one number a step."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(11.5, 3.2), layout="constrained")
        axes = figure.subplots()
        bottom = [0.0] * len(steps)
        if len(steps) <= 80:
            for index, (phase, seconds) in enumerate(phases.items()):
                axes.bar(steps, seconds, bottom=bottom, width=0.72, color=COLORS[index % len(COLORS)], label=phase)
                bottom = [low + more for low, more in zip(bottom, seconds, strict=True)]
        else:
            colors = [COLORS[index % len(COLORS)] for index in range(len(phases))]
            axes.stackplot(list(steps), *phases.values(), colors=colors, labels=list(phases), linewidth=0)
        _legend_above(axes, columns=9)
        _step_axis(axes)
        axes.set_xlim(steps[0] - 0.6, steps[-1] + 0.6)
        axes.set_ylabel("seconds")
        return _data_uri(figure)


def interval_chart(values: Mapping[str, tuple[float, float, float]], percent: bool = False) -> str:
    """A point with its interval for every checkpoint: name → (value, low, high); low = high = value: no interval."""
    scale = 100.0 if percent else 1.0
    with matplotlib.rc_context(_STYLE | {"axes.grid.axis": "x", "axes.spines.left": False}):
        figure = Figure(figsize=(4.0, 0.5 + 0.34 * len(values)), layout="constrained")
        axes = figure.subplots()
        for index, (value, low, high) in enumerate(values.values()):
            color = COLORS[index % len(COLORS)]
            axes.plot([scale * low, scale * high], [index, index], color=color, linewidth=2.4, alpha=0.45)
            axes.plot([scale * value], [index], "o", color=color, markersize=6)
        axes.set_yticks(range(len(values)), list(values))
        axes.set_ylim(len(values) - 0.5, -0.5)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
        if percent:
            axes.xaxis.set_major_formatter(lambda number, _: f"{number:g}%")
        return _data_uri(figure)


def _legend_above(axes: Axes, columns: int) -> None:
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=columns, handlelength=1.0, borderpad=0.1, columnspacing=1.2
    )


def _step_axis(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.set_xlabel("step")


def _finite(values: Sequence[float]) -> list[float]:
    return [value if math.isfinite(value) else math.nan for value in values]


def _data_uri(figure: Figure) -> str:
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return "data:image/svg+xml;base64," + base64.b64encode(stream.getvalue()).decode("ascii")

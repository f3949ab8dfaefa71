"""The report: complete, self-contained, every text escaped, clear errors for what is not a run."""

from __future__ import annotations

import base64
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from aligner.errors import CheckpointError
from aligner.monitoring import metrics as names
from aligner.monitoring.charts import GROUPS
from aligner.monitoring.logger import MetricsLogger
from aligner.monitoring.report import build_report
from aligner.monitoring.samples import step_samples_path, write_samples

HOSTILE = "<script>alert('x')</script> & \"quotes\" $x_1$"
VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Collects texts and attributes, and checks that tags are balanced."""

    def __init__(self, path: Path):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.texts: list[str] = []
        self.sources: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.tags: set[str] = set()
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == []
        self.text = "\n".join(self.texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "src":
                self.sources.append(value or "")
            elif name == "href":
                self.links.append(value or "")
            elif name == "id":
                self.anchors.add(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def check_self_contained(page: Page) -> None:
    assert "script" not in page.tags and "link" not in page.tags and "iframe" not in page.tags
    assert not re.search(r"url\(|@import", page.source)
    assert all(link.startswith("#") and link[1:] in page.anchors for link in page.links)
    assert page.sources
    for source in page.sources:
        kind, _, data = source.partition(";base64,")
        assert kind == "data:image/svg+xml"
        ElementTree.fromstring(base64.b64decode(data))


EVERY_METRIC = sorted({metric for charts in GROUPS.values() for chart in charts for metric in chart.metrics()})
FEW_METRICS = [names.REWARDS_MEAN, names.REWARDS_STD, names.VAL_ROLLOUT_REWARDS_MEAN]


def make_ppo(run_dir: Path, metrics: list[str], steps: int = 4) -> None:
    with MetricsLogger(run_dir, rank=0) as logger:
        for step in range(1, steps + 1):
            row = dict.fromkeys(metrics, 0.1 * step)
            row |= {"custom/<metric>": float(step), names.PPO_RATIO: math.nan if step == 2 else 1.0}
            if step % 2:
                del row[names.VAL_ROLLOUT_REWARDS_MEAN]
            row |= {"timers/rollout": 2.0, "timers/train": math.inf if step == 3 else 1.0, names.STEP_TIME: 3.5}
            logger.log(step, row)
    (run_dir / "config.yaml").write_text(f"ppo:\n  note: {HOSTILE}\n", encoding="utf-8")
    for step in (0, 2, 4):
        rows = [
            {"prompt": HOSTILE, "response": f"answer {n} at {step}", "step": step, "reward": 0.5, "tokens": 3}
            for n in range(2)
        ]
        write_samples(step_samples_path(run_dir, step), rows)


def make_demo(directory: Path) -> None:
    make_ppo(directory / "ppo", FEW_METRICS, steps=2)
    with MetricsLogger(directory / "sft", rank=0) as logger:
        logger.log(1, {names.TRAIN_LOSS: 2.0})
    rows = {
        name: {
            "rule_score_mean": 0.4 + shift,
            "rule_score_interval": [0.3 + shift, 0.5 + shift],
            "eos_rate": 0.5 + shift,
            "win_rate_vs_sft_by_rule": 0.5 + shift,
            "win_rate_vs_sft_by_rule_interval": [0.4 + shift, 0.6 + shift],
            "kl_to_sft": shift,
        }
        for name, shift in (("base", -0.1), ("sft", 0.0), ("ppo<1>", 0.2))
    }
    evaluation = directory / "evaluation"
    evaluation.mkdir()
    results = {"baseline": "sft", "kl_from": "sft", "prompts": 64, "confidence": 0.95, "rows": rows}
    (evaluation / "results.json").write_text(json.dumps(results))
    samples = [
        {"prompt": f"prompt {n}", "response": "" if n == 0 else f"{name} says {n}", "model": name}
        for n in range(70)
        for name in rows
    ]
    write_samples(evaluation / "samples.jsonl", samples)
    summary = {"wall_seconds": 700.4, "seconds": {"sft": 100.0, "ppo": 600.0}, **rows}
    summary["reward_model"] = {"accuracy": 0.815, "margin": 1.25}
    (directory / "summary.json").write_text(json.dumps(summary))


def test_report_of_a_run(tmp_path: Path) -> None:
    make_ppo(tmp_path / "run", EVERY_METRIC)
    path = build_report(tmp_path / "run")
    assert path == tmp_path / "run" / "report.html"
    page = Page(path)
    check_self_contained(page)
    assert page.anchors == {"results", "curves", "phases", "samples", "configuration"}
    for charts in GROUPS.values():
        for chart in charts:
            assert chart.title in page.text
    assert "custom/<metric>" in page.text and HOSTILE in page.text
    assert "answer 1 at 0" in page.text and "answer 1 at 4" in page.text and "answer 1 at 2" not in page.text
    assert "step 0" in page.text and "step 4" in page.text
    assert not list(path.parent.glob("*.tmp"))


def test_report_of_a_demo_directory(tmp_path: Path) -> None:
    make_demo(tmp_path)
    page = Page(build_report(tmp_path, output=tmp_path / "out" / "page.html"))
    check_self_contained(page)
    assert {"results", "sft-curves", "ppo-curves", "ppo-phases", "samples", "configuration"} == page.anchors
    assert "Means over 64 prompts with 95% intervals; ties count half in win rates." in page.text
    for expected in ("0.600", "0.500 to 0.700", "70%", "60% to 80%", "11 min 40 s", "82%", "margin 1.25", "ppo<1>"):
        assert expected in page.text
    assert "the first 64 of 70" in page.text and "(empty)" in page.text and "56 more" in page.text


def test_a_summary_without_evaluation_directory_gives_the_table(tmp_path: Path) -> None:
    make_ppo(tmp_path / "ppo", FEW_METRICS, steps=1)
    row = {"eos_rate": 0.75, "win_rate_vs_sft": 0.625, "win_rate_interval": [0.5, 0.75]}
    (tmp_path / "summary.json").write_text(json.dumps({"wall_seconds": 5.0, "base": row, "ppo": row}))
    page = Page(build_report(tmp_path))
    assert "Win rate vs sft" in page.text and "62%" in page.text and "50% to 75%" in page.text


def test_a_run_that_has_not_made_a_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert "No steps were logged yet." in Page(build_report(tmp_path)).text


def test_many_steps_stack_as_areas(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, rank=0) as logger:
        for step in range(1, 101):
            logger.log(step, {names.TRAIN_LOSS: 1.0 / step, "timers/train": 1.0, names.STEP_TIME: 1.0})
    page = Page(build_report(tmp_path))
    check_self_contained(page)
    assert "phases" in page.anchors


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (None, "", "is not a run: neither it nor a directory in it holds metrics.jsonl or results.json"),
        ("metrics.jsonl", '{"step": 1}\nnonsense\n{"step": 2}\n', "metrics.jsonl:2: not a JSON object"),
        ("results.json", "{", "results.json: not valid JSON"),
        ("results.json", "[]", "results.json: expected a JSON object, found list"),
    ],
)
def test_what_is_not_a_run_is_refused(tmp_path: Path, file: str | None, content: str, message: str) -> None:
    if file is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        build_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        build_report(tmp_path / "nowhere")


def test_report_needs_no_torch() -> None:
    code = "import sys, aligner.monitoring.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

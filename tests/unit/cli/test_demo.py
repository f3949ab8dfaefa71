"""``aligner demo`` with a stand-in for the stages' processes: their order and words, DIR's safety, the summary."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from aligner.cli.demo import main
from aligner.errors import AlignerError, CheckpointError, ConfigError

STAGES = ["convert", "sft", "generate", "pairs", "rm", "ppo", "evaluate", "report"]
FIELDS = {
    "reward_mean": 1.5,
    "rule_score_mean": 0.75,
    "rule_score_interval": [0.5, 0.9],
    "eos_rate": 0.25,
    "response_length_mean": 20.0,
    "kl_to_sft": 2.5,
    "win_rate_vs_sft": 0.6,
    "win_rate_interval": [0.4, 0.8],
}
WRITES = {  # what the stand-in of a stage leaves in DIR
    "sft": "sft/done",
    "generate": "samples.jsonl",
    "pairs": "pairs.jsonl",
    "rm": "rm/metrics.jsonl",
    "ppo": "ppo/done",
    "evaluate": "evaluation/results.json",
    "report": "report.html",
}


class Stages:
    """Stands where processes are started: notes their words, leaves files, gives ``exit_codes`` back."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.ran: list[list[str]] = []
        self.exit_codes: dict[str, int] = {}

    def __call__(self, words: list[str], check: bool) -> SimpleNamespace:
        assert words[:3] == [sys.executable, "-m", "aligner"] and not check
        command = words[3]
        self.ran.append(words[3:])
        if command in WRITES:
            path = self.place / WRITES[command]
            assert not path.exists(), f"{path} of an earlier demo is still there"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.text(command))
        return SimpleNamespace(returncode=self.exit_codes.get(command, 0))

    def text(self, command: str) -> str:
        if command == "rm":
            rows = [
                {"step": 1, "val/accuracy": 0.5, "val/margin": 0.1},
                {"step": 2, "val/accuracy": 0.9, "val/margin": 2},
            ]
            return "".join(json.dumps(row) + "\n" for row in rows)
        rows_by_name = {
            name: {**FIELDS, "reward_mean": i, "responses": 3} for i, name in enumerate(("base", "sft", "ppo"))
        }
        return json.dumps({"rows": rows_by_name}) if command == "evaluate" else ""

    @property
    def commands(self) -> list[str]:
        return [words[0] for words in self.ran]


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    monkeypatch.setenv("ALIGNER_MODELS", str(tmp_path / "models"))
    stand_in = Stages(tmp_path / "demo")
    monkeypatch.setattr(subprocess, "run", stand_in)
    return stand_in


def run(stages: Stages, *words: str) -> None:
    assert main(["--dir", str(stages.place), *words]) == 0


def test_the_stages_in_order_with_their_recipes_and_sources(stages: Stages) -> None:
    run(stages, "--devices", "2", "trainer.max_steps=4")
    place = stages.place
    assert stages.commands == STAGES
    words = {one[0]: one[1:] for one in stages.ran}
    assert words["convert"] == ["smollm2_135m", str(place.parent / "models" / "smollm2-135m-instruct")]
    recipes = Path(__file__).parents[3] / "conf" / "recipe"
    for command, recipe in (("sft", "sft"), ("generate", "samples"), ("rm", "rm"), ("ppo", "ppo"), ("evaluate",) * 2):
        assert words[command][0] == f"+recipe=demo_{recipe}" and (recipes / f"demo_{recipe}.yaml").is_file()
        assert "trainer.devices=2" in words[command]
        assert ("trainer.max_steps=4" in words[command]) == (command in ("sft", "rm", "ppo"))
    assert f"run.dir={place}/evaluation" in words["evaluate"]
    assert f"actor.init_from={place}/sft" in words["generate"] and f"output={place}/samples.jsonl" in words["generate"]
    assert words["pairs"][:2] == [f"{place}/samples.jsonl", f"{place}/pairs.jsonl"]
    assert {f"data.train={place}/pairs.jsonl", f"data.validation={place}/pairs_heldout.jsonl"} < set(words["rm"])
    assert {f"actor.init_from={place}/sft", f"reward.init_from={place}/rm"} < set(words["ppo"])
    assert f"evaluation.checkpoints.ppo={place}/ppo" in words["evaluate"]
    assert words["report"] == [str(place)]


def test_the_summary_has_the_promised_fields(stages: Stages) -> None:
    run(stages)
    summary = json.loads((stages.place / "summary.json").read_text())
    assert summary.keys() == {"wall_seconds", "seconds", "base", "sft", "ppo", "reward_model"}
    assert list(summary["seconds"]) == ["sft", "samples", "pairs", "rm", "ppo", "evaluate"]
    assert summary["ppo"] == {**FIELDS, "reward_mean": 2} and summary["base"] == {**FIELDS, "reward_mean": 0}
    assert summary["reward_model"] == {"accuracy": 0.9, "margin": 2}
    assert summary["wall_seconds"] >= 0


def test_a_second_demo_reuses_the_model_and_replaces_the_outputs_alone(stages: Stages) -> None:
    run(stages)
    model = stages.place.parent / "models" / "smollm2-135m-instruct"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (stages.place / "notes.txt").write_text("mine")
    (stages.place / "samples").symlink_to(model)
    stages.ran.clear()
    run(stages)
    assert stages.commands == STAGES[1:]
    assert (stages.place / "notes.txt").read_text() == "mine" and (model / "config.json").exists()


def test_files_that_no_demo_wrote_are_kept(stages: Stages) -> None:
    precious = stages.place / "sft" / "weights"
    precious.parent.mkdir(parents=True)
    precious.write_text("weeks of work")
    with pytest.raises(ConfigError, match=r"holds files that no demo wrote \(sft\).*choose another --dir"):
        run(stages)
    assert precious.read_text() == "weeks of work" and not stages.ran
    assert [path.name for path in stages.place.iterdir()] == ["sft"]


def test_a_place_that_cannot_be_a_directory(stages: Stages) -> None:
    stages.place.write_text("a file")
    with pytest.raises(CheckpointError, match="cannot be written"):
        run(stages)
    assert not stages.ran


def test_a_stage_that_fails_ends_the_demo_with_its_exit_code(stages: Stages) -> None:
    stages.exit_codes["rm"] = 7
    with pytest.raises(AlignerError, match="stage 'rm' ended with exit code 7") as caught:
        run(stages)
    assert caught.value.exit_code == 7 and stages.commands == STAGES[:5]
    stages.exit_codes.clear()
    run(stages)  # what the failed one left is a demo's

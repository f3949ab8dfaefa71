"""Judges and the comparison of checkpoints, against numbers worked out by hand."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from aligner.errors import DataError
from aligner.evaluation.judges import ScoreJudge, judge_both_ways, reward_model_judge, rule_judge
from aligner.evaluation.responses import EvaluatedResponse
from aligner.evaluation.runner import compare
from aligner.evaluation.statistics import wilson_interval
from aligner.monitoring.samples import read_samples
from aligner.rewards.protocol import RewardRequest
from aligner.rewards.rules import get_rule


def response(prompt: str, text: str, tokens: int, finish: str, reward: float, rule: float, kl: float | None = None):
    return EvaluatedResponse(int(prompt[1:] or 0), prompt, text, tokens, finish, reward, rule, kl)


BASE = [
    response("p0", "b0", 10, "length", 0.0, 0.2, kl=1.0),
    response("p1", "b1", 20, "stop", 1.0, 0.4, kl=2.0),
    response("p2", "b2", 30, "length", 2.0, 0.6, kl=0.0),
    response("p3", "same", 40, "stop", 3.0, 0.8, kl=1.0),
]
SFT = [
    response("p0", "s0", 5, "stop", 1.0, 0.2),
    response("p1", "s1", 5, "stop", 0.0, 0.9),
    response("p2", "s2", 5, "length", 3.0, 0.9),
    response("p3", "same", 40, "stop", 3.5, 0.8),
]


def test_compare_by_hand() -> None:
    comparison = compare({"base": BASE, "sft": SFT}, baseline="sft", kl_from="sft", seed=3)
    base, sft = comparison.rows["base"], comparison.rows["sft"]
    assert comparison.prompts == 4 and base["responses"] == 4
    assert (base["reward_mean"], sft["reward_mean"]) == (1.5, 1.875)
    assert base["rule_score_mean"] == pytest.approx(0.5)
    assert (base["eos_rate"], sft["eos_rate"]) == (0.5, 0.75)
    assert base["eos_rate_interval"] == list(wilson_interval(0.5, 4))
    assert base["response_length_mean"] == 25.0
    assert (base["kl_to_sft"], sft["kl_to_sft"], sft["kl_interval"]) == (1.0, 0.0, [0.0, 0.0])
    assert base["reward_difference"] == pytest.approx(-0.375)
    # rule: tie, loss, loss, equal text; reward model: loss, win, loss, equal text (a tie although scores differ)
    assert base["win_rate_vs_sft_by_rule"] == 0.25
    assert base["win_rate_vs_sft_by_reward"] == 0.375
    assert base["win_rate_vs_sft_by_reward_interval"] == list(wilson_interval(0.375, 4))
    assert (base["win_rate_vs_sft"], base["win_rate_judge"]) == (0.25, "rule")
    assert (sft["win_rate_vs_sft"], sft["win_rate_interval"]) == (0.5, [0.5, 0.5])
    low, high = base["rule_score_interval"]
    assert low < 0.5 < high
    assert compare({"base": BASE, "sft": SFT}, baseline="sft", kl_from="sft", seed=3).rows == comparison.rows


def test_several_samples_of_a_prompt_are_one_unit() -> None:
    twice = compare({"base": [*BASE, *BASE], "sft": [*SFT, *SFT]}, baseline="sft")
    once = compare({"base": BASE, "sft": SFT}, baseline="sft")
    for name in ("base", "sft"):
        assert twice.rows[name] == once.rows[name] | {"responses": 8}


def test_two_conversations_that_end_with_the_same_question_are_two_units() -> None:
    def same_question(responses: list[EvaluatedResponse]) -> list[EvaluatedResponse]:
        return [replace(one, prompt="And then?") for one in responses]

    once = compare({"base": BASE, "sft": SFT}, baseline="sft")
    again = compare({"base": same_question(BASE), "sft": same_question(SFT)}, baseline="sft")
    assert again.prompts == 4 and again.rows == once.rows


def test_scores_that_only_some_checkpoints_have() -> None:
    without = [replace(one, reward=None, kl=None) for one in BASE]
    comparison = compare({"base": without, "sft": SFT})
    assert "reward_mean" not in comparison.rows["base"] and "reward_mean" in comparison.rows["sft"]
    assert "win_rate_vs_base_by_reward" not in comparison.rows["sft"]
    assert comparison.rows["sft"]["win_rate_judge"] == "rule"
    assert "kl_to_base" not in comparison.rows["sft"]  # not measured, and no zero in its place


@pytest.mark.parametrize(
    ("other", "options", "message"),
    [
        (SFT[:3], {}, "has 3 responses and 'base' has 4"),
        ([SFT[1], SFT[0], *SFT[2:]], {}, "response 0: checkpoint 'sft' answers prompt 1, 'p1'"),
        ([replace(SFT[0], reward=None), *SFT[1:]], {}, "'sft': 1 of 4 responses have no reward"),
        ([replace(SFT[0], rule_score=float("nan")), *SFT[1:]], {}, "response 0: rule_score is nan"),
        (SFT, {"baseline": "ppo"}, r"evaluation.baseline is 'ppo', which is none of .*base, sft"),
        (SFT, {"kl_from": "ppo"}, "evaluation.kl_from is 'ppo'"),
    ],
)
def test_what_cannot_be_compared_is_refused(other, options: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        compare({"base": BASE, "sft": other}, **options)


def test_nothing_to_compare() -> None:
    for responses in ({}, {"base": []}):
        with pytest.raises(DataError, match="nothing to compare"):
            compare(responses)


def test_files_and_table(tmp_path: Path) -> None:
    comparison = compare({"base": BASE, "[sft]": SFT}, kl_from="[sft]")
    comparison.write(tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["baseline"] == "base" and results["kl_from"] == "[sft]" and results["prompts"] == 4
    assert results["rows"]["base"] == comparison.rows["base"]
    samples = read_samples(tmp_path / "samples.jsonl")
    assert [(row["prompt"], row["model"]) for row in samples[:3]] == [("p0", "base"), ("p0", "[sft]"), ("p1", "base")]
    expected = {"model", "prompt", "response", "tokens", "finish_reason", "reward", "rule_score", "kl"}
    assert set(samples[0]) == expected and set(samples[1]) == expected - {"kl"}
    assert not list(tmp_path.glob("*.tmp"))
    stream = io.StringIO()
    comparison.print(Console(file=stream, width=80))
    table = stream.getvalue()
    assert "[sft]" in table and "rule score" in table and "win rate, reward model" in table and "62%" in table


def test_judges() -> None:
    short, long = response("p", "a", 5, "stop", 1.0, 0.5), response("p", "b", 9, "stop", 2.0, 0.5)
    assert rule_judge()("p", short, long) == 0.5
    assert reward_model_judge()("p", short, long) == 0.0
    assert reward_model_judge()("p", long, short) == 1.0
    assert reward_model_judge(tie_margin=1.0)("p", long, short) == 0.5
    with pytest.raises(DataError, match="has no rule_score"):
        rule_judge()("p", short, replace(long, rule_score=None))


def test_a_judge_that_favours_a_position_gives_ties() -> None:
    a, b = response("p", "a", 5, "stop", 1.0, 0.5), response("p", "b", 9, "stop", 2.0, 0.5)
    asked: list[str] = []

    def first_wins(prompt: str, one: EvaluatedResponse, other: EvaluatedResponse) -> float:
        asked.append(one.response)
        return 1.0

    assert judge_both_ways(first_wins, "p", a, b) == 0.5
    assert asked == ["a", "b"]
    assert judge_both_ways(lambda *_: 0.75, "p", a, b) == 0.5
    with pytest.raises(DataError, match=r"a judge returned 2.0; a preference lies in \[0, 1\]"):
        judge_both_ways(lambda *_: 2.0, "p", a, b)


def test_the_concise_rule_as_a_judge() -> None:
    rule = get_rule("concise")

    def score(one: EvaluatedResponse) -> float:
        messages = ({"role": "user", "content": one.prompt},)
        return rule(RewardRequest(messages, one.response, one.finish_reason, one.num_tokens))["score"]

    finished = EvaluatedResponse(0, "Name a fruit.", "An apple is a fruit that many people like.", 12, "stop")
    rambling = EvaluatedResponse(0, "Name a fruit.", "Well I think that I think that I think that", 48, "length")
    assert judge_both_ways(ScoreJudge(score), "Name a fruit.", finished, rambling) == 1.0
    assert judge_both_ways(ScoreJudge(score), "Name a fruit.", rambling, finished) == 0.0


def test_own_judges_take_the_place_of_the_default_ones() -> None:
    shorter = ScoreJudge(lambda one: -float(one.num_tokens))
    comparison = compare({"base": BASE, "sft": SFT}, judges={"shorter": shorter})
    row = comparison.rows["sft"]
    assert row["win_rate_vs_base_by_shorter"] == row["win_rate_vs_base"] == 0.875
    assert "win_rate_vs_base_by_rule" not in row
    stream = io.StringIO()
    comparison.print(Console(file=stream, width=80))
    assert "win rate, shorter" in stream.getvalue()

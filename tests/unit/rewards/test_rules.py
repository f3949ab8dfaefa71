"""The concise rule: every part on its own, the combination by hand, and its range."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aligner.errors import ConfigError
from aligner.rewards.protocol import RewardRequest
from aligner.rewards.rules import (
    CONCISE_WEIGHTS,
    clean_score,
    concise,
    distinct_score,
    get_rule,
    is_finished,
    is_non_empty,
    length_score,
)


def request(response: str, finish_reason: str = "stop", num_tokens: int = 16) -> RewardRequest:
    return RewardRequest(
        messages=({"role": "user", "content": "Hello?"},),
        response=response,
        finish_reason=finish_reason,
        num_tokens=num_tokens,
    )


@pytest.mark.parametrize(
    ("text", "score"), [("", 0), ("  \n", 0), ("...!?", 0), ("a", 1), (" 7.", 1), ("こんにちは", 1)]
)
def test_non_empty(text: str, score: float) -> None:
    assert is_non_empty(text) == score


@pytest.mark.parametrize(("reason", "score"), [("stop", 1), ("length", 0), ("abort", 0)])
def test_finished(reason: str, score: float) -> None:
    assert is_finished(reason) == score


@pytest.mark.parametrize(
    ("tokens", "score"),
    [(0, 0), (1, 0.125), (4, 0.5), (8, 1), (20, 1), (32, 1), (48, 0.75), (64, 0.5), (80, 0.25), (96, 0), (500, 0)],
)
def test_length(tokens: int, score: float) -> None:
    assert length_score(tokens) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("", 0),
        ("yes", 1),
        ("yes Yes", 0.5),  # two words, one distinct
        ("one two three four", 1),
        ("a b a b a b", 0.5),  # trigrams aba bab aba bab: 2 of 4
        ("no no no no no", pytest.approx(1 / 3)),  # three trigrams, one distinct
        ("The cat sat. the cat sat.", pytest.approx(3 / 4)),  # 4 trigrams, the last repeats the first
    ],
)
def test_distinct(text: str, score: float) -> None:
    assert distinct_score(text) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("", 1),
        ("A clean line.\n\tAnother, ünïcode 好 😀.", 1),
        ("a" * 39 + "\x00", 0),  # a run of 39: 34 beyond the fifth, and a control character
        ("abcde" * 7 + "abcd\x07", pytest.approx(0.75)),  # 1 of 40: 1 - 10 / 40
        ("abcde" * 7 + "abcd\N{REPLACEMENT CHARACTER}", pytest.approx(0.75)),
        ("abcde" * 7 + "abcd\ue000", pytest.approx(0.75)),  # private use
        ("abcde" * 6 + "abcd======", pytest.approx(0.75)),  # a run of six: one too many of 40
        ("ab-----", 1),  # a run of five is fine
        ("!!!!!!!!!!", 0),
    ],
)
def test_clean(text: str, score: float) -> None:
    assert clean_score(text) == score


def test_concise_by_hand() -> None:
    # finished, 16 tokens, three distinct trigrams of three, clean: 0.4 + 0.3 + 0.2 + 0.1
    assert concise(request("Paris is the capital of France.")) == {
        "non_empty": 1.0,
        "finished": 1.0,
        "length": 1.0,
        "distinct": 1.0,
        "clean": 1.0,
        "score": pytest.approx(1.0),
    }
    # cut off at 64 tokens: 0 + 0.3 * 0.5 + 0.2 * 0.5 + 0.1
    assert concise(request("a b a b a b", "length", 64))["score"] == pytest.approx(0.35)
    # no letter at all: 0, whatever the rest says
    assert concise(request("-- --"))["score"] == 0.0


def test_weights_add_up_to_one() -> None:
    assert sum(CONCISE_WEIGHTS.values()) == pytest.approx(1.0)


@given(text=st.text(max_size=60), reason=st.sampled_from(["stop", "length", "abort"]), tokens=st.integers(0, 200))
def test_every_part_and_the_score_are_in_range_and_repeatable(text: str, reason: str, tokens: int) -> None:
    parts = concise(request(text, reason, tokens))
    assert all(0.0 <= value <= 1.0 + 1e-12 for value in parts.values())
    assert parts == concise(request(text, reason, tokens))


def test_a_worse_part_never_raises_the_score() -> None:
    good = concise(request("A short and finished answer."))["score"]
    for worse in (
        request("A short and finished answer.", "length"),
        request("A short and finished answer.", num_tokens=90),
        request("A short and A short and A short and"),
        request("A short and finished answer.\x00\x00"),
        request(""),
    ):
        assert concise(worse)["score"] < good


def test_unknown_rule_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no rule 'conscise'; did you mean 'concise'"):
        get_rule("conscise")

"""Pairs from labelled samples: which responses become one, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from aligner.errors import DataError
from aligner.rewards.pairs import label_pairs
from aligner.rewards.protocol import RewardRequest

ASKED = [{"role": "user", "content": "Which city?"}]


def by_length(request: RewardRequest) -> dict[str, float]:
    return {"score": request.num_tokens / 100}


def sample(response: str, tokens: int, finish: str = "stop", messages: Any = ASKED) -> dict[str, Any]:
    return {"messages": messages, "response": response, "finish_reason": finish, "tokens": tokens}


def label(*samples: dict[str, Any], margin: float = 0.05) -> list[dict[str, Any]]:
    return list(label_pairs([(f"s.jsonl:{i}", one) for i, one in enumerate(samples, 1)], by_length, margin))


def test_the_best_against_the_worst_of_each_conversation() -> None:
    longer = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello."}, *ASKED]
    pairs = label(
        sample("middle", 20),
        sample("short", 10),
        sample("other low", 1, messages=longer),  # ends with the same question, and is another conversation
        sample("long", 30, finish="length"),
        sample("other high", 9, messages=longer),
    )
    assert pairs == [
        {
            "prompt": ASKED,
            "chosen": "long",
            "rejected": "short",
            "chosen_truncated": True,
            "rejected_truncated": False,
            "chosen_score": 0.3,
            "rejected_score": 0.1,
        },
        {
            "prompt": longer,
            "chosen": "other high",
            "rejected": "other low",
            "chosen_truncated": False,
            "rejected_truncated": False,
            "chosen_score": 0.09,
            "rejected_score": 0.01,
        },
    ]


def test_a_cut_off_rejected_response_is_marked() -> None:
    (pair,) = label(sample("a", 10, finish="length"), sample("b", 30))
    assert (pair["chosen_truncated"], pair["rejected_truncated"]) == (False, True)


@pytest.mark.parametrize(
    "samples",
    [
        [sample("a", 10), sample("b", 10)],  # a tie
        [sample("a", 10), sample("b", 14)],  # closer than the margin of 0.05
        [sample("same", 10), sample(" same\n", 90)],  # equal texts
        [sample("a", 10), sample("  ", 90)],  # nothing to read
        [sample("alone", 10)],
        [],
    ],
)
def test_what_tells_no_preference_gives_no_pair(samples: list[dict[str, Any]]) -> None:
    with pytest.raises(DataError, match="scores differ by 0.05 or more; sample several responses a prompt"):
        label(*samples)
    far = [sample("x", 1, messages=[]), sample("y", 99, messages=[])]
    assert len(label(*samples, *far)) == 1


def test_the_margin_itself_is_enough() -> None:
    assert len(label(sample("a", 10), sample("b", 60), margin=0.5)) == 1


@pytest.mark.parametrize("field", ["messages", "response", "finish_reason", "tokens"])
def test_a_missing_field_is_named_with_its_place(field: str) -> None:
    bad = sample("b", 20)
    del bad[field]
    with pytest.raises(DataError, match=f"s.jsonl:2: field '{field}' is None; it must be a"):
        label(sample("a", 10), bad)

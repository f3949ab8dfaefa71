"""Preference pairs from sampled responses, labelled by a rule: the best against the worst response of each prompt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from aligner.errors import DataError
from aligner.generation.engine import FINISH_STOP
from aligner.rewards.protocol import RewardRequest
from aligner.rewards.rules import Rule

_NEEDED = {"messages": list, "response": str, "finish_reason": str, "tokens": int}


def label_pairs(
    rows: Iterable[tuple[str, Mapping[str, Any]]], rule: Rule, min_margin: float
) -> Iterator[dict[str, Any]]:
    """Pairs of the responses in ``rows``: (place, row of ``aligner generate``), samples of one prompt in any order.

    Of each prompt the response with the highest score is chosen and the one with the lowest rejected, unless their
    scores are closer than ``min_margin`` or their texts are equal. A response that was cut off is marked
    (``chosen_truncated``, ``rejected_truncated``): it is trained on without an end-of-turn token, as it is scored.

    Raises DataError: a row lacks a field (names place and field), or no prompt gives a pair.
    """
    groups: dict[str, list[RewardRequest]] = {}
    for place, row in rows:
        request = _request(place, row)
        groups.setdefault(repr(request.messages), []).append(request)
    count = 0
    for requests in groups.values():
        scored = sorted(((rule(request)["score"], request) for request in requests), key=lambda pair: pair[0])
        (low, rejected), (high, chosen) = scored[0], scored[-1]
        if high - low < min_margin or chosen.response.strip() == rejected.response.strip():
            continue
        if not chosen.response.strip() or not rejected.response.strip():
            continue  # nothing to read
        count += 1
        yield {
            "prompt": list(chosen.messages),
            "chosen": chosen.response,
            "rejected": rejected.response,
            "chosen_truncated": chosen.finish_reason != FINISH_STOP,
            "rejected_truncated": rejected.finish_reason != FINISH_STOP,
            "chosen_score": round(high, 6),
            "rejected_score": round(low, 6),
        }
    if count == 0:
        raise DataError(
            f"none of {len(groups)} prompts has two different responses whose scores differ by {min_margin} or more; "
            "sample several responses a prompt (samples_per_prompt), or lower the margin"
        )


def _request(place: str, row: Mapping[str, Any]) -> RewardRequest:
    for name, kind in _NEEDED.items():
        if not isinstance(row.get(name), kind):
            raise DataError(
                f"{place}: field '{name}' is {row.get(name)!r}; it must be a {kind.__name__}, as `aligner generate` "
                "writes it"
            )
    return RewardRequest(
        messages=tuple(row["messages"]),
        response=row["response"],
        finish_reason=row["finish_reason"],
        num_tokens=row["tokens"],
    )

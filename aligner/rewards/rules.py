"""Transparent rules that score a response from its text, finish reason and token count alone.

They label preference pairs and judge in evaluations. Deterministic; every part is a number in [0, 1], so a score can
always be explained.

``concise`` rewards a response that ends by itself, is short but not curt, does not repeat itself and is clean text:

    score = non_empty * (0.4 * finished + 0.3 * length + 0.2 * distinct + 0.1 * clean)          in [0, 1]

* ``non_empty``: 1 if the response holds a letter or digit, else 0 (and with it the score);
* ``finished``: 1 if the policy ended the response itself (finish reason ``stop``), else 0;
* ``length``: 1 from 8 to 32 tokens (the ending token included); below, tokens / 8; above, falling linearly to 0 at 96;
* ``distinct``: distinct word trigrams / word trigrams, case ignored (fewer than three words: distinct words / words);
* ``clean``: 1 minus ten times the share of degenerate characters, at least 0. Degenerate are control, unassigned,
  private-use and replacement characters (line feed, carriage return and tab are not), and every character after the
  fifth in a run of one and the same character.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Callable, Mapping

from aligner.errors import ConfigError
from aligner.generation.engine import FINISH_STOP
from aligner.rewards.protocol import RewardRequest

CONCISE_WEIGHTS = {"finished": 0.4, "length": 0.3, "distinct": 0.2, "clean": 0.1}
FULL_LENGTH_FROM = 8  # tokens
FULL_LENGTH_TO = 32
ZERO_LENGTH_AT = 96
NGRAM = 3
LONGEST_RUN = 5  # equal characters in a row
CLEAN_SLOPE = 10.0


def is_non_empty(text: str) -> float:
    """1.0 if ``text`` holds a letter or a digit of any script."""
    return float(any(character.isalnum() for character in text))


def is_finished(finish_reason: str) -> float:
    """1.0 if the policy ended the response itself."""
    return float(finish_reason == FINISH_STOP)


def length_score(num_tokens: int) -> float:
    """Soft band over the token count, in [0, 1]; see the module docstring."""
    if num_tokens < FULL_LENGTH_FROM:
        return max(num_tokens, 0) / FULL_LENGTH_FROM
    if num_tokens <= FULL_LENGTH_TO:
        return 1.0
    return max(ZERO_LENGTH_AT - num_tokens, 0) / (ZERO_LENGTH_AT - FULL_LENGTH_TO)


def distinct_score(text: str) -> float:
    """Distinct n-grams over all n-grams of words, in [0, 1]; no words: 0."""
    words = text.lower().split()
    if not words:
        return 0.0
    n = NGRAM if len(words) >= NGRAM else 1
    ngrams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(ngrams)) / len(ngrams)


def clean_score(text: str) -> float:
    """How free of degenerate characters ``text`` is, in [0, 1]; no text: 1."""
    degenerate = run = 0
    previous = ""
    for character in text:
        run = run + 1 if character == previous else 1
        previous = character
        odd = unicodedata.category(character) in ("Cc", "Cn", "Co", "Cs") and character not in "\n\r\t"
        degenerate += odd or character == "\N{REPLACEMENT CHARACTER}" or run > LONGEST_RUN
    return max(0.0, 1.0 - CLEAN_SLOPE * degenerate / len(text)) if text else 1.0


def concise(request: RewardRequest) -> dict[str, float]:
    """The parts of the ``concise`` rule and, under ``score``, their combination in [0, 1]."""
    parts = {
        "non_empty": is_non_empty(request.response),
        "finished": is_finished(request.finish_reason),
        "length": length_score(request.num_tokens),
        "distinct": distinct_score(request.response),
        "clean": clean_score(request.response),
    }
    score = parts["non_empty"] * sum(weight * parts[name] for name, weight in CONCISE_WEIGHTS.items())
    return {**parts, "score": score}


Rule = Callable[[RewardRequest], Mapping[str, float]]

RULES: dict[str, Rule] = {"concise": concise}


def get_rule(name: str) -> Rule:
    """The built-in rule called ``name``. ConfigError names the nearest one."""
    if name not in RULES:
        near = difflib.get_close_matches(name, RULES, n=1, cutoff=0.0)[0]
        raise ConfigError(f"there is no rule {name!r}; did you mean {near!r}? Built in: {', '.join(sorted(RULES))}")
    return RULES[name]

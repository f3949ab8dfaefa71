"""The data that travels with the package: readable, unique, disjoint, and within the demo's token budget."""

from __future__ import annotations

import itertools
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(str(resources.files("aligner.data"))) / "builtin"
PROMPTS = ("prompts_train.jsonl", "prompts_heldout.jsonl")
DEMONSTRATIONS = ("demonstrations.jsonl", "demonstrations_validation.jsonl")
MODEL = Path(__file__).parents[3] / "models" / "smollm2-135m-instruct"

TRIGRAM_OVERLAP = 0.4  # above: near-duplicates
WORD_OVERLAP = 0.65


def read(name: str) -> list[dict[str, Any]]:
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def prompts_of(name: str) -> list[str]:
    rows = read(name)
    return [row["prompt"] if name in PROMPTS else row["messages"][0]["content"] for row in rows]


def words(text: str) -> list[str]:
    return re.findall(r"[\w']+", text.lower())


def overlap(a: set[Any], b: set[Any]) -> float:
    return len(a & b) / max(1, len(a | b))


def near_duplicates(first: str, second: str) -> bool:
    a, b = words(first), words(second)
    trigrams = [set(zip(w, w[1:], w[2:], strict=False)) for w in (a, b)]
    return overlap(trigrams[0], trigrams[1]) > TRIGRAM_OVERLAP or overlap(set(a), set(b)) > WORD_OVERLAP


@pytest.mark.parametrize(
    ("name", "fewest", "most"),
    [
        ("prompts_train.jsonl", 300, 600),
        ("prompts_heldout.jsonl", 96, 96),
        ("demonstrations.jsonl", 90, 120),
        ("demonstrations_validation.jsonl", 12, 12),
    ],
)
def test_counts(name: str, fewest: int, most: int) -> None:
    assert fewest <= len(read(name)) <= most


@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_fields(name: str) -> None:
    for row in read(name):
        assert sorted(row) == ["domain", "prompt"]
        assert row["prompt"] == row["prompt"].strip() and 3 <= len(words(row["prompt"])) <= 40
    assert len({row["domain"] for row in read(name)}) >= 10


@pytest.mark.parametrize("name", DEMONSTRATIONS)
def test_demonstrations_are_finished_answers(name: str) -> None:
    for row in read(name):
        assert sorted(row) == ["messages"]
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        answer = row["messages"][1]["content"]
        assert answer == answer.strip() and 3 <= len(words(answer)) <= 40, answer
        assert answer.rstrip('"').endswith((".", "!", "?")), answer
        assert len(re.findall(r"[.!?](?:\s|$)", answer)) <= 3, answer


def test_prompts_are_unique_and_disjoint_across_files() -> None:
    everything = [(name, prompt) for name in (*PROMPTS, *DEMONSTRATIONS) for prompt in prompts_of(name)]
    seen: dict[str, str] = {}
    for name, prompt in everything:
        key = " ".join(words(prompt))
        assert key not in seen, f"{name} and {seen[key]} both hold {prompt!r}"
        seen[key] = name


def test_no_near_duplicates_across_files() -> None:
    for first, second in itertools.combinations((*PROMPTS, *DEMONSTRATIONS), 2):
        pairs = itertools.product(prompts_of(first), prompts_of(second))
        assert [pair for pair in pairs if near_duplicates(*pair)] == [], f"{first} and {second}"


def test_near_duplicates_are_found() -> None:
    assert near_duplicates("What is the capital of France?", "what is the capital of  Spain")
    assert near_duplicates('Use the word "curious" in a sentence.', 'Use the word "brave" in a sentence.')
    assert not near_duplicates("Why is the sky blue during the day?", "How do bees make honey?")


def test_no_opening_dominates() -> None:
    """The prompts are not one template filled in many times."""
    for name in PROMPTS:
        prompts = prompts_of(name)
        openings = [" ".join(words(prompt)[:3]) for prompt in prompts]
        assert max(openings.count(opening) for opening in set(openings)) <= max(6, 0.05 * len(prompts)), name


def test_token_budget() -> None:
    """One epoch of the demonstrations is at most 11,000 tokens; answers fit into 48 new tokens with their end."""
    transformers = pytest.importorskip("transformers")
    if not (MODEL / "tokenizer.json").is_file():
        pytest.skip("the converted SmolLM2 is not there (make demo prepares it)")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    total = 0
    for row in read("demonstrations.jsonl"):
        total += len(tokenizer(tokenizer.apply_chat_template(row["messages"], tokenize=False)).input_ids)
        assert len(tokenizer(row["messages"][1]["content"]).input_ids) + 1 <= 44, row
    assert total <= 11_000
    for name in PROMPTS:
        assert max(len(tokenizer(prompt).input_ids) for prompt in prompts_of(name)) <= 48

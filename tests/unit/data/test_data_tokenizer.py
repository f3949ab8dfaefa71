"""The invariants of ``aligner.data.tokenizer``, on templates of every kind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from aligner.data.tokenizer import Tokenizer, load_tokenizer
from aligner.errors import DataError, ModelError

GetTokenizer = Callable[[str], Tokenizer]

ONE_TURN = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
]
THREE_TURNS = [
    *ONE_TURN,
    {"role": "user", "content": "The capital of France is Paris."},  # the user repeats the answer
    {"role": "assistant", "content": "\n  Hello 世界\n\n1. one\n2. two  "},  # white space at both ends
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "assistant"},  # a word of the template
]
KINDS = ["chatml", "chatml_other_eos", "pad_is_eos", "llama3", "mistral", "qwen3", "no_end", "no_template"]
ALL = [*KINDS, "no_template_bos", "chatml+spaces", "llama3+spaces", "mistral+spaces", "no_template_bos+spaces"]


def learned(tokenizer: Tokenizer, ids: list[int], mask: list[bool]) -> list[str]:
    """Text of each run of learned tokens."""
    runs: list[list[int]] = []
    for i, (token, on) in enumerate(zip(ids, mask, strict=True)):
        if on and (i == 0 or not mask[i - 1]):
            runs.append([])
        if on:
            runs[-1].append(token)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


@pytest.mark.parametrize("kind", ALL)
def test_a_prompt_is_a_prefix_of_the_conversation(kind: str, tokenizer_of: GetTokenizer) -> None:
    tokenizer = tokenizer_of(kind)
    ids, mask = tokenizer.encode_conversation(THREE_TURNS)
    starts = [i for i in range(1, len(ids)) if mask[i] and not mask[i - 1]]
    prompts = [tokenizer.encode_messages(THREE_TURNS[:turn]) for turn in (1, 3, 5)]
    assert [len(prompt) for prompt in prompts] == starts
    for prompt in prompts:
        assert ids[: len(prompt)] == prompt


@pytest.mark.parametrize("kind", ALL)
def test_bos_once_or_never_and_the_end_of_turn_learned(kind: str, tokenizer_of: GetTokenizer) -> None:
    tokenizer = tokenizer_of(kind)
    ids, mask = tokenizer.encode_conversation(THREE_TURNS)
    if tokenizer.bos_id is not None:
        assert ids.count(tokenizer.bos_id) == 1 and ids[0] == tokenizer.bos_id
        assert tokenizer.encode_messages(THREE_TURNS[:3]).count(tokenizer.bos_id) == 1
    assert mask[-1] and ids[-1] in tokenizer.stop_token_ids
    assert ids[-1] == tokenizer.end_of_turn_id
    assert tokenizer.eos_id in tokenizer.stop_token_ids


def test_chatml_masks_by_hand(tokenizer_of: GetTokenizer) -> None:
    tokenizer = tokenizer_of("chatml")
    ids, mask = tokenizer.encode_conversation(THREE_TURNS)
    assert learned(tokenizer, ids, mask) == [
        "The capital of France is Paris.<|im_end|>",
        "\n  Hello 世界\n\n1. one\n2. two  <|im_end|>",
        "assistant<|im_end|>",
    ]
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode_messages(ONE_TURN[:1]), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama3", "The capital of France is Paris.<|eot|>"),
        ("mistral", " The capital of France is Paris. </s>"),
        ("qwen3", "<think>\n\n</think>\n\nThe capital of France is Paris.<|im_end|>"),
        ("no_end", "The capital of France is Paris.</s>"),
        ("no_template", " The capital of France is Paris.</s>"),
        ("chatml_other_eos", "The capital of France is Paris.<|im_end|>"),
    ],
)
def test_what_is_learned_in_one_turn(kind: str, expected: str, tokenizer_of: GetTokenizer) -> None:
    tokenizer = tokenizer_of(kind)
    assert learned(tokenizer, *tokenizer.encode_conversation(ONE_TURN)) == [expected]


def test_templates_that_treat_earlier_turns_otherwise(tokenizer_of: GetTokenizer) -> None:
    """Qwen3 writes the empty thought before the last answer only: earlier answers are learned without it."""
    tokenizer = tokenizer_of("qwen3")
    runs = learned(tokenizer, *tokenizer.encode_conversation(THREE_TURNS))
    assert runs[0] == "The capital of France is Paris.<|im_end|>"
    assert runs[2] == "<think>\n\n</think>\n\nassistant<|im_end|>"
    rewritten = [ONE_TURN[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nParis."}, *THREE_TURNS[4:]]
    with pytest.raises(DataError, match="does not render assistant message 1 as written"):
        tokenizer.encode_conversation(rewritten)
    assert tokenizer.encode_messages(rewritten[:3])  # as a prompt it is fine


def test_pieces_equal_the_whole_where_a_tokenizer_puts_spaces(tokenizer_of: GetTokenizer) -> None:
    """No stray space at the borders: the ids are those of the rendered text tokenised in one go."""
    tokenizer = tokenizer_of("mistral+spaces")
    ids, _ = tokenizer.encode_conversation(ONE_TURN)
    whole = tokenizer.encode("<s>[INST] What is the capital of France? [/INST] The capital of France is Paris. </s>")
    assert ids == whole


def test_white_space_borders_are_tokenised_as_when_sampling(tokenizer_of: GetTokenizer) -> None:
    """In one go the prompt's last new line would merge with the answer's first ones."""
    tokenizer = tokenizer_of("chatml")
    messages = [ONE_TURN[0], {"role": "assistant", "content": "\n\nParis"}]
    ids, mask = tokenizer.encode_conversation(messages)
    prompt = tokenizer.encode_messages(messages[:1])
    assert ids[: len(prompt)] == prompt and mask.index(True) == len(prompt)
    assert tokenizer.decode(ids[len(prompt) :]) == "\n\nParis"


def test_stop_ids_come_from_eos_template_and_generation_config(
    tokenizer_of: GetTokenizer, tokenizer_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    tokenizer = tokenizer_of("chatml_other_eos")
    assert set(tokenizer.stop_token_ids) == {tokenizer.eos_id, tokenizer.end_of_turn_id}
    assert tokenizer.eos_id != tokenizer.end_of_turn_id
    copy = shutil.copytree(tokenizer_directory("chatml"), tmp_path / "copy")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert set(load_tokenizer(copy).stop_token_ids) == {3, 4, tokenizer_of("chatml").eos_id}
    (copy / "generation_config.json").write_text("[1]")
    with pytest.raises(ModelError, match="generation_config.json"):
        load_tokenizer(copy)


def test_pad_equal_to_eos_changes_nothing(tokenizer_of: GetTokenizer) -> None:
    same, other = tokenizer_of("pad_is_eos"), tokenizer_of("chatml")
    assert same.pad_id == same.eos_id and other.pad_id != other.eos_id
    assert same.encode_conversation(THREE_TURNS) == other.encode_conversation(THREE_TURNS)


def test_fallback_template(tokenizer_of: GetTokenizer) -> None:
    tokenizer = tokenizer_of("no_template")
    assert not tokenizer.has_chat_template
    system = {"role": "system", "content": "Be brief."}
    text = tokenizer.decode(tokenizer.encode_messages([system, *THREE_TURNS[:3]]), skip_special_tokens=False)
    assert text == (
        "System: Be brief.\nUser: What is the capital of France?\nAssistant: The capital of France is Paris.</s>\n"
        "User: The capital of France is Paris.\nAssistant:"
    )
    with_bos = tokenizer_of("no_template_bos")
    assert with_bos.encode_messages(ONE_TURN[:1])[0] == with_bos.bos_id


def test_the_date_does_not_change_the_ids(tokenizer_of: GetTokenizer) -> None:
    tokenizer = tokenizer_of("llama3")
    first = tokenizer.encode_messages(ONE_TURN[:1])
    time.sleep(0.01)  # the template would print microseconds
    assert tokenizer.encode_messages(ONE_TURN[:1]) == first


def test_encode_adds_nothing_and_decode_gives_it_back(tokenizer_of: GetTokenizer) -> None:
    tokenizer = tokenizer_of("llama3")
    text = "Hello there, 12 世界 ☺ \n\n  x"
    assert tokenizer.bos_id not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_fingerprint_tells_tokenizers_and_templates_apart(
    tokenizer_of: GetTokenizer, tokenizer_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = load_tokenizer(shutil.copytree(tokenizer_directory("chatml"), tmp_path / "copy"))
    assert copy.fingerprint() == tokenizer_of("chatml").fingerprint()
    different = ["chatml", "chatml_other_eos", "llama3", "qwen3", "no_end", "no_template", "chatml+spaces"]
    assert len({tokenizer_of(kind).fingerprint() for kind in different}) == len(different)


def test_ids_beyond_the_vocabulary_are_refused(tokenizer_of: GetTokenizer) -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.check_vocabulary(tokenizer.vocab_size)
    with pytest.raises(
        ModelError, match=rf"id {tokenizer.vocab_size - 1}, .*vocab_size is {tokenizer.vocab_size - 1};"
    ):
        tokenizer.check_vocabulary(tokenizer.vocab_size - 1)


def test_unusable_tokenizers(tokenizer_of: GetTokenizer, tmp_path: Path) -> None:
    for kind, message in {"no_eos": "eos_token is not set", "thinks_ahead": "does not render an assistant"}.items():
        with pytest.raises(ModelError, match=message):
            tokenizer_of(kind)
    with pytest.raises(ModelError, match="no such directory"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="no usable tokenizer") as failure:
        load_tokenizer(tmp_path)
    assert "\n" not in str(failure.value)


def test_conversations_the_template_refuses(tokenizer_of: GetTokenizer) -> None:
    with pytest.raises(DataError, match="field 'messages'.*refuses them: roles must alternate"):
        tokenizer_of("mistral").encode_conversation([ONE_TURN[0], *ONE_TURN])
    with pytest.raises(DataError, match="no assistant message"):
        tokenizer_of("chatml").encode_conversation(ONE_TURN[:1])


def test_importing_the_package_leaves_transformers_alone() -> None:
    modules = ["datasets", "formats", "jsonl", "loader", "packing", "plugin", "samples", "tokenizer"]
    code = "; ".join(f"import aligner.data.{name}" for name in modules)
    code += "; import sys; sys.exit('transformers' in sys.modules or 'tokenizers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])

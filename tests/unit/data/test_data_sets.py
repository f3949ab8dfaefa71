"""Row formats, limits, filters and bad rows of the three data sets."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from aligner.data.datasets import PreferenceDataset, PromptDataset, TextDataset
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError

GetTokenizer = Callable[[str], Tokenizer]
WriteRows = Callable[..., Path]

USER = {"role": "user", "content": "Hello there"}
ANSWER = {"role": "assistant", "content": "I am fine."}
KINDS: dict[str, type[Any]] = {"text": TextDataset, "preference": PreferenceDataset, "prompt": PromptDataset}


def check(kind: str, path: Path, tokenizer: Tokenizer, limit: int = 200, **options: Any) -> Any:
    dataset = KINDS[kind](str(path), tokenizer, limit, **options)
    dataset.check()
    return dataset


# --------------------------------------------------------------------------- formats


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [USER, ANSWER]}, [USER, ANSWER]),
        ({"prompt": "Hello there", "response": "I am fine."}, [USER, ANSWER]),
        ({"prompt": "Hello there", "completion": "I am fine."}, [USER, ANSWER]),
        ({"prompt": [USER], "response": "I am fine."}, [USER, ANSWER]),
        ({"instruction": "Hello there", "input": "", "output": "I am fine."}, [USER, ANSWER]),
        (
            {"instruction": "Hello", "input": "there", "output": "I am fine."},
            [{"role": "user", "content": "Hello\n\nthere"}, ANSWER],
        ),
        (
            {"system": "Be kind.", "prompt": "Hello there", "response": "I am fine."},
            [{"role": "system", "content": "Be kind."}, USER, ANSWER],
        ),
        (
            {"conversations": [{"from": "human", "value": "Hello there"}, {"from": "gpt", "value": "I am fine."}]},
            [USER, ANSWER],
        ),
    ],
)
def test_text_formats(
    row: dict[str, Any], messages: list[dict[str, str]], tokenizer_of: GetTokenizer, write_rows: WriteRows
) -> None:
    tokenizer = tokenizer_of("chatml")
    dataset = check("text", write_rows({**row, "domain": "talk"}), tokenizer)
    sample = dataset[0]
    ids, mask = tokenizer.encode_conversation(messages)
    assert sample.token_ids.tolist() == ids and sample.token_ids.dtype == torch.int64
    assert sample.loss_mask.tolist() == mask and sample.loss_mask.dtype == torch.bool
    assert sample.source.endswith("rows.jsonl:1")
    assert sample.metadata["domain"] == "talk" and not {"messages", "prompt", "response", "output"} & set(
        sample.metadata
    )


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hello there", "chosen": "I am fine.", "rejected": "Go away."},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "Go away."}]},
        {"instruction": "Hello there", "input": "", "output": "x", "chosen": "I am fine.", "rejected": "Go away."},
        {
            "prompt": "Hello there",  # whole conversations as well: these decide
            "chosen": [USER, ANSWER],
            "rejected": [USER, {"role": "assistant", "content": "Go away."}],
        },
    ],
)
def test_preference_formats(row: dict[str, Any], tokenizer_of: GetTokenizer, write_rows: WriteRows) -> None:
    tokenizer = tokenizer_of("chatml")
    sample = check("preference", write_rows(row), tokenizer)[0]
    prompt = tokenizer.encode_messages([USER])
    assert sample.prompt_length == len(prompt)
    for ids, answer in ((sample.chosen_ids, "I am fine."), (sample.rejected_ids, "Go away.")):
        assert ids[: len(prompt)].tolist() == prompt
        assert tokenizer.decode(ids[len(prompt) :].tolist(), skip_special_tokens=False) == answer + "<|im_end|>"


@pytest.mark.parametrize(
    ("row", "metadata"),
    [
        ({"prompt": "Hello there", "domain": "talk"}, {"domain": "talk"}),
        ({"messages": [USER]}, {}),
        ({"messages": [USER, ANSWER]}, {"reference": "I am fine."}),
        ({"instruction": "Hello there", "output": "I am fine."}, {"output": "I am fine."}),
    ],
)
def test_prompt_formats(
    row: dict[str, Any], metadata: dict[str, Any], tokenizer_of: GetTokenizer, write_rows: WriteRows
) -> None:
    tokenizer = tokenizer_of("chatml")
    sample = check("prompt", write_rows(row), tokenizer)[0]
    assert sample.prompt_ids.tolist() == tokenizer.encode_messages([USER], add_generation_prompt=True)
    assert sample.messages == (USER,) and sample.text == "Hello there"
    assert sample.metadata == metadata


def test_pairs_that_part_in_the_middle_of_a_conversation(tokenizer_of: GetTokenizer, write_rows: WriteRows) -> None:
    other = {"role": "assistant", "content": "Go away."}
    row = {"chosen": [USER, ANSWER, USER, ANSWER], "rejected": [USER, ANSWER, USER, other]}
    early = {"chosen": [USER, ANSWER, USER, ANSWER], "rejected": [USER, ANSWER]}
    dataset = check("preference", write_rows(row, early), tokenizer_of("chatml"))
    tokenizer = tokenizer_of("chatml")
    assert dataset[0].prompt_length == len(tokenizer.encode_messages([USER, ANSWER, USER]))
    assert dataset[1].prompt_length == len(tokenizer.encode_messages([USER]))


# --------------------------------------------------------------------------- bad rows

GOOD_ROWS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "Hello", "response": "I am fine."},
    "preference": {"prompt": "Hello", "chosen": "I am fine.", "rejected": "Go away."},
    "prompt": {"prompt": "Hello"},
}


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("text", '{"prompt": "Hello",', "malformed JSON"),
        ("text", "[1]", "a row must be a JSON object, found list"),
        ("text", {"prompt": "Hello"}, "field 'response': missing"),
        ("text", {"instruction": "Hello"}, "field 'output': missing"),
        (
            "text",
            {"question": "a", "answer": "b"},
            "field 'prompt': missing; a row needs one of .*found question, answer",
        ),
        ("text", {"prompt": "Hello", "response": 7}, "field 'response': must be a string, found int"),
        ("text", {"prompt": None, "response": "a"}, "field 'prompt': must be a string, found NoneType"),
        ("text", {"prompt": "Hello", "response": " "}, "field 'response': is empty"),
        ("text", {"instruction": "Hello", "input": 3, "output": "a"}, "field 'input': must be a string"),
        ("text", '{"prompt": "Hello", "response": "\\ud83d"}', "field 'response': half of a surrogate pair"),
        ("text", {"messages": []}, "field 'messages': must be a list of messages, found an empty list"),
        ("text", {"messages": "Hello"}, "field 'messages': must be a list of messages, found str"),
        ("text", {"messages": ["Hello"]}, r"field 'messages\[0\]': must be an object"),
        ("text", {"messages": [USER, {"role": "assistant"}]}, r"field 'messages\[1\].content': missing"),
        ("text", {"messages": [{"role": "bot", "content": "a"}]}, r"field 'messages\[0\].role': 'bot' is not a role"),
        ("text", {"messages": [{"role": [], "content": "a"}]}, r"field 'messages\[0\].role': \[\] is not a role"),
        ("text", {"messages": [USER]}, "field 'messages': no assistant message"),
        ("text", {"messages": [ANSWER, USER, ANSWER]}, "field 'messages': begins with an assistant message"),
        (
            "text",
            {"conversations": [{"from": [], "value": "a"}]},
            r"field 'conversations\[0\].role': \[\] is not a role",
        ),
        ("preference", {"prompt": "Hello", "chosen": "a"}, "field 'rejected': missing"),
        ("preference", {"chosen": "a", "rejected": "b"}, "field 'prompt': missing"),
        ("preference", {"prompt": "Hello", "chosen": "a", "rejected": "a"}, "field 'rejected': equal to 'chosen'"),
        (
            "preference",
            {"chosen": [USER], "rejected": [USER, ANSWER]},
            "field 'chosen': the last message is from 'user'",
        ),
        (
            "preference",
            {"chosen": [{"role": "user", "content": "x"}, ANSWER], "rejected": [USER, ANSWER]},
            "field 'rejected': answers another prompt",
        ),
        ("prompt", {"text": "Hello"}, "field 'prompt': missing"),
        ("prompt", {"prompt": ""}, "field 'prompt': is empty"),
        ("prompt", {"messages": [{"role": "system", "content": "a"}]}, "field 'messages': no user message"),
    ],
)
def test_bad_rows_name_file_line_and_field(
    kind: str, row: Any, message: str, tokenizer_of: GetTokenizer, write_rows: WriteRows
) -> None:
    path = write_rows(GOOD_ROWS[kind], "", row, GOOD_ROWS[kind])
    with pytest.raises(DataError, match=rf"rows.jsonl:3: {message}") as failure:
        check(kind, path, tokenizer_of("chatml"))
    assert "\n" not in str(failure.value)


def test_equal_after_the_template_trimmed_it(tokenizer_of: GetTokenizer, write_rows: WriteRows) -> None:
    path = write_rows({"prompt": "Hello", "chosen": "Paris", "rejected": "Paris "})
    with pytest.raises(DataError, match=r"rows.jsonl:1: field 'rejected': has the same tokens as 'chosen'"):
        check("preference", path, tokenizer_of("llama3"))


def test_rows_the_template_refuses(tokenizer_of: GetTokenizer, write_rows: WriteRows) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl:1: field 'messages'.*roles must alternate"):
        check("text", write_rows({"messages": [USER, USER, ANSWER]}), tokenizer_of("mistral"))


def test_bad_options(tokenizer_of: GetTokenizer, write_rows: WriteRows) -> None:
    path = write_rows(GOOD_ROWS["text"])
    with pytest.raises(DataError, match="too_long is 'cut'; it must be drop or truncate"):
        check("text", path, tokenizer_of("chatml"), too_long="cut")
    with pytest.raises(DataError, match="length limit is 0 tokens"):
        check("text", path, tokenizer_of("chatml"), limit=0)


# --------------------------------------------------------------------------- limits and filters


def test_too_long_texts_are_dropped_or_cut_at_the_end(tokenizer_of: GetTokenizer, write_rows: WriteRows) -> None:
    tokenizer = tokenizer_of("chatml")
    short, long = {"prompt": "Hello", "response": "Paris"}, {"prompt": "Hello", "response": "Paris " * 40}
    endless = {"prompt": "Hello " * 60, "response": "Paris"}  # no answer is left within the limit
    path = write_rows(long, short, endless)
    dropped = check("text", path, tokenizer, 40)
    assert len(dropped) == 1 and dropped[0].source.endswith(":2")
    assert (dropped.report.rows, dropped.report.kept, dropped.report.dropped, dropped.report.truncated) == (3, 1, 2, 0)
    assert "2 dropped (longer than 40 tokens)" in dropped.report.summary()
    cut = check("text", path, tokenizer, 40, too_long="truncate")
    assert (cut.report.kept, cut.report.dropped, cut.report.truncated, cut.report.longest) == (2, 1, 1, 40)
    assert "1 truncated to 40 tokens" in cut.report.summary()
    whole = check("text", path, tokenizer, 1000)
    assert torch.equal(cut[0].token_ids, whole[0].token_ids[:40]) and cut[0].loss_mask.any()
    assert whole.report.tokens == sum(len(whole[i].token_ids) for i in range(3))
    exact = len(whole[0].token_ids)
    assert check("text", path, tokenizer, exact)[0].token_ids.numel() == exact


@pytest.mark.parametrize("kind", ["chatml", "llama3"])
def test_too_long_prompts_keep_bos_and_their_end(kind: str, tokenizer_of: GetTokenizer, write_rows: WriteRows) -> None:
    tokenizer = tokenizer_of(kind)
    path = write_rows({"prompt": "Hello there " * 40}, {"prompt": "Hello"})
    limit = len(tokenizer.encode_messages([{"role": "user", "content": "Hello"}])) + 3
    assert len(check("prompt", path, tokenizer, limit)) == 1
    dataset = check("prompt", path, tokenizer, limit, too_long="truncate")
    whole = check("prompt", path, tokenizer, 1000)[0].prompt_ids
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    assert dataset[0].prompt_ids.tolist() == bos + whole[len(bos) - limit :].tolist()
    assert dataset.report.truncated == 1


def test_too_long_pairs_lose_prompt_not_answer(tokenizer_of: GetTokenizer, write_rows: WriteRows) -> None:
    tokenizer = tokenizer_of("llama3")
    row = {"prompt": "Hello there " * 40, "chosen": "I am fine, thank you.", "rejected": "Go away."}
    answers = {"prompt": "Hello", "chosen": "Paris " * 80, "rejected": "Go away."}
    path = write_rows(row, answers)
    whole = check("preference", path, tokenizer, 1000)
    assert len(check("preference", path, tokenizer, 400)) == 2
    cut = check("preference", path, tokenizer, 50, too_long="truncate")
    assert (cut.report.kept, cut.report.dropped, cut.report.truncated) == (1, 1, 1)
    chosen, rejected, prompt = cut[0].chosen_ids, cut[0].rejected_ids, cut[0].prompt_length
    assert chosen.numel() == 50 and chosen[0] == rejected[0] == tokenizer.bos_id
    assert torch.equal(chosen[:prompt], rejected[:prompt])
    assert torch.equal(chosen[prompt:], whole[0].chosen_ids[whole[0].prompt_length :])
    assert torch.equal(rejected[prompt:], whole[0].rejected_ids[whole[0].prompt_length :])


def test_nothing_left_is_an_error(tokenizer_of: GetTokenizer, write_rows: WriteRows) -> None:
    path = write_rows(GOOD_ROWS["text"], GOOD_ROWS["text"])
    with pytest.raises(
        DataError, match="empty data set: of 2 rows, 0 were removed by the filter and 2 are longer than 3"
    ):
        check("text", path, tokenizer_of("chatml"), 3)
    with pytest.raises(DataError, match="2 were removed by the filter"):
        check("text", path, tokenizer_of("chatml"), filter=lambda row: False)
    with pytest.raises(DataError, match="rows.jsonl: empty data set"):
        check("text", write_rows(), tokenizer_of("chatml"))


def test_filter_sees_the_raw_row_before_it_is_checked(tokenizer_of: GetTokenizer, write_rows: WriteRows) -> None:
    path = write_rows(
        {"prompt": "Hello", "chosen": "a", "rejected": "a"}, {**GOOD_ROWS["preference"], "domain": "talk"}
    )
    dataset = check("preference", path, tokenizer_of("chatml"), filter=lambda row: row["chosen"] != row["rejected"])
    assert len(dataset) == 1 and dataset.report.filtered == 1 and dataset[0].metadata == {"domain": "talk"}
    assert "1 removed by the filter" in dataset.report.summary()
    with pytest.raises(DataError, match="rows.jsonl:1: the data filter failed: KeyError"):
        check("preference", path, tokenizer_of("chatml"), filter=lambda row: row["domain"])
    with pytest.raises(DataError, match="rows.jsonl:1: the data filter returned 'a'; it must return True or False"):
        check("preference", path, tokenizer_of("chatml"), filter=lambda row: row["chosen"])


def test_reading_is_lazy_and_counts_itself(tokenizer_of: GetTokenizer, write_rows: WriteRows, tmp_path: Path) -> None:
    dataset = TextDataset(str(tmp_path / "rows.jsonl"), tokenizer_of("chatml"), 50)  # not there yet
    write_rows(GOOD_ROWS["text"])
    assert dataset.report is None and len(dataset) == 1 and dataset.report is not None
    for outside in (1, -1):
        with pytest.raises(IndexError):
            dataset[outside]


# --------------------------------------------------------------------------- several ranks


def all_gather(world_size: int) -> Callable[[int], Callable[[Any], list[Any]]]:
    """An all-gather between threads."""
    slots: list[Any] = [None] * world_size
    barrier = Barrier(world_size, timeout=30)

    def of_rank(rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            slots[rank] = value
            barrier.wait()
            return list(slots)

        return gather

    return of_rank


def check_on_ranks(path: Path, tokenizer: Tokenizer, world_size: int) -> list[tuple[Any, str]]:
    """(data set, error) of every rank."""
    gather = all_gather(world_size)

    def one(rank: int) -> tuple[Any, str]:
        dataset = TextDataset(str(path), tokenizer, 60)
        try:
            dataset.check(rank, world_size, gather(rank))
        except DataError as error:
            return dataset, str(error)
        return dataset, ""

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one, range(world_size)))


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_ranks_share_the_check(world_size: int, tokenizer_of: GetTokenizer, write_rows: WriteRows) -> None:
    rows: list[Any] = [{"prompt": "Hello", "response": "Paris " * (i % 5 * 12 + 1)} for i in range(7)]
    path = write_rows(*rows)
    alone = check("text", path, tokenizer_of("chatml"), 60)
    for dataset, error in check_on_ranks(path, tokenizer_of("chatml"), world_size):
        assert not error and dataset.report == alone.report
        assert [dataset[i].source for i in range(len(dataset))] == [alone[i].source for i in range(len(alone))]
    rows[3], rows[4] = {"prompt": "Hello"}, "{"
    path = write_rows(*rows)
    errors = {error for _, error in check_on_ranks(path, tokenizer_of("chatml"), world_size)}
    assert len(errors) == 1 and "rows.jsonl:4: field 'response': missing" in errors.pop()
    path.unlink()
    errors = {error for _, error in check_on_ranks(path, tokenizer_of("chatml"), world_size)}
    assert len(errors) == 1 and "no such file" in errors.pop()


# --------------------------------------------------------------------------- real data


def test_real_files(shared_data: Path, tokenizer_of: GetTokenizer, tmp_path: Path) -> None:
    tokenizer = tokenizer_of("chatml")
    alpaca = check("text", shared_data / "sft/rasbt_instruction_1100.json", tokenizer, 256)
    assert alpaca.report.kept == 1100
    sharegpt = check("text", shared_data / "sft/fastchat_dummy_conversation.json", tokenizer, 1024)
    assert sharegpt.report.kept == 500
    pairs = shared_data / "rm/rasbt_preference_1100.json"
    with pytest.raises(DataError, match=r"rasbt_preference_1100.json:856: field 'rejected': equal to 'chosen'"):
        check("preference", pairs, tokenizer, 512)
    dataset = check("preference", pairs, tokenizer, 512, filter=lambda row: row["chosen"] != row["rejected"])
    assert dataset.report.filtered == 6 and dataset.report.kept == 1094
    prompts = check("prompt", shared_data / "prompts/self_instruct_user_oriented.jsonl", tokenizer, 128)
    assert prompts.report.kept + prompts.report.dropped == 252 and prompts.report.dropped > 0
    questions = check("prompt", shared_data / "eval/ifeval_input_data.jsonl", tokenizer, 2048)
    assert questions.report.kept == 541 and "instruction_id_list" in questions[0].metadata
    gsm8k = shared_data / "sft/gsm8k_train.jsonl"
    with pytest.raises(DataError, match=r"gsm8k_train.jsonl:1: field 'prompt': missing.*found question, answer"):
        check("text", gsm8k, tokenizer)
    renamed = tmp_path / "gsm8k.jsonl"
    rows = [json.loads(line) for line in gsm8k.read_text().splitlines()[:300]]
    renamed.write_text("".join(json.dumps({"prompt": r["question"], "response": r["answer"]}) + "\n" for r in rows))
    math = check("text", renamed, tokenizer, 4096)
    for i in (0, 299):
        sample = math[i]
        answer = tokenizer.decode(sample.token_ids[sample.loss_mask].tolist())
        assert answer == rows[i]["answer"]


def test_a_truncated_answer_has_no_end_of_turn(tokenizer_of: GetTokenizer, write_rows: WriteRows) -> None:
    row = {"prompt": "Hi", "chosen": "Yes, I am.", "rejected": "Well, it is"}
    tokenizer = tokenizer_of("chatml")
    whole = PreferenceDataset(str(write_rows(row, name="whole.jsonl")), tokenizer, 64)[0]
    cut = PreferenceDataset(str(write_rows({**row, "rejected_truncated": True})), tokenizer, 64)[0]
    assert whole.rejected_ids[-1] == tokenizer.end_of_turn_id
    assert cut.rejected_ids.tolist() == whole.rejected_ids[:-1].tolist()
    assert cut.chosen_ids.tolist() == whole.chosen_ids.tolist()
    assert "rejected_truncated" not in cut.metadata
    with pytest.raises(DataError, match="rejected_truncated"):
        PreferenceDataset(
            str(write_rows({**row, "rejected_truncated": "yes"}, name="bad.jsonl")), tokenizer, 64
        ).check()

"""Slots, admission and stop strings, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aligner.generation.engine import FINISH_LENGTH, FINISH_STOP, GenerationRequest, SamplingParams
from aligner.generation.kv_cache import KVCache
from aligner.generation.scheduler import Running, Scheduler, StopStrings

PIECES = ["", "a", "b", "ab", "c", "<", "end", ">", " x", "é"]  # id 0 is a special token: no text


def decode(token_ids: Sequence[int]) -> str:
    return "".join(PIECES[i] for i in token_ids)


def _running(request_id: int, prompt: tuple[int, ...], **params: object) -> Running:
    request = GenerationRequest(request_id, prompt, 0, SamplingParams(**params))  # type: ignore[arg-type]
    return Running(request, None, request.params.max_new_tokens)


def _scheduler(num_slots: int, prompts: Sequence[tuple[int, ...]]) -> Scheduler:
    scheduler = Scheduler(num_slots)
    scheduler.waiting.extend(_running(i, prompt) for i, prompt in enumerate(prompts))
    return scheduler


def test_admission_is_first_come_first_served_and_shares_equal_prompts() -> None:
    scheduler = _scheduler(4, [(1,), (2, 2), (1,), (3,), (2, 2), (4,)])
    first = scheduler.admit()
    assert (first.first, first.end, first.compute, first.copies) == (0, 4, (0, 1, 3), ((0, 2),))
    assert scheduler.admit().first == scheduler.admit().end == 4  # no slot is free
    assert scheduler.remove(1) == 3  # the last one moves into the hole
    assert [entry.request.request_id for entry in scheduler.running] == [0, 3, 2]
    assert scheduler.remove(2) is None
    second = scheduler.admit()
    # (2, 2) has gone with slot 1, so it is computed again.
    assert (second.first, second.end, second.compute, second.copies) == (2, 4, (2, 3), ())
    assert len(scheduler) == 4 and not scheduler.waiting


def test_a_running_prompt_is_copied() -> None:
    scheduler = _scheduler(2, [(7, 8), (9,), (7, 8)])
    scheduler.admit()
    scheduler.remove(1)
    admission = scheduler.admit()
    assert (admission.compute, admission.copies) == ((), ((0, 1),))


def test_removing_highest_first_keeps_the_others() -> None:
    scheduler = _scheduler(5, [(i,) for i in range(5)])
    scheduler.admit()
    for slot in (0, 3, 4):
        scheduler.running[slot].finish_reason = FINISH_STOP
    assert scheduler.finished_slots() == [4, 3, 0]
    moves = [(slot, scheduler.remove(slot)) for slot in scheduler.finished_slots()]
    assert moves == [(4, None), (3, None), (0, 2)]
    assert [entry.request.request_id for entry in scheduler.running] == [2, 1]


def test_withdraw_takes_waiting_requests_and_names_running_slots() -> None:
    scheduler = _scheduler(2, [(i,) for i in range(4)])
    scheduler.admit()
    taken, slots = scheduler.withdraw({0, 1, 3, 99})
    assert [entry.request.request_id for entry in taken] == [3] and slots == [1, 0]
    assert [entry.request.request_id for entry in scheduler.waiting] == [2]


def test_stop_strings_span_tokens() -> None:
    stops = StopStrings(decode, ["<end>", "bé"])
    assert not stops.completed_by_last([1, 5, 6])
    assert stops.completed_by_last([1, 5, 6, 7])
    assert not stops.completed_by_last([1, 5, 6, 7, 4])  # completed earlier, not by the last token
    assert stops.completed_by_last([5, 6, 7, 4, 5, 6, 7])  # and a second time
    assert stops.completed_by_last([3, 9])
    assert stops.completed_by_last([4] * 500 + [5, 0, 6, 0, 7])


def test_how_a_sequence_ends() -> None:
    def ended(ids: Sequence[int], max_new_tokens: int = 9, **params: object) -> tuple[int, str | None]:
        request = GenerationRequest(0, (1, 2), 0, SamplingParams(**params))  # type: ignore[arg-type]
        strings = request.params.stop_strings
        entry = Running(request, StopStrings(decode, strings) if strings else None, max_new_tokens)
        for token_id in ids:
            entry.append(token_id, -1.0)
            if entry.finish_reason is not None:
                break
        return len(entry.token_ids), entry.finish_reason

    assert ended([4, 4, 0, 4], stop_token_ids=(0,)) == (3, FINISH_STOP)
    assert ended([4, 4, 4, 4], max_new_tokens=3) == (3, FINISH_LENGTH)
    assert ended([4, 4, 0], max_new_tokens=3, stop_token_ids=(0,)) == (3, FINISH_STOP)
    assert ended([4, 5, 6, 7, 4], stop_strings=("<end>",)) == (4, FINISH_STOP)
    # A stop string below min_new_tokens does not end the response, nor does it afterwards.
    assert ended([5, 6, 7, 4, 4, 5, 6, 7, 4], stop_strings=("<end>",), min_new_tokens=5) == (8, FINISH_STOP)
    assert ended([4, 4]) == (2, None)


def test_cache_rows_views_and_copies() -> None:
    cache = KVCache(
        num_layers=2, num_slots=3, max_length=100, num_kv_heads=2, head_dim=4,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    cache.tensor.fill_(float("nan"))
    cache.ensure(2, 3)
    kv = torch.randn(3, 2, 2, 4)
    cache.write(1, torch.tensor([cache.row(0, 0), cache.row(0, 1), cache.row(1, 2)]), kv)
    keys, values = cache.read(1, 0, 2, 3)
    assert keys.shape == values.shape == (2, 2, 3, 4)
    assert torch.equal(keys[0, :, :2], kv[:2, :, 0].transpose(0, 1)) and torch.equal(values[1, :, 2], kv[2, :, 1])
    assert keys[1, :, :2].abs().sum() == 0  # cleared, so that masked positions hold numbers
    cache.ensure(3, 80)
    assert torch.equal(cache.read(1, 0, 1, 2)[0][0], kv[:2, :, 0].transpose(0, 1))  # growing keeps what is written
    assert cache.tensor[:, :, :80].isfinite().all()
    cache.copy(0, 2, 2)
    assert torch.equal(cache.read(1, 2, 1, 2)[1][0], kv[:2, :, 1].transpose(0, 1))

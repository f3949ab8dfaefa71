"""Packing: every sequence once, apart from each other, and back again."""

from __future__ import annotations

import random

import pytest
import torch

from aligner.data.packing import build_pack, gather_rows, pack_rows, pack_sequences, plan_packs


def sequences_of(lengths: list[int]) -> list[torch.Tensor]:
    return [torch.arange(length) + 100 * row + 1 for row, length in enumerate(lengths)]


def test_plan_by_hand() -> None:
    assert plan_packs([4, 6, 3, 5, 2], 10) == [[0, 1], [2, 3, 4]]
    assert plan_packs([5, 5, 5], 5) == [[0], [1], [2]]
    assert plan_packs([12, 3], 10) == [[0], [1]]  # longer than the capacity: a pack of its own
    assert plan_packs([], 10) == []


def test_build_by_hand() -> None:
    pack = build_pack(sequences_of([3, 1, 2]), [0, 2], multiple_of=4)
    assert pack.tokens_T.tolist() == [1, 2, 3, 201, 202, 0, 0, 0] and pack.tokens_T.dtype == torch.int64
    assert pack.position_ids_T.tolist() == [0, 1, 2, 0, 1, 0, 1, 2] and pack.position_ids_T.dtype == torch.int64
    assert pack.cu_seqlens.tolist() == [0, 3, 5, 8] and pack.cu_seqlens.dtype == torch.int32
    assert pack.rows == (0, 2) and pack.num_tokens == 5
    assert pack.segments == [(0, 0, 3), (2, 3, 5)]  # the padding is no segment of a row
    assert build_pack(sequences_of([3]), [0]).cu_seqlens.tolist() == [0, 3]


@pytest.mark.parametrize("multiple_of", [1, 2, 8])
def test_random_batches(multiple_of: int) -> None:
    generator = random.Random(5)
    for _ in range(50):
        lengths = [generator.randint(1, 40) for _ in range(generator.randint(1, 30))]
        capacity = generator.choice([16, 40, 64, 200])
        sequences = sequences_of(lengths)
        packs = pack_sequences(sequences, capacity, multiple_of)
        assert sorted(row for pack in packs for row in pack.rows) == list(range(len(lengths)))
        for pack in packs:
            assert pack.num_tokens <= capacity or len(pack.rows) == 1
            assert pack.tokens_T.numel() % multiple_of == 0 and pack.tokens_T.numel() - pack.num_tokens < multiple_of
            assert pack.cu_seqlens[-1] == pack.tokens_T.numel() == pack.position_ids_T.numel()
            for row, start, end in pack.segments:
                assert torch.equal(pack.tokens_T[start:end], sequences[row])
                assert torch.equal(pack.position_ids_T[start:end], torch.arange(end - start))
        assert len(packs) <= 2 * -(-sum(lengths) // capacity) + sum(length > capacity for length in lengths)
        again = pack_sequences(sequences, capacity, multiple_of)
        assert [pack.rows for pack in again] == [pack.rows for pack in packs]


def test_gather_gives_rows_back() -> None:
    sequences = sequences_of([3, 5, 2])
    packs = pack_sequences(sequences, 6, multiple_of=8)
    rows = gather_rows(packs, [pack.tokens_T.float() for pack in packs], num_rows=3, width=6)
    assert rows.tolist() == [[1, 2, 3, 0, 0, 0], [101, 102, 103, 104, 105, 0], [201, 202, 0, 0, 0, 0]]
    for pack in packs:  # and back into packs; the padding is zero
        assert torch.equal(pack_rows(pack, rows), pack.tokens_T.float())
    some = gather_rows(packs[:1], [packs[0].tokens_T.float()], num_rows=3, width=5)
    for row in range(3):
        assert some[row].any() == (row in packs[0].rows)
    assert gather_rows([], [], num_rows=2, width=3).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_pad_ids_inside_a_sequence_are_real_tokens() -> None:
    pack = build_pack([torch.tensor([0, 0, 7, 0])], [0], multiple_of=6)
    assert pack.num_tokens == 4 and pack.segments == [(0, 0, 4)]

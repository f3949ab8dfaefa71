"""Data sets of SFT, reward models and prompts: rows read lazily, checked once, tokenised when asked for.

``check`` streams over all rows: it applies the filter, tokenises, counts what is dropped or truncated and stops at the
first unusable row with a one-line DataError ``file:line: field ...``. Ranks may share this work; all end with the same
report, the same samples or the same error. After it, ``dataset[i]`` is the i-th kept row, tokenised anew.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from aligner.data import formats
from aligner.data.jsonl import IndexedJsonl
from aligner.data.samples import Message, PreferenceSample, PromptSample, TextSample
from aligner.errors import DataError

S = TypeVar("S", TextSample, PreferenceSample, PromptSample)
Filter = Callable[[dict[str, Any]], bool]
Gather = Callable[[Any], list[Any]]

DROP, TRUNCATE = "drop", "truncate"


class Encoder(Protocol):
    """The part of :class:`~aligner.data.tokenizer.Tokenizer` that data sets use."""

    bos_id: int | None

    def encode_messages(self, messages: list[Message], add_generation_prompt: bool = True) -> list[int]: ...

    def encode_conversation(self, messages: list[Message]) -> tuple[list[int], list[bool]]: ...


@dataclass(frozen=True)
class DataReport:
    """What a data set consists of. Counts are rows; ``tokens`` counts tokens of kept samples (both sides of a pair).

    ``sha256`` is that of the file's content, ``kept_sha256`` that of the numbers of the kept rows.
    """

    name: str
    rows: int
    kept: int
    filtered: int
    dropped: int
    truncated: int
    tokens: int
    longest: int
    limit: int
    sha256: str
    kept_sha256: str

    def summary(self) -> str:
        """One line for the log."""
        parts = [f"{self.name}: {self.kept} of {self.rows} rows, {self.tokens} tokens, longest {self.longest}"]
        if self.filtered:
            parts.append(f"{self.filtered} removed by the filter")
        if self.dropped:
            parts.append(f"{self.dropped} dropped (longer than {self.limit} tokens)")
        if self.truncated:
            parts.append(f"{self.truncated} truncated to {self.limit} tokens")
        return "; ".join(parts)

    def identity(self) -> dict[str, Any]:
        """What the data set is, as plain values: where, how many rows, which content, which of it is used."""
        return {
            "path": self.name,
            "rows": self.rows,
            "sha256": self.sha256,
            "kept": self.kept,
            "kept_sha256": self.kept_sha256,
        }


@dataclass
class _Scan:
    """Outcome of one rank's share of the rows. ``error`` is the first one met, at row ``error_row`` (-1: the file)."""

    rows: int
    kept: np.ndarray
    sha256: str = ""
    filtered: int = 0
    dropped: int = 0
    truncated: int = 0
    tokens: int = 0
    longest: int = 0
    error_row: int = -1
    error: str | None = None


@dataclass(frozen=True)
class _Encoded(Generic[S]):
    sample: S | None  # None: too long
    truncated: bool
    lengths: tuple[int, ...]


class _RowDataset(ABC, Generic[S]):
    """What the three data sets share: rows, filter, check, access. Subclasses turn one row into one sample."""

    def __init__(
        self, path: str, tokenizer: Encoder, max_length: int, *, too_long: str = DROP, filter: Filter | None = None
    ) -> None:
        """``path``: a file or ``builtin:<name>``; ``max_length``: tokens a sample may have; ``too_long``: drop |
        truncate; ``filter``: called with the raw row, False removes it. Nothing is read yet."""
        if too_long not in (DROP, TRUNCATE):
            raise DataError(f"too_long is {too_long!r}; it must be {DROP} or {TRUNCATE}")
        if max_length < 1:
            raise DataError(f"{path}: the length limit is {max_length} tokens; it must be at least 1")
        self._rows = IndexedJsonl(path)
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._too_long = too_long
        self._filter = filter
        self._kept: np.ndarray | None = None
        self.report: DataReport | None = None

    def __len__(self) -> int:
        """Kept samples; runs :meth:`check` on its own when it has not been called."""
        return len(self._kept_rows())

    @property
    def fingerprint(self) -> str:
        """Equal for data sets of the same rows in the same order."""
        self._kept_rows()
        assert self.report is not None
        return hashlib.sha256((self.report.sha256 + self.report.kept_sha256).encode()).hexdigest()

    def __getitem__(self, index: int) -> S:
        kept = self._kept_rows()
        if not 0 <= index < len(kept):
            raise IndexError(f"sample {index} of {len(kept)} in {self._rows.name}")
        sample = self._encode_row(int(kept[index])).sample
        if sample is None:
            raise DataError(f"{self._rows.where(int(kept[index]))}: changed since it was checked; start the run again")
        return sample

    def check(self, rank: int = 0, world_size: int = 1, gather: Gather | None = None) -> DataReport:
        """Read, filter and tokenise all rows once; keep the indices of usable ones.

        With ``world_size`` > 1 each rank scans every ``world_size``-th row and ``gather`` (an all-gather of objects)
        puts the parts together, so the call is collective. Raises DataError, the same on all ranks: a malformed row,
        an empty data set, or nothing left after filter and length limit.
        """
        scan = self._scan(rank, world_size)
        parts: list[_Scan] = gather(scan) if gather is not None else [scan]
        failures = sorted((part.error_row, part.error) for part in parts if part.error is not None)
        if failures:
            raise DataError(failures[0][1])
        if len({part.rows for part in parts}) > 1:
            counts = ", ".join(str(part.rows) for part in parts)
            raise DataError(f"{self._rows.name}: ranks see files of different length ({counts} rows); share one file")
        if len({part.sha256 for part in parts}) > 1:
            raise DataError(f"{self._rows.name}: ranks see files of different content; share one file")
        kept = np.sort(np.concatenate([part.kept for part in parts]))
        report = DataReport(
            name=self._rows.name,
            rows=parts[0].rows,
            kept=len(kept),
            filtered=sum(part.filtered for part in parts),
            dropped=sum(part.dropped for part in parts),
            truncated=sum(part.truncated for part in parts),
            tokens=sum(part.tokens for part in parts),
            longest=max(part.longest for part in parts),
            limit=self._max_length,
            sha256=parts[0].sha256,
            kept_sha256=hashlib.sha256(kept.astype("<i8").tobytes()).hexdigest(),
        )
        if not report.kept:
            raise DataError(
                f"{report.name}: empty data set: of {report.rows} rows, {report.filtered} were removed by the filter "
                f"and {report.dropped} are longer than {report.limit} tokens; raise the limit or change the filter"
            )
        self._kept, self.report = kept, report
        return report

    # ------------------------------------------------------------------ inside

    def _kept_rows(self) -> np.ndarray:
        if self._kept is None:
            self.check()
        assert self._kept is not None
        return self._kept

    def _scan(self, rank: int, world_size: int) -> _Scan:
        scan = _Scan(rows=0, kept=np.zeros(0, dtype=np.int64))
        kept: list[int] = []
        try:
            scan.rows = len(self._rows)
            scan.sha256 = self._rows.sha256
            for row in range(rank, scan.rows, world_size):
                scan.error_row = row
                if not self._passes_filter(row):
                    scan.filtered += 1
                    continue
                encoded = self._encode_row(row)
                if encoded.sample is None:
                    scan.dropped += 1
                    continue
                kept.append(row)
                scan.truncated += encoded.truncated
                scan.tokens += sum(encoded.lengths)
                scan.longest = max(scan.longest, *encoded.lengths)
        except DataError as error:
            scan.error = str(error)
        scan.kept = np.array(kept, dtype=np.int64)
        return scan

    def _passes_filter(self, row: int) -> bool:
        if self._filter is None:
            return True
        values = self._rows[row]
        where = self._rows.where(row)
        try:
            verdict = self._filter(values)
        except Exception as error:
            what = f"{type(error).__name__}: {error}".replace("\n", " ")
            raise DataError(f"{where}: the data filter failed: {what}; correct the filter") from error
        if not isinstance(verdict, bool | np.bool_):
            raise DataError(f"{where}: the data filter returned {verdict!r}; it must return True or False")
        return bool(verdict)

    def _encode_row(self, row: int) -> _Encoded[S]:
        values = self._rows[row]
        where = self._rows.where(row)
        try:
            return self._encode(values, where)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error

    def _cut_beginning(self, ids: list[int], count: int) -> list[int]:
        """``ids`` without its first ``count`` tokens; a BOS in front stays in front."""
        keep = 1 if ids[0] == self._tokenizer.bos_id and count + 1 < len(ids) else 0
        return ids[:keep] + ids[keep + count :]

    @abstractmethod
    def _encode(self, row: dict[str, Any], where: str) -> _Encoded[S]:
        """Turn ``row`` into a sample; DataErrors raised here begin with the field, the caller adds the place."""


class TextDataset(_RowDataset[TextSample]):
    """SFT samples. Too long: dropped, or cut at the end (dropped all the same when nothing to learn is left)."""

    def _encode(self, row: dict[str, Any], where: str) -> _Encoded[TextSample]:
        messages, used = formats.read_conversation(row)
        ids, mask = self._tokenizer.encode_conversation(messages)
        truncated = len(ids) > self._max_length
        if truncated:
            ids, mask = ids[: self._max_length], mask[: self._max_length]
            if self._too_long == DROP or not any(mask[1:]):
                return _Encoded(None, False, ())
        sample = TextSample(_ids(ids), torch.tensor(mask, dtype=torch.bool), where, _rest(row, used))
        return _Encoded(sample, truncated, (len(ids),))


class PreferenceDataset(_RowDataset[PreferenceSample]):
    """Reward-model pairs. Too long: dropped, or cut at the beginning of the prompt (BOS stays), equally on both sides.

    Answers are never cut, because the reward is read at their end: a pair whose answers leave no room for one token of
    prompt is dropped under ``truncate`` too.
    """

    def _encode(self, row: dict[str, Any], where: str) -> _Encoded[PreferenceSample]:
        pair, used = formats.read_preference(row)
        chosen, _ = self._tokenizer.encode_conversation(pair.chosen)
        rejected, _ = self._tokenizer.encode_conversation(pair.rejected)
        chosen = chosen[:-1] if pair.chosen_truncated else chosen  # without the end-of-turn token
        rejected = rejected[:-1] if pair.rejected_truncated else rejected
        if chosen == rejected:
            raise DataError(
                "field 'rejected': has the same tokens as 'chosen', so it tells no preference; remove the row"
            )
        prompt_length = _common_prefix(chosen, rejected, self._tokenizer.encode_messages(pair.chosen[: pair.shared]))
        excess = max(len(chosen), len(rejected)) - self._max_length
        if excess > 0:
            if self._too_long == DROP or excess >= prompt_length:
                return _Encoded(None, False, ())
            chosen, rejected = self._cut_beginning(chosen, excess), self._cut_beginning(rejected, excess)
            prompt_length -= excess
        sample = PreferenceSample(_ids(chosen), _ids(rejected), prompt_length, where, _rest(row, used))
        return _Encoded(sample, excess > 0, (len(chosen), len(rejected)))


class PromptDataset(_RowDataset[PromptSample]):
    """Prompts to answer. Too long: dropped, or cut at the beginning (BOS and the last tokens stay).

    A conversation that ends with assistant messages is cut before them; the first of these is kept as
    ``metadata["reference"]``.
    """

    def _encode(self, row: dict[str, Any], where: str) -> _Encoded[PromptSample]:
        messages, used, reference = formats.read_prompt(row)
        ids = self._tokenizer.encode_messages(messages, add_generation_prompt=True)
        truncated = len(ids) > self._max_length
        if truncated:
            if self._too_long == DROP:
                return _Encoded(None, False, ())
            ids = self._cut_beginning(ids, len(ids) - self._max_length)
        metadata = _rest(row, used)
        if reference is not None:
            metadata["reference"] = reference
        return _Encoded(PromptSample(_ids(ids), tuple(messages), where, metadata), truncated, (len(ids),))


def _ids(token_ids: list[int]) -> torch.Tensor:
    return torch.tensor(token_ids, dtype=torch.int64)


def _rest(row: dict[str, Any], used: set[str]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in used}


def _common_prefix(first: list[int], second: list[int], prompt: list[int]) -> int:
    """Length of the longest common beginning of the three."""
    length = 0
    while length < min(len(first), len(second), len(prompt)) and first[length] == second[length] == prompt[length]:
        length += 1
    return length

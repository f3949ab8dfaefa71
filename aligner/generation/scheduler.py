"""Which request runs in which slot. Pure bookkeeping, the same on every rank of an engine replica.

Invariants:

* running sequences fill slots 0..n-1 without holes: when one ends, the last one moves into its slot;
* requests are admitted first come first served, as many as slots are free; nothing depends on time;
* a prompt equal to that of a sequence that runs, or is admitted with it, is not computed again: it is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from aligner.generation.engine import FINISH_LENGTH, FINISH_STOP, GenerationRequest, GenerationResult


class StopStrings:
    """Tells when the text of sampled tokens completes a stop string, which may span tokens.

    ``decode`` turns ids into text. Every token is worth at least one byte of text, but for special tokens, which have
    none: a window of the longest stop string in bytes, plus some, is decoded a step.
    """

    _MARGIN = 8

    def __init__(self, decode: Callable[[Sequence[int]], str], strings: Sequence[str]) -> None:
        self._decode = decode
        self._strings = tuple(strings)
        self._window = max(len(string.encode()) for string in strings) + self._MARGIN

    def completed_by_last(self, token_ids: Sequence[int]) -> bool:
        """Whether the last of ``token_ids`` completes a stop string."""
        tail = token_ids[-self._window :]
        text = self._decode(tail)
        found = [string for string in self._strings if string in text]
        if not found:
            return False
        before = self._decode(tail[:-1])
        return any(text.count(string) > before.count(string) for string in found)


@dataclass
class Running:
    """A sequence in a slot. ``cached``: tokens whose keys and values are in the cache."""

    request: GenerationRequest
    stop_strings: StopStrings | None
    max_new_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def cached(self) -> int:
        return len(self.request.prompt_ids) + max(len(self.token_ids) - 1, 0)

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.token_ids)

    def append(self, token_id: int, logprob: float) -> None:
        """Take a sampled token and decide whether the response ends with it."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        params = self.request.params
        if token_id in params.stop_token_ids or self._completes_stop_string():
            self.finish_reason = FINISH_STOP
        elif len(self.token_ids) >= self.max_new_tokens:
            self.finish_reason = FINISH_LENGTH

    def _completes_stop_string(self) -> bool:
        if self.stop_strings is None or len(self.token_ids) < self.request.params.min_new_tokens:
            return False
        return self.stop_strings.completed_by_last(self.token_ids)

    def result(self, finish_reason: str, weights_version: int) -> GenerationResult:
        """What the caller gets."""
        return GenerationResult(
            request_id=self.request.request_id,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=finish_reason,
            weights_version=weights_version,
        )


@dataclass(frozen=True)
class Admission:
    """Newly admitted slots ``first``..``end - 1``; which prompts to compute, and which to copy (source, target)."""

    first: int
    end: int
    compute: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]


class Scheduler:
    """FIFO admission into ``num_slots`` dense slots."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def admit(self) -> Admission:
        """Move waiting sequences into free slots."""
        first = len(self.running)
        holders = {entry.request.prompt_ids: slot for slot, entry in enumerate(self.running)} if self.waiting else {}
        compute: list[int] = []
        copies: list[tuple[int, int]] = []
        while self.waiting and len(self.running) < self.num_slots:
            slot = len(self.running)
            entry = self.waiting.popleft()
            self.running.append(entry)
            source = holders.setdefault(entry.request.prompt_ids, slot)
            if source == slot:
                compute.append(slot)
            else:
                copies.append((source, slot))
        return Admission(first, len(self.running), tuple(compute), tuple(copies))

    def remove(self, slot: int) -> int | None:
        """Free ``slot``; returns the slot whose sequence now lives in it (to be moved there), if any."""
        last = self.running.pop()
        if slot == len(self.running):
            return None
        self.running[slot] = last
        return len(self.running)

    def finished_slots(self) -> list[int]:
        """Slots whose response has ended, highest first: the order in which :meth:`remove` keeps the others valid."""
        return [slot for slot in reversed(range(len(self.running))) if self.running[slot].finish_reason is not None]

    def withdraw(self, request_ids: Collection[int]) -> tuple[list[Running], list[int]]:
        """Take waiting requests out; returns them, and the slots (highest first) of those that run."""
        taken = [entry for entry in self.waiting if entry.request.request_id in request_ids]
        self.waiting = deque(entry for entry in self.waiting if entry.request.request_id not in request_ids)
        slots = [
            slot for slot in reversed(range(len(self.running))) if self.running[slot].request.request_id in request_ids
        ]
        return taken, slots

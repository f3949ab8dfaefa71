"""The engine protocol: what rollout asks of anything that samples responses.

``submit`` queues requests, ``poll`` advances generation and hands out what finished, ``publish`` gives the engine
new policy weights, ``release``/``resume`` drop and rebuild device memory around training. :func:`generate` is the
synchronous wrapper. Promises every engine keeps:

* sampling noise depends on (request seed, position, vocabulary id) only, never on the batch or the default generator;
* ``logprobs`` are full-softmax log-probabilities after temperature, also under top-k and top-p;
* the end-of-sequence token that ended a response is part of ``token_ids`` and of its length;
* a result carries the version of the weights that sampled it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

FINISH_STOP = "stop"  # a stop id or stop string
FINISH_LENGTH = "length"  # max_new_tokens (or the context) reached
FINISH_ABORT = "abort"


@dataclass(frozen=True)
class SamplingParams:
    """``temperature`` 0 is greedy (log-probs then at temperature 1). ``top_k`` 0 and ``top_p`` 1 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """One response to sample. ``seed`` alone decides its sampling noise."""

    request_id: int
    prompt_ids: tuple[int, ...]
    seed: int
    params: SamplingParams


@dataclass(frozen=True)
class GenerationResult:
    """A finished response. ``token_ids`` and ``logprobs`` have the same length and hold sampled tokens only."""

    request_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str  # FINISH_STOP | FINISH_LENGTH | FINISH_ABORT
    weights_version: int


class GenerationEngine(Protocol):
    """See the module docstring. Every call is made by all ranks of one engine replica, in the same order."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None: ...

    def poll(self) -> list[GenerationResult]:
        """Advance by one scheduling step; return what finished in it (maybe nothing)."""
        ...

    @property
    def unfinished(self) -> int:
        """Requests submitted and not yet returned."""
        ...

    def publish(self, version: int) -> None:
        """Take the policy's current weights under ``version``. Requires that no request is in flight."""
        ...

    def release(self, tags: Sequence[str] = ("kv_cache", "weights")) -> None: ...

    def resume(self, tags: Sequence[str] = ("kv_cache", "weights")) -> None: ...

    def abort(self, request_ids: Sequence[int]) -> None: ...


def generate(engine: GenerationEngine, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
    """Submit ``requests``, poll until all are finished, return results in request order."""
    engine.submit(requests)
    finished: dict[int, GenerationResult] = {}
    while engine.unfinished:
        for result in engine.poll():
            finished[result.request_id] = result
    return [finished[request.request_id] for request in requests]

"""The native generation engine: samples from a RoleModel's own weights, in its own layout.

Invariants:

* every call is made by all ranks of one replica (its tensor-parallel groups and pipeline) in the same order; all of
  them hold the same scheduler state, the last stage samples and broadcasts ids and log-probs;
* each token passes each layer once: in prefill or in decode; prompts equal to a running one are copied, not computed
  (:attr:`MegatronEngine.token_layers` counts);
* what a request gets depends on its prompt, seed and parameters only, up to the rounding of the matrix products;
* weights may change only between :meth:`MegatronEngine.publish` calls with no request in flight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from aligner.config.hf_config import padded_vocab_size
from aligner.errors import GenerationError
from aligner.generation.decode_path import DecodeAttention, DecodePath, PrefillAttention, Segment
from aligner.generation.engine import FINISH_ABORT, GenerationRequest, GenerationResult, SamplingParams
from aligner.generation.kv_cache import KVCache
from aligner.generation.linear import packing_works
from aligner.generation.sampling import VocabParallelSampler, row_sampling
from aligner.generation.scheduler import Running, Scheduler, StopStrings
from aligner.models.role_model import RoleModel

TAGS = ("kv_cache", "weights")


class Decoder(Protocol):
    """The part of a tokenizer that the engine needs, for stop strings."""

    def decode(self, token_ids: Sequence[int]) -> str: ...


class MegatronEngine:
    """See :class:`aligner.generation.engine.GenerationEngine`.

    Args:
        model: the policy (``head="lm"``); read when weights are published, never changed.
        tokenizer: decodes sampled ids where stop strings are asked for.
        max_batch_size: sequences decoded together.
        max_sequence_length: prompt and response of one sequence, in tokens; a response that reaches it ends.
        prefill_tokens: prompt tokens computed in one pass; bounds the memory of prefill.
        pack_weights: on a CPU, decode with packed copies of the weights (twice the memory of the weights, until
            ``release(("weights",))``).
    """

    def __init__(
        self,
        model: RoleModel,
        tokenizer: Decoder | None = None,
        *,
        max_batch_size: int,
        max_sequence_length: int,
        prefill_tokens: int = 2048,
        pack_weights: bool = True,
    ) -> None:
        if max_sequence_length > model.arch.max_position_embeddings:
            raise GenerationError(
                f"max_sequence_length is {max_sequence_length}, but the model's context is "
                f"{model.arch.max_position_embeddings} tokens; use shorter prompts or fewer new tokens"
            )
        self.max_batch_size = max_batch_size
        self.max_sequence_length = max_sequence_length
        self.prefill_tokens = prefill_tokens
        self.weights_version = 0
        self._model = model
        self._tokenizer = tokenizer
        self._pack_weights = pack_weights
        self._scheduler = Scheduler(max_batch_size)
        self._aborted: list[GenerationResult] = []
        self._released: set[str] = set()
        self._path: DecodePath | None = None
        self._cache: KVCache | None = None
        self._prompt_hidden: torch.Tensor | None = None  # last stage: the last prompt token of each slot
        self._sampler: VocabParallelSampler | None = None
        self._token_layers = 0

    # ------------------------------------------------------------------ the protocol

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue ``requests``. Raises GenerationError, and queues none, when one of them cannot be served."""
        known = {entry.request.request_id for entry in (*self._scheduler.waiting, *self._scheduler.running)}
        known |= {result.request_id for result in self._aborted}
        for request in requests:
            self._check(request, known)
            known.add(request.request_id)
        for request in requests:
            strings = request.params.stop_strings
            decoder = self._tokenizer
            stop = StopStrings(decoder.decode, strings) if strings and decoder is not None else None
            room = self.max_sequence_length - len(request.prompt_ids)
            self._scheduler.waiting.append(Running(request, stop, min(request.params.max_new_tokens, room)))

    @torch.inference_mode()
    def poll(self) -> list[GenerationResult]:
        """Admit and prefill what fits, then decode one token of every running sequence; returns what finished."""
        finished, self._aborted = self._aborted, []
        if not len(self._scheduler):
            return finished
        self._require(TAGS, "generate")
        self._build()
        finished += self._prefill_admitted()
        running = self._scheduler.running
        if running:
            hidden = self._decode([entry.token_ids[-1] for entry in running])
            finished += self._sample(0, len(running), hidden)
        return finished

    @property
    def unfinished(self) -> int:
        """Requests submitted and not yet returned."""
        return len(self._scheduler) + len(self._aborted)

    def publish(self, version: int) -> None:
        """Take the policy's current weights under ``version``.

        Raises GenerationError when requests are in flight or the weights are released.
        """
        self._require_idle("publish weights")
        self._require(("weights",), "publish weights")
        self._drop_weights()
        self.weights_version = version
        self._build()

    def release(self, tags: Sequence[str] = TAGS) -> None:
        """Free the KV cache and/or the engine's copies of the weights. Requires that no request is in flight."""
        self._check_tags(tags)
        self._require_idle("release memory")
        self._released |= set(tags)
        if "kv_cache" in tags:
            self._cache = self._prompt_hidden = None
        if "weights" in tags:
            self._drop_weights()

    def resume(self, tags: Sequence[str] = TAGS) -> None:
        """Undo :meth:`release`; memory is taken again when it is first needed (weights: at ``publish``)."""
        self._check_tags(tags)
        self._released -= set(tags)

    @torch.inference_mode()
    def abort(self, request_ids: Sequence[int]) -> None:
        """End requests; the next :meth:`poll` returns what they have. Ids that are not in flight are ignored."""
        waiting, slots = self._scheduler.withdraw(set(request_ids))
        ended = [self._remove(slot) for slot in slots]
        self._aborted += [entry.result(FINISH_ABORT, self.weights_version) for entry in (*waiting, *reversed(ended))]

    @property
    def token_layers(self) -> int:
        """(token, layer) pairs computed so far on this rank: prompt tokens and sampled tokens times its layers."""
        return self._token_layers + (self._path.token_layers if self._path is not None else 0)

    # ------------------------------------------------------------------ a step

    def _prefill_admitted(self) -> list[GenerationResult]:
        admission = self._scheduler.admit()
        if admission.first == admission.end:
            return []
        path, cache = self._ready()
        running = self._scheduler.running
        cache.ensure(admission.end, max(entry.length for entry in running[admission.first :]))
        for segments in self._chunks(admission.compute):
            spans = [(running[s.slot].request.prompt_ids, s) for s in segments]
            hidden = path.forward(
                [token for prompt, s in spans for token in prompt[s.start : s.end]],
                [position for s in segments for position in range(s.start, s.end)],
                [cache.row(s.slot, position) for s in segments for position in range(s.start, s.end)],
                cache,
                PrefillAttention(cache, segments),
            )
            if hidden is not None:
                self._keep_prompt_ends(hidden, spans)
        for source, target in admission.copies:
            cache.copy(source, target, len(running[target].request.prompt_ids))
            if self._prompt_hidden is not None:
                self._prompt_hidden[target] = self._prompt_hidden[source]
        hidden = None if self._prompt_hidden is None else self._prompt_hidden[admission.first : admission.end]
        return self._sample(admission.first, admission.end, hidden)

    def _chunks(self, slots: Sequence[int]) -> list[list[Segment]]:
        """The prompts of ``slots`` in passes of at most ``prefill_tokens`` tokens; a prompt may span passes."""
        chunks: list[list[Segment]] = [[]] if slots else []
        room = self.prefill_tokens
        for slot in slots:
            start, length = 0, len(self._scheduler.running[slot].request.prompt_ids)
            while start < length:
                if room == 0:
                    chunks.append([])
                    room = self.prefill_tokens
                end = min(length, start + room)
                chunks[-1].append(Segment(slot, start, end))
                room -= end - start
                start = end
        return chunks

    def _keep_prompt_ends(self, hidden_NH: torch.Tensor, spans: Sequence[tuple[tuple[int, ...], Segment]]) -> None:
        assert self._prompt_hidden is not None
        end = 0
        for prompt, segment in spans:
            end += segment.end - segment.start
            if segment.end == len(prompt):
                self._prompt_hidden[segment.slot] = hidden_NH[end - 1]

    def _decode(self, tokens: Sequence[int]) -> torch.Tensor | None:
        path, cache = self._ready()
        lengths = [entry.length for entry in self._scheduler.running]
        cache.ensure(len(lengths), max(lengths))
        positions = [length - 1 for length in lengths]
        rows = [cache.row(slot, position) for slot, position in enumerate(positions)]
        return path.forward(tokens, positions, rows, cache, DecodeAttention(cache, lengths, path.dtype))

    def _sample(self, first: int, end: int, hidden_NH: torch.Tensor | None) -> list[GenerationResult]:
        """Sample the next token of slots ``first``..``end - 1`` (``hidden_NH`` on the last stage); returns and frees
        the sequences that end with it."""
        entries = self._scheduler.running[first:end]
        ids, logprobs = self._next_tokens(entries, hidden_NH)
        for entry, token_id, logprob in zip(entries, ids, logprobs, strict=True):
            if not math.isfinite(logprob):
                raise GenerationError(
                    f"request {entry.request.request_id}: log-prob {logprob} of token {len(entry.token_ids)}: the "
                    "model's logits are not finite; check the weights (a diverged run?) and the dtype"
                )
            entry.append(token_id, logprob)
        done = [self._remove(slot) for slot in self._scheduler.finished_slots()]
        return [entry.result(str(entry.finish_reason), self.weights_version) for entry in reversed(done)]

    def _next_tokens(self, entries: Sequence[Running], hidden_NH: torch.Tensor | None) -> tuple[list[int], list[float]]:
        path, _ = self._ready()
        place = self._model.topology
        drawn = torch.empty(2, len(entries), dtype=torch.float64, device=path.device)
        if hidden_NH is not None:
            assert self._sampler is not None
            rows = row_sampling(
                [entry.request.params for entry in entries],
                [entry.request.seed for entry in entries],
                [entry.length for entry in entries],
                [len(entry.token_ids) for entry in entries],
                self._model.arch.vocab_size,
                path.device,
            )
            drawn[0], drawn[1] = self._sampler.sample(path.logits(hidden_NH), rows)
        if place.pp > 1:
            dist.broadcast(drawn, src=place.last_stage_rank, group=place.pg.pp)
        ids, logprobs = drawn.tolist()
        return [int(token_id) for token_id in ids], logprobs

    def _remove(self, slot: int) -> Running:
        """Free ``slot``; the sequence of the last slot takes its place."""
        entry = self._scheduler.running[slot]
        source = self._scheduler.remove(slot)
        if source is not None:
            moved = self._scheduler.running[slot]
            if self._cache is not None:
                self._cache.copy(source, slot, moved.cached)
            if self._prompt_hidden is not None:
                self._prompt_hidden[slot] = self._prompt_hidden[source]
        return entry

    # ------------------------------------------------------------------ memory

    def _ready(self) -> tuple[DecodePath, KVCache]:
        assert self._path is not None and self._cache is not None
        return self._path, self._cache

    @torch.inference_mode()
    def _build(self) -> None:
        """Read the weights and allocate the cache, where this is not done and not released."""
        if self._path is None and "weights" not in self._released:
            parameter = next(self._model.module.parameters())
            packed = self._pack_weights and packing_works(parameter.dtype, parameter.device)
            self._path = DecodePath(self._model, packed=packed)
            place = self._model.topology
            if place.is_last_stage:
                local = padded_vocab_size(self._model.arch) // place.tp
                self._sampler = VocabParallelSampler(self._model.arch.vocab_size, local, place.pg.tp)
        if self._cache is None and self._path is not None and "kv_cache" not in self._released:
            self._cache = self._path.new_cache(self.max_batch_size, self.max_sequence_length)
            if self._model.topology.is_last_stage:
                shape = (self.max_batch_size, self._model.arch.hidden_size)
                self._prompt_hidden = torch.zeros(shape, dtype=self._path.dtype, device=self._path.device)

    def _drop_weights(self) -> None:
        if self._path is not None:
            self._token_layers += self._path.token_layers
            self._path = None

    # ------------------------------------------------------------------ checks

    def _require(self, tags: Sequence[str], action: str) -> None:
        missing = [tag for tag in tags if tag in self._released]
        if missing:
            raise GenerationError(f"cannot {action} while {' and '.join(missing)} are released; call resume() first")

    def _require_idle(self, action: str) -> None:
        if self.unfinished:
            raise GenerationError(
                f"cannot {action} with {self.unfinished} requests in flight; poll until they finish, or abort them"
            )

    @staticmethod
    def _check_tags(tags: Sequence[str]) -> None:
        unknown = [tag for tag in tags if tag not in TAGS]
        if unknown:
            raise GenerationError(f"unknown memory tag {unknown[0]!r}; known: {', '.join(TAGS)}")

    def _check(self, request: GenerationRequest, known: set[int]) -> None:
        where = f"request {request.request_id}"
        if request.request_id in known:
            raise GenerationError(f"{where}: this id is already in flight; ids must differ")
        if not request.prompt_ids:
            raise GenerationError(f"{where}: the prompt is empty; a model needs at least one token to start from")
        length, vocabulary = len(request.prompt_ids), self._model.arch.vocab_size
        if length >= self.max_sequence_length:
            raise GenerationError(
                f"{where}: the prompt has {length} tokens, but max_sequence_length is {self.max_sequence_length}, "
                "which leaves no room for a response; shorten the prompt or raise the limit"
            )
        low, high = min(request.prompt_ids), max(request.prompt_ids)
        if low < 0 or high >= vocabulary:
            raise GenerationError(
                f"{where}: prompt id {low if low < 0 else high} is outside the vocabulary of {vocabulary}; "
                "use the tokenizer that belongs to the model"
            )
        self._check_params(where, request.params)

    def _check_params(self, where: str, params: SamplingParams) -> None:
        rules = (
            (params.temperature >= 0, "temperature", params.temperature, "at least 0"),
            (params.top_k >= 0, "top_k", params.top_k, "at least 0"),
            (0 < params.top_p <= 1, "top_p", params.top_p, "above 0 and at most 1"),
            (params.max_new_tokens >= 1, "max_new_tokens", params.max_new_tokens, "at least 1"),
            (
                0 <= params.min_new_tokens <= params.max_new_tokens,
                "min_new_tokens",
                params.min_new_tokens,
                f"between 0 and max_new_tokens ({params.max_new_tokens})",
            ),
            (all(params.stop_strings), "stop_strings", params.stop_strings, "without empty strings"),
        )
        for holds, name, value, rule in rules:
            if not holds:
                raise GenerationError(f"{where}: {name} is {value!r}; it must be {rule}")
        if params.stop_strings and self._tokenizer is None:
            raise GenerationError(f"{where}: stop_strings need the engine's tokenizer; give it one")

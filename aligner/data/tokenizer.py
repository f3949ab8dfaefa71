"""Text and conversations to token ids, by the tokenizer and chat template of a Hugging Face directory.

Invariants (tests assert exactly these):

* A conversation is tokenised in pieces that meet where an assistant turn begins and ends. So the ids of
  ``encode_messages(messages[:i])`` are a prefix of those of ``encode_conversation(messages)``: training sees a turn
  after the same ids that sampling would start from.
* The loss mask covers what the assistant would have to sample: from the end of the generation prompt to the end-of-turn
  token, that token included. A template without an end-of-turn token gets EOS after the last turn.
* A conversation ends with its last assistant turn's end-of-turn token; template text behind it is cut off.
* Special tokens come from the template alone: nothing adds a second BOS.
* Lengths and masks never depend on the pad id.

``transformers`` is imported by :func:`load_tokenizer`, not by this module.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aligner.errors import DataError, ModelError

FALLBACK_TEMPLATE = (
    "{% for message in messages %}"
    "{{ (message['role'] | capitalize) + ': ' + (message['content'] | trim) }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""Used when a tokenizer has no chat template: ``User: …``, ``Assistant: …<eos>``, a line each, after BOS if the
tokenizer itself begins texts with BOS."""

TEMPLATE_DATE = "26 Jul 2024"  # Llama 3 templates print today's date unless given one; token ids must not change by day
_PROBE = "Probe"
_ANCHORS = ("\n", "|", ".", "a")  # texts to continue from, see Tokenizer._continue


@dataclass(frozen=True)
class _Turn:
    """Character span of an assistant turn in a rendered conversation, end-of-turn token included."""

    start: int
    end: int


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a local Hugging Face directory. Code in the directory is never run.

    Raises ModelError: no tokenizer files, no EOS token, a chat template that cannot be used.
    """
    path = Path(directory)
    if not path.is_dir():
        raise ModelError(f"{path}: no such directory; give a directory with tokenizer.json or tokenizer_config.json")
    from transformers import AutoTokenizer

    try:
        backend = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types here
        what = str(error).strip().split("\n")[0]
        message = f"{path}: no usable tokenizer: {type(error).__name__}: {what}"
        raise ModelError(f"{message}; the directory needs tokenizer.json and tokenizer_config.json") from error
    return Tokenizer(backend, path)


class Tokenizer:
    """A tokenizer with its chat template. Made by :func:`load_tokenizer`.

    ``eos_id``; ``bos_id`` and ``pad_id`` (None when the tokenizer has none); ``end_of_turn_id``: the token with which
    the template ends an assistant turn, else EOS; ``stop_token_ids``: sorted ids that end a response (EOS, end of turn
    and those of the directory's generation_config.json); ``vocab_size``: highest id + 1.
    """

    def __init__(self, backend: Any, directory: Path) -> None:
        self.directory = directory
        self._backend = backend
        if backend.eos_token_id is None:
            raise ModelError(f"{directory}/tokenizer_config.json: eos_token is not set; a response could never end")
        self.eos_id: int = int(backend.eos_token_id)
        self.bos_id: int | None = backend.bos_token_id
        self.pad_id: int | None = backend.pad_token_id
        vocabulary: dict[str, int] = backend.get_vocab()
        self._last_token, last_id = max(vocabulary.items(), key=lambda item: item[1])
        self.vocab_size: int = last_id + 1
        self.has_chat_template = backend.chat_template is not None
        if not self.has_chat_template:
            adds_bos = self.bos_id is not None and backend.encode("a")[:1] == [self.bos_id]
            backend.chat_template = ("{{ bos_token }}" if adds_bos else "") + FALLBACK_TEMPLATE
        backend.model_max_length = int(1e30)  # limits are checked by the data sets; silences a warning at encode
        self._added_tokens = [str(token) for token in backend.added_tokens_decoder.values() if str(token)]
        self._continues = self.encode("a") + self.encode(" b") == self.encode("a b")
        self._turn_tail = self._probe_turn_tail()
        self.end_of_turn_id: int = self.encode(self._turn_tail)[-1] if self._turn_tail else self.eos_id
        stops = {self.eos_id, self.end_of_turn_id, *_generation_config_stops(directory)}
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(stops))

    # ------------------------------------------------------------------ plain text

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; no BOS or EOS is added. Special tokens spelled out in ``text`` become their ids."""
        return list(self._backend.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    # ------------------------------------------------------------------ conversations

    def encode_messages(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a prompt: the rendered ``messages`` and, by default, the header of the assistant turn to come.

        Raises DataError when the chat template refuses the messages.
        """
        text = self._render(messages, add_generation_prompt)
        turns = [turn for turn in self._locate_turns(messages, text) if turn is not None]
        return [token for ids, _ in self._encode_pieces(text, turns) for token in ids]

    def encode_conversation(self, messages: Sequence[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        """Ids of a whole conversation and, for each, whether the assistant wrote it (end-of-turn token included).

        Raises DataError when there is no assistant message, or the chat template refuses or rewrites one.
        """
        last = len(messages) - 1
        roles = [message["role"] for message in messages]
        if "assistant" not in roles:
            raise DataError("field 'messages': no assistant message, so there is nothing to learn; add one")
        text = self._render(messages, False)
        located = self._locate_turns(messages, text)
        assistants = [i for i, role in enumerate(roles) if role == "assistant"]
        turns: list[_Turn] = []
        for i, turn in zip(assistants, located, strict=True):
            if turn is None:
                raise DataError(
                    f"field 'messages': the chat template of {self.directory} does not render assistant message {i} "
                    "as written after its generation prompt; end the conversation there, or use another template"
                )
            turns.append(turn)
        if roles[last] == "assistant":
            text = text[: turns[-1].end]
        ids: list[int] = []
        mask: list[bool] = []
        for piece, learned in self._encode_pieces(text, turns):
            ids += piece
            mask += [learned] * len(piece)
        if roles[last] == "assistant" and ids[-1] not in self.stop_token_ids:
            ids.append(self.eos_id)
            mask.append(True)
        return ids, mask

    # ------------------------------------------------------------------ identity

    def fingerprint(self) -> str:
        """Hex digest of vocabulary, merges, normalisation, special tokens and chat template.

        Equal fingerprints: every conversation has equal ids.
        """
        return _sha256([self.vocabulary_digest(), self.template_digest()])

    def vocabulary_digest(self) -> str:
        """The part of :meth:`fingerprint` that turns text into ids, and the ids that end a response."""
        parts: dict[str, Any] = {
            "vocabulary": self._backend.get_vocab(),
            "special": {name: str(token) for name, token in self._backend.special_tokens_map.items()},
            "stops": self.stop_token_ids,
        }
        if getattr(self._backend, "is_fast", False):
            pipeline = json.loads(self._backend.backend_tokenizer.to_str())
            parts["pipeline"] = {k: v for k, v in pipeline.items() if k not in ("truncation", "padding")}
        return _sha256(parts)

    def template_digest(self) -> str:
        """The part of :meth:`fingerprint` that turns conversations into text."""
        return _sha256(self._backend.chat_template)

    def check_vocabulary(self, model_vocab_size: int) -> None:
        """ModelError when a token id of this tokenizer has no row in a model of ``model_vocab_size`` entries."""
        if self.vocab_size > model_vocab_size:
            raise ModelError(
                f"{self.directory}/tokenizer.json: token {self._last_token!r} has id {self.vocab_size - 1}, but the "
                f"model's vocab_size is {model_vocab_size}; use the tokenizer that belongs to the model"
            )

    # ------------------------------------------------------------------ inside

    def _render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str:
        try:
            return str(
                self._backend.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=add_generation_prompt,
                    date_string=TEMPLATE_DATE,
                )
            )  # fmt: skip
        except Exception as error:  # jinja errors, and whatever a template's expressions raise
            what = str(error).strip().split("\n")[0]
            raise DataError(f"field 'messages': the chat template of {self.directory} refuses them: {what}") from error

    def _locate_turns(self, messages: Sequence[dict[str, Any]], text: str) -> list[_Turn | None]:
        """Where each assistant message stands in ``text``; None where the template did not keep it as written."""
        turns: list[_Turn | None] = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                turns.append(self._locate_turn(text, self._render(messages[:i], True), str(message["content"])))
        return turns

    def _locate_turn(self, text: str, prompt: str, content: str) -> _Turn | None:
        if not text.startswith(prompt):
            return None
        start = len(prompt)
        for tail in dict.fromkeys((self._turn_tail, "")):
            for written in dict.fromkeys((content, content.strip())):
                at = text.find(written + tail, start)
                lead = text[start:at]
                if at >= 0 and (tail not in lead if tail else not lead.strip()):
                    return _Turn(start, at + len(written) + len(tail))
        return None

    def _encode_pieces(self, text: str, turns: Sequence[_Turn]) -> list[tuple[list[int], bool]]:
        """(ids, written by the assistant) of the pieces of ``text`` between the borders of ``turns``."""
        pieces: list[tuple[list[int], bool]] = []
        position = 0
        for turn in turns:
            pieces.append((self._continue(text[:position], text[position : turn.start]), False))
            pieces.append((self._continue(text[: turn.start], text[turn.start : turn.end]), True))
            position = turn.end
        pieces.append((self._continue(text[:position], text[position:]), False))
        return pieces

    def _continue(self, before: str, piece: str) -> list[int]:
        """Ids of ``piece`` behind ``before``, whose ids stay as they are.

        Tokenizers that put a space in front of every text (SentencePiece) would put one at each border: they encode
        the piece behind an anchor, the special token that ``before`` ends with or else a short text, whose ids are
        then cut off.
        """
        if not before or not piece or self._continues:
            return self.encode(piece)
        special = [token for token in self._added_tokens if before.endswith(token)]
        for anchor in special or _ANCHORS:
            anchor_ids = self.encode(anchor)
            ids = self.encode(anchor + piece)
            if ids[: len(anchor_ids)] == anchor_ids:
                return ids[len(anchor_ids) :]
        return self.encode(piece)

    def _probe_turn_tail(self) -> str:
        """The text that ends an assistant turn, up to the first added token in it; empty when there is none."""
        question = {"role": "user", "content": _PROBE}
        answer = {"role": "assistant", "content": _PROBE}
        try:
            prompt, text = self._render([question], True), self._render([question, answer], False)
        except DataError as error:
            raise ModelError(str(error)) from error
        if not text.startswith(prompt) or _PROBE not in text[len(prompt) :]:
            raise ModelError(
                f"{self.directory}: the chat template does not render an assistant message after its generation "
                "prompt, so the tokens to learn cannot be told; use another chat template"
            )
        tail = text[text.rindex(_PROBE) + len(_PROBE) :]
        ends = [(tail.index(token), tail.index(token) + len(token)) for token in self._added_tokens if token in tail]
        return tail[: min(ends)[1]] if ends else ""


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _generation_config_stops(directory: Path) -> list[int]:
    """``eos_token_id`` of generation_config.json: one id, several, or nothing."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return []
    try:
        stops = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{path}: not a JSON object: {error}; correct or remove the file") from error
    return [int(stop) for stop in ([] if stops is None else stops if isinstance(stops, list) else [stops])]

"""Row formats: what the fields of a row mean as a conversation. Pure functions of one row.

Recognised, in this order (the first whose leading field is present decides):

* ``messages``: ``[{"role": "system" | "user" | "assistant" | "tool", "content": str}, ...]``
* ``conversations`` (ShareGPT): ``[{"from": "system" | "human" | "gpt", "value": str}, ...]``
* ``prompt`` (a string, or a list of messages) with ``response`` (or ``completion``)
* ``instruction``, ``input`` (optional) with ``output`` (Alpaca)

Preference rows hold ``chosen`` and ``rejected``: strings or lists of messages. Lists that begin with an assistant
message, and strings, answer the row's ``prompt`` / ``instruction`` / ``messages``; other lists are whole conversations.
``chosen_truncated`` and
``rejected_truncated`` (true or false, optional) say that an answer was cut off before its end-of-turn token.
A ``system`` string becomes the first message. Errors are DataErrors that begin with the field; the caller adds file
and line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aligner.data.samples import Message
from aligner.errors import DataError

Row = Mapping[str, Any]

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_PROMPT_FIELDS = ("messages", "conversations", "prompt", "instruction")


@dataclass(frozen=True)
class Preference:
    """Two conversations that end with an assistant message; their first ``shared`` messages are the same prompt.

    A truncated answer was cut off: its end-of-turn token is missing.
    """

    chosen: list[Message]
    rejected: list[Message]
    shared: int
    chosen_truncated: bool = False
    rejected_truncated: bool = False


def read_conversation(row: Row) -> tuple[list[Message], set[str]]:
    """A training conversation and the fields it was made of."""
    prompt, used = _read_prompt(row)
    if "messages" in used or "conversations" in used:
        name = "messages" if "messages" in used else "conversations"
        if not any(message["role"] == "assistant" for message in prompt):
            raise DataError(f"field '{name}': no assistant message, so there is nothing to learn; add one")
        return prompt, used
    name = "output"
    if "prompt" in used:
        name = "completion" if "completion" in row and "response" not in row else "response"
    response = _text(row, name)
    return [*prompt, {"role": "assistant", "content": response}], used | {name}


def read_prompt(row: Row) -> tuple[list[Message], set[str], str | None]:
    """A prompt, the fields it was made of, and the reference answer when the conversation ends with one."""
    messages, used = _read_prompt(row)
    reference: str | None = None
    while messages and messages[-1]["role"] == "assistant":
        reference = messages[-1]["content"]
        messages = messages[:-1]
    if not any(message["role"] != "system" for message in messages):
        field = next(name for name in _PROMPT_FIELDS if name in used)
        raise DataError(f"field '{field}': no user message, so there is nothing to answer; add one")
    return messages, used, reference


def read_preference(row: Row) -> tuple[Preference, set[str]]:
    """A preference pair and the fields it was made of. ``chosen`` equal to ``rejected`` is an error."""
    sides: dict[str, list[Message]] = {}
    used = {"chosen", "rejected"}
    for name in ("chosen", "rejected"):
        answer = _answer(row, name)
        if answer[0]["role"] == "assistant":
            prompt, prompt_fields, _ = read_prompt(row)
            answer = [*prompt, *answer]
            used |= prompt_fields
        if answer[-1]["role"] != "assistant":
            raise DataError(
                f"field '{name}': the last message is from '{answer[-1]['role']}'; it must be the assistant's"
            )
        sides[name] = answer
    chosen, rejected = sides["chosen"], sides["rejected"]
    if chosen == rejected:
        raise DataError("field 'rejected': equal to 'chosen', so it tells no preference; remove or correct the row")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if not any(message["role"] == "user" for message in chosen[:shared]):
        raise DataError(
            "field 'rejected': answers another prompt than 'chosen'; both must begin with the same messages"
        )
    while chosen[shared - 1]["role"] == "assistant":  # a common answer belongs to both sides, not to the prompt
        shared -= 1
    return Preference(chosen, rejected, shared, *(_flag(row, f"{name}_truncated", used) for name in sides)), used


def _read_prompt(row: Row) -> tuple[list[Message], set[str]]:
    if "messages" in row:
        messages, used = _messages(row["messages"], "messages"), {"messages"}
    elif "conversations" in row:
        messages, used = _messages(_from_sharegpt(row["conversations"]), "conversations"), {"conversations"}
    elif isinstance(row.get("prompt"), list):
        messages, used = _messages(row["prompt"], "prompt"), {"prompt"}
    elif "prompt" in row:
        messages, used = [{"role": "user", "content": _text(row, "prompt")}], {"prompt"}
    elif "instruction" in row:
        content, used = _text(row, "instruction"), {"instruction"}
        if row.get("input") not in (None, ""):
            content, used = f"{content}\n\n{_text(row, 'input')}", used | {"input"}
        messages = [{"role": "user", "content": content}]
    else:
        fields = ", ".join(map(str, row)) or "none"
        raise DataError(f"field 'prompt': missing; a row needs one of {', '.join(_PROMPT_FIELDS)}, found {fields}")
    if row.get("system") not in (None, "") and messages[0]["role"] != "system":
        messages, used = [{"role": "system", "content": _text(row, "system")}, *messages], used | {"system"}
    return messages, used


def _answer(row: Row, name: str) -> list[Message]:
    if isinstance(row.get(name), list):
        return _messages(row[name], name)
    return [{"role": "assistant", "content": _text(row, name)}]


def _text(row: Row, name: str) -> str:
    if name not in row:
        fields = ", ".join(map(str, row)) or "none"
        raise DataError(f"field '{name}': missing; add it or correct its name (found {fields})")
    return _checked_text(row[name], name)


def _flag(row: Row, name: str, used: set[str]) -> bool:
    value = row.get(name, False)
    if not isinstance(value, bool):
        raise DataError(f"field '{name}': must be true or false, found {value!r}")
    used.add(name)
    return value


def _checked_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"field '{name}': must be a string, found {type(value).__name__}; quote it")
    if not value.strip():
        raise DataError(f"field '{name}': is empty; fill it in or remove the row (data.filter can do it)")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"field '{name}': half of a surrogate pair at character {error.start}; correct it") from error
    return value


def _messages(value: Any, name: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else type(value).__name__
        raise DataError(f"field '{name}': must be a list of messages, found {found}")
    messages: list[Message] = []
    for i, item in enumerate(value):
        place = f"{name}[{i}]"
        if not isinstance(item, dict):
            raise DataError(f"field '{place}': must be an object with role and content, found {type(item).__name__}")
        for key in ("role", "content"):
            if key not in item:
                raise DataError(f"field '{place}.{key}': missing; every message has a role and a content")
        if item["role"] not in ROLES:
            raise DataError(f"field '{place}.role': {item['role']!r} is not a role; use one of {', '.join(ROLES)}")
        messages.append({**item, "content": _checked_text(item["content"], f"{place}.content")})
    first = next((m["role"] for m in messages if m["role"] != "system"), None)
    if first == "assistant" and name not in ("chosen", "rejected"):
        raise DataError(f"field '{name}': begins with an assistant message; it must answer a user message")
    return messages


def _from_sharegpt(value: Any) -> Any:
    """ShareGPT turns as messages; what is malformed is left for :func:`_messages` to name."""
    if not isinstance(value, list):
        return value
    turns = []
    for item in value:
        if isinstance(item, dict) and "from" in item and "value" in item:
            role = _SHAREGPT_ROLES.get(item["from"], item["from"]) if isinstance(item["from"], str) else item["from"]
            turns.append({"role": role, "content": item["value"]})
        else:
            turns.append(item)
    return turns

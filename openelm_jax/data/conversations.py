"""Conversations to be learned: records of messages, of instructions, or of texts, as tokens.

Records are those of TRL's supervised fine-tuning (`messages`; `prompt` with `completion`) and of
LLM-Adapters (`instruction`, `input`, `output`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from openelm_jax.data.chat import (
    APPLE,
    ROLES,
    ChatForm,
    Encoded,
    Message,
    encode,
    encode_behind,
)
from openelm_jax.data.instructions import PromptForm, instruction_of, prompt
from openelm_jax.data.objects import Object
from openelm_jax.errors import UserError
from openelm_jax.tokenizer import Tokenizer


def messages_of(value: Any, where: str, field: str) -> list[Message]:
    """Return the messages of a field: a list of {"role", "content"}.

    Raises UserError unless the roles are the template's and take turns: maybe the system, then the
    user and the assistant, beginning with the user.
    """
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: {field} must be a list of messages, one at least.")
    messages = []
    for number, turn in enumerate(value, start=1):
        if not isinstance(turn, dict) or not all(
            isinstance(turn.get(name), str) for name in ("role", "content")
        ):
            raise UserError(
                f"{where}: message {number} of {field} needs a role and a content, both texts."
            )
        if turn["role"] not in ROLES:
            raise UserError(
                f"{where}: message {number} of {field} is of the role {turn['role']!r}: it must be "
                f"one of {', '.join(ROLES)}."
            )
        messages.append(Message(turn["role"], turn["content"]))
    return messages


def require_turns(messages: Sequence[Message], where: str, field: str, last: str) -> None:
    """Raise UserError unless user and assistant take turns, the user first, `last` at the end."""
    turns = messages[1:] if messages and messages[0].role == "system" else messages
    for number, turn in enumerate(turns):
        expected = ("user", "assistant")[number % 2]
        if turn.role != expected:
            raise UserError(
                f"{where}: message {len(messages) - len(turns) + number + 1} of {field} is of "
                f"{turn.role}, but the roles must alternate: here it is the turn of {expected}."
            )
    if not turns or turns[-1].role != last:
        said = turns[-1].role if turns else "system"
        raise UserError(f"{where}: the last message of {field} is of {said}: it must be of {last}.")


def encode_record(
    tokenizer: Tokenizer,
    record: Object,
    chat: ChatForm = APPLE,
    instruction: PromptForm = "corenet",
) -> Encoded:
    """Return the tokens of a record of any of the forms, and which are the answer's.

    One <s> begins and one </s> ends it; the </s> is the answer's. Raises UserError, with the place
    of the record, for a record of no such form, for turns that do not alternate or do not end with
    the assistant's, and for an answer without a text.
    """
    fields, where = record
    if "messages" in fields:
        messages = messages_of(fields["messages"], where, "messages")
        return _conversation(tokenizer, messages, where, "messages", chat)
    if "instruction" in fields:
        asked = instruction_of(record)
        text = prompt(asked.instruction, asked.input, instruction)
        return encode_text(tokenizer, text, asked.output)
    if "prompt" in fields and "completion" in fields:
        if isinstance(fields["prompt"], list):
            messages = messages_of(fields["prompt"], where, "prompt")
            messages += messages_of(fields["completion"], where, "completion")
            return _conversation(tokenizer, messages, where, "prompt and completion", chat)
        return encode_text(
            tokenizer, _text(fields, "prompt", where), _answer(fields, "completion", where)
        )
    raise UserError(
        f"{where} has the fields {', '.join(map(str, fields)) or 'of nothing'}: it needs messages, "
        "or instruction and output, or prompt and completion."
    )


def encode_text(tokenizer: Tokenizer, text: str, answer: str) -> Encoded:
    """Return <s>, a text with its answer, and </s>, which is the answer's as well."""
    tokens, start = encode_behind(tokenizer, text, answer)
    return Encoded(
        np.concatenate([[tokenizer.bos_id], tokens, [tokenizer.eos_id]]).astype(np.int32),
        np.arange(len(tokens) + 2) >= start + 1,
    )


def encode_records(
    tokenizer: Tokenizer,
    records: Iterable[Object],
    max_length: int,
    *,
    learn_all: bool = False,
    chat: ChatForm = APPLE,
    instruction: PromptForm = "corenet",
) -> tuple[list[Encoded], dict[str, int]]:
    """Return the records' tokens, and how many records were left out, by the reason.

    Each is cut behind `max_length` tokens; with `learn_all` every token but <s> is learned, not the
    answers' alone. A record of which no learned token is left is left out.
    """
    examples, dropped = [], {"truncated away": 0}
    for record in records:
        tokens, learned = encode_record(tokenizer, record, chat, instruction)
        if learn_all:
            learned = np.arange(len(tokens)) > 0
        example = Encoded(tokens[:max_length], learned[:max_length])
        if example.learned.any():
            examples.append(example)
        else:
            dropped["truncated away"] += 1
    return examples, dropped


def _conversation(
    tokenizer: Tokenizer, messages: list[Message], where: str, field: str, chat: ChatForm
) -> Encoded:
    require_turns(messages, where, field, last="assistant")
    if not messages[-1].content.strip():
        raise UserError(f"{where}: the last answer of {field} is empty: there is nothing to learn.")
    return encode(tokenizer, messages, form=chat)


def _text(fields: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(fields.get(name), str):
        raise UserError(f"{where}: {name} must be a text.")
    return fields[name]


def _answer(fields: dict[str, Any], name: str, where: str) -> str:
    text = _text(fields, name, where)
    if not text.strip():
        raise UserError(f"{where}: {name} is empty: there is nothing to learn.")
    return text

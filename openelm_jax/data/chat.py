"""Conversations as text and as tokens: the one template of training and of `generate --chat`.

It is Zephyr's, which Apple's recipe took from the alignment handbook (70769f9, `sft/model_utils`).
The tags of the roles are plain text; what ends a turn is the token </s>.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from openelm_jax.errors import UserError
from openelm_jax.tokenizer import Tokenizer

Role = Literal["system", "user", "assistant"]
ROLES: tuple[str, ...] = get_args(Role)
END = "</s>"


class Message(NamedTuple):
    """A turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class ChatForm:
    """How conversations are written; a model is asked in the form that it was trained in."""

    empty_system: bool = True
    """Whether a conversation without a system turn begins with an empty one, as in Apple's recipe;
    TRL inserts none any more."""
    learn_tag: bool = True
    """Whether the assistant's tag is learned with its answer, as in Apple's recipe, or stands in
    front of it unlearned, as TRL has it now."""
    double_end: bool = False
    """Whether an answer ends as TRL of April 2024 had it: </s>, a newline, and </s> once more."""


APPLE = ChatForm()


class Encoded(NamedTuple):
    """A conversation's tokens, int32 [T], and which of them are an answer's, bool [T]."""

    tokens: np.ndarray
    learned: np.ndarray


def render(messages: Sequence[Message], *, generate: bool = False, form: ChatForm = APPLE) -> str:
    """Return the text of a conversation; with `generate`, up to where the assistant answers.

    Raises UserError for a role that the template does not have, and where it would write nothing.
    """
    return "".join(text + end for text, end, _ in _pieces(messages, generate, form))


def encode_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], form: ChatForm = APPLE
) -> np.ndarray:
    """Return the tokens, int32 [T], after which the assistant answers: <s> and what `render` says.

    Raises UserError as `render` does.
    """
    return encode(tokenizer, messages, generate=True, form=form).tokens


def encode(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    generate: bool = False,
    form: ChatForm = APPLE,
) -> Encoded:
    """Return the tokens of a conversation, and which of them the assistant has written.

    One <s> begins them; </s> ends each turn, and the newline behind the last </s> is left out, for
    nothing is written there any more. Only the template makes <s> and </s>: the text between two
    of them is given to SentencePiece by itself, which makes ordinary pieces of whatever it says.
    So a newline after </s> is 29871 13 in LLaMA's vocabulary, as it was in April 2024. Raises
    UserError as `render` does.
    """
    ids: list[np.ndarray] = [np.array([tokenizer.bos_id], np.int32)]
    learned: list[np.ndarray] = [np.zeros(1, bool)]
    text, answer = "", ""  # since the last </s>; the second is what is learned of it
    for piece, end, is_answer in _pieces(messages, generate, form):
        if is_answer:
            answer += piece
        else:
            text += piece
        if not end:
            continue
        tokens, start = encode_behind(tokenizer, text, answer)
        ids += [tokens, np.array([tokenizer.eos_id], np.int32)]
        learned += [np.arange(len(tokens)) >= start, np.array([is_answer])]
        text, answer = "", ""
    if text != "\n":
        tokens, _ = encode_behind(tokenizer, text, "")
        ids.append(tokens)
        learned.append(np.zeros(len(tokens), bool))
    elif form.double_end and learned[-1].all():
        newline = tokenizer.encode("\n")
        ids += [newline, np.array([tokenizer.eos_id], np.int32)]
        learned.append(np.ones(len(newline) + 1, bool))
    return Encoded(np.concatenate(ids).astype(np.int32), np.concatenate(learned))


def encode_behind(tokenizer: Tokenizer, text: str, answer: str) -> tuple[np.ndarray, int]:
    """Return the tokens of a text with its answer, int32, and how many are the text's.

    They are encoded as one, since pieces depend on what stands before; a piece that reaches over
    the border counts as the answer's.
    """
    tokens = tokenizer.encode(text + answer) if text + answer else np.zeros(0, np.int32)
    if not answer:
        return tokens, len(tokens)
    before = tokenizer.encode(text) if text else np.zeros(0, np.int32)
    length = min(len(before), len(tokens))
    same = before[:length] == tokens[:length]
    return tokens, int(same.argmin()) if not same.all() else length


def _pieces(
    messages: Sequence[Message], generate: bool, form: ChatForm
) -> Iterator[tuple[str, str, bool]]:
    """Yield the parts of a conversation: text, the end of a turn behind it, and whether the text
    is an answer to be learned."""
    if not messages:
        raise UserError("a conversation without a message renders to nothing: give one at least.")
    for message in messages:
        if message.role not in ROLES:
            raise UserError(
                f"the chat template writes nothing for the role {message.role!r}: it must be one "
                f"of {', '.join(ROLES)}."
            )
    if form.empty_system and messages[0].role != "system":
        messages = [Message("system", ""), *messages]
    for role, content in messages:
        tag = f"<|{role}|>\n"
        is_answer = role == "assistant"
        yield tag, "", is_answer and form.learn_tag
        yield content, END, is_answer
        yield "\n", "", False
    if generate:
        yield "<|assistant|>\n", "", False

"""Preference pairs: records of every usual form, as texts, as tokens, and as rows of a batch.

Which tokens count is known from lengths alone: the same id may fill a row and end an answer.

Legend: B rows, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from openelm_jax.data.chat import APPLE, ChatForm, Message, encode
from openelm_jax.data.conversations import encode_text, messages_of, require_turns
from openelm_jax.data.objects import Object
from openelm_jax.errors import UserError
from openelm_jax.tokenizer import Tokenizer

TruncationMode = Literal["keep_end", "keep_start"]
RATINGS = (("chosen-rating", "rejected-rating"), ("score_chosen", "score_rejected"))
"""How argilla and HuggingFaceH4 call them."""
REASONS = ("identical answers", "equal ratings", "empty answer", "truncated away")
"""Why a record is left out."""


class Preference(NamedTuple):
    """Two answers to a prompt, which is a conversation up to the user's turn, or a plain text."""

    prompt: tuple[Message, ...] | str
    chosen: str
    rejected: str
    ratings: tuple[float, float] | None = None


class Pair(NamedTuple):
    """The tokens, int32, of a prompt, with <s>, and of the two answers, with </s>."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray


@dataclass(frozen=True)
class Truncation:
    """What is cut of a pair that is too long."""

    mode: TruncationMode = "keep_end"
    """`keep_end`, of TRL in April 2024 and so of Apple's recipe: where the prompt and the longer
    answer have more than `max_length` tokens, the prompt's last `max_prompt_length` stay, and if
    that is not enough, the first `max_length` - `max_prompt_length` of both answers. `keep_start`,
    of TRL in 2026: the first `max_length` tokens of prompt and answer stay."""
    max_length: int = 1024
    max_prompt_length: int = 512
    """For `keep_end` alone."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(TruncationMode):
            known = " or ".join(get_args(TruncationMode))
            raise UserError(f"truncation_mode is {self.mode}: it must be {known}.")
        if self.mode == "keep_end" and not 1 < self.max_prompt_length < self.max_length:
            raise UserError(
                f"max_prompt_length is {self.max_prompt_length} and max_length {self.max_length}: "
                "the first must be at least 2, and leave room for an answer in the second."
            )
        if self.max_length < 2:
            raise UserError(f"max_length is {self.max_length}: it must be at least 2.")


class PairRows(NamedTuple):
    """A batch of rows [B, L]: of pair p the chosen answer in row 2 p, the rejected in 2 p + 1.

    So whatever cuts a batch into equal parts of even length cuts no pair in two.
    Row b has its prompt in the tokens before `prompt_B[b]`, its answer in those before
    `length_B[b]`, and nothing of a meaning behind.
    """

    tokens_BL: np.ndarray
    prompt_B: np.ndarray
    length_B: np.ndarray


def read_preference(record: Object) -> Preference:
    """Return the pair of a record of argilla, HuggingFaceH4 or TRL, or of plain strings.

    `prompt` may be messages, or missing, when both answers begin with it; where they do, a text in
    `prompt` is not looked at. Raises UserError, with the place of the record, for turns that do not
    alternate, a last one that is not the assistant's, two prompts that differ, and missing fields.
    """
    fields, where = record
    if "responses" in fields and "chosen" not in fields:
        raise UserError(
            f"{where} has candidates, not a pair: make pairs of them with "
            "python -m openelm_jax.sample_pairs --scores FILE."
        )
    for name in ("chosen", "rejected"):
        if not isinstance(fields.get(name), str | list):
            raise UserError(f"{where}: {name} must be a text or a list of messages.")
    ratings, prompt = _ratings(fields, where), fields.get("prompt")
    if isinstance(prompt, str) and all(
        isinstance(fields[name], str) for name in ("chosen", "rejected")
    ):
        return Preference(prompt, fields["chosen"], fields["rejected"], ratings)
    (before, chosen), (other, rejected) = (
        _answer(fields, name, prompt, where) for name in ("chosen", "rejected")
    )
    if before != other:
        raise UserError(
            f"{where}: chosen and rejected answer different prompts: all but their last messages "
            "must be the same."
        )
    require_turns(before, where, "the prompt", last="user")
    return Preference(tuple(before), chosen, rejected, ratings)


def encode_preference(tokenizer: Tokenizer, preference: Preference, form: ChatForm = APPLE) -> Pair:
    """Return the tokens of a pair, uncut: one <s>, and one </s> at the end of each answer.

    Conversations are written in the chat template; texts as they are, but for a </s> at the end of
    an answer's text, which is the token.
    """
    prompt, *answers = preference[:3]
    if isinstance(prompt, str):
        wholes = [encode_text(tokenizer, prompt, answer.removesuffix("</s>")) for answer in answers]
        starts = [int(whole.learned.argmax()) for whole in wholes]
    else:
        turns = [[*prompt, Message("assistant", answer)] for answer in answers]
        wholes = [encode(tokenizer, messages, form=form) for messages in turns]
        # Earlier answers of the conversation count as prompt: from the end back to what is not
        # the last answer's.
        starts = [len(whole.tokens) - int((~whole.learned[::-1]).argmax()) for whole in wholes]
    # A piece that reaches over the border may begin the one answer and not the other.
    start = min(starts)
    return Pair(wholes[0].tokens[:start], *(whole.tokens[start:] for whole in wholes))


def truncate(pair: Pair, truncation: Truncation = Truncation()) -> Pair | None:
    """Return the pair cut to what fits, or None where no token of an answer is left.

    The prompt keeps its <s>, which TRL of April 2024 cut off with the rest.
    """
    prompt, chosen, rejected = pair
    most = truncation.max_length
    if truncation.mode == "keep_start":
        prompt = prompt[:most]
        chosen, rejected = (answer[: most - len(prompt)] for answer in (chosen, rejected))
    else:
        longer = max(len(chosen), len(rejected))
        most_prompt = truncation.max_prompt_length
        if len(prompt) + longer > most and len(prompt) > most_prompt:
            prompt = np.concatenate([prompt[:1], prompt[1 - most_prompt :]])
        if len(prompt) + longer > most:
            chosen, rejected = (answer[: most - most_prompt] for answer in (chosen, rejected))
    return Pair(prompt, chosen, rejected) if len(chosen) and len(rejected) else None


def encode_preferences(
    tokenizer: Tokenizer,
    records: Iterable[Object],
    truncation: Truncation = Truncation(),
    *,
    form: ChatForm = APPLE,
    drop_equal_ratings: bool = True,
) -> tuple[list[Pair], dict[str, int]]:
    """Return the records' pairs as tokens, and how many were left out, for each of `REASONS`.

    Raises UserError as `read_preference` does.
    """
    pairs, dropped = [], dict.fromkeys(REASONS, 0)
    for record in records:
        preference = read_preference(record)
        if reason := _reason(preference, drop_equal_ratings):
            dropped[reason] += 1
        elif pair := truncate(encode_preference(tokenizer, preference, form), truncation):
            pairs.append(pair)
        else:
            dropped["truncated away"] += 1
    return pairs, dropped


def pair_rows(pairs: Sequence[Pair], row_length: int) -> PairRows:
    """Return a batch of twice as many rows as pairs, of `row_length` tokens, which must do."""
    rows = [(pair.prompt, answer) for pair in pairs for answer in (pair.chosen, pair.rejected)]
    tokens_BL = np.zeros((len(rows), row_length), np.int32)
    for row, parts in zip(tokens_BL, rows, strict=True):
        whole = np.concatenate(parts)
        row[: len(whole)] = whole
    prompt_B = np.array([len(prompt) for prompt, _ in rows], np.int32)
    answer_B = np.array([len(answer) for _, answer in rows], np.int32)
    return PairRows(tokens_BL, prompt_B, prompt_B + answer_B)


def _answer(
    fields: dict[str, Any], name: str, prompt: Any, where: str
) -> tuple[list[Message], str]:
    """Return the prompt and the answer that a field holds, or the field and `prompt` together."""
    before: list[Message] = []
    if isinstance(prompt, list):
        before = messages_of(prompt, where, "prompt")
    elif isinstance(prompt, str):
        before = [Message("user", prompt)]
    elif prompt is not None:
        raise UserError(f"{where}: prompt must be a text or a list of messages.")
    if isinstance(fields[name], str):
        messages = [Message("assistant", fields[name])]
    else:
        messages = messages_of(fields[name], where, name)
    if messages[-1].role != "assistant":
        raise UserError(
            f"{where}: the last message of {name} is of {messages[-1].role}: it must be of "
            "assistant."
        )
    *own, last = messages
    if own and not (isinstance(prompt, list) and own[: len(before)] != before):
        before = []  # the answer has the prompt, perhaps with a system turn, by itself
    if not before and not own:
        raise UserError(f"{where}: {name} answers nothing: give a prompt.")
    return [*before, *own], last.content


def _ratings(fields: dict[str, Any], where: str) -> tuple[float, float] | None:
    for names in RATINGS:
        better, worse = (fields.get(name) for name in names)
        if better is None or worse is None:
            continue
        if not isinstance(better, int | float) or not isinstance(worse, int | float):
            raise UserError(f"{where}: {' and '.join(names)} must be numbers.")
        return better, worse
    return None


def _reason(preference: Preference, drop_equal_ratings: bool) -> str | None:
    chosen, rejected, ratings = preference[1:]
    if not chosen.removesuffix("</s>").strip() or not rejected.removesuffix("</s>").strip():
        return "empty answer"
    if chosen == rejected:
        return "identical answers"
    if drop_equal_ratings and ratings is not None and ratings[0] == ratings[1]:
        return "equal ratings"
    return None

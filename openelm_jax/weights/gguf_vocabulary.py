"""SentencePiece models as GGUF's list of tokens, and back.

llama.cpp merges pairs by the scores of what they become and writes the rest as bytes: what
SentencePiece does with a model like LLaMA's, and with no other.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from openelm_jax.errors import UserError
from openelm_jax.tokenizer import (
    BPE,
    NO_SPACE_BEFORE,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Tokenizer,
    differences_from_llama,
    tokenizer_from_bytes,
)

KEY = "tokenizer.ggml."
LISTS = ("tokens", "scores", "token_type")


def puts_space_before(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer puts a space before a text; the types of its pieces are GGUF's own.

    Raises UserError if llama.cpp makes other tokens of text.
    """
    differences = differences_from_llama(tokenizer.model_bytes)
    if reasons := [reason for reason in differences if reason != NO_SPACE_BEFORE]:
        raise UserError(
            "--to gguf: llama.cpp makes other tokens of text than this tokenizer, which "
            f"{' and '.join(reasons)}; export --to hf."
        )
    return NO_SPACE_BEFORE not in differences


def tokenizer_of(metadata: Mapping[str, Any], where: str) -> Tokenizer | None:
    """Return the tokenizer that metadata describes, None if it has none like LLaMA's.

    Its file is not the one that the metadata was made of: what only training needs is lost. It
    gives the same tokens. Raises UserError if the pieces make no tokenizer.
    """
    if metadata.get(f"{KEY}model") != "llama":
        return None
    try:
        tokens, scores, types = (metadata[f"{KEY}{name}"] for name in LISTS)
        if not len(tokens) == len(scores) == len(types):
            raise ValueError("of different lengths")
        ids = {
            name: metadata.get(f"{KEY}{name}_token_id", default)
            for name, default in (("unknown", 0), ("bos", 1), ("eos", 2))
        }
        space_before = metadata.get(f"{KEY}add_space_prefix", True)
        model = _model(tokens, scores, types, ids, space_before)
    except (KeyError, IndexError, TypeError, ValueError) as fault:
        raise UserError(
            f"{where}: its lists of tokens, scores and types make no tokenizer ({fault}); "
            "fetch the file again."
        ) from None
    return tokenizer_from_bytes(model, where)


def _model(
    tokens: list[str],
    scores: list[float],
    types: list[int],
    ids: Mapping[str, int],
    space_before: bool,
) -> bytes:
    """Return a SentencePiece model, as a Protocol Buffers message."""
    pieces = []
    for number, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=True)):
        if number == ids["unknown"]:
            kind = UNKNOWN  # llama.cpp's converter may have called it a control token
        elif kind == USER_DEFINED:
            token = token.replace(" ", "\u2581")
        piece = _text(1, token) + _key(2, 5) + struct.pack("<f", score)
        if kind != NORMAL:
            piece += _number(3, kind)
        pieces.append(_message(1, piece))
    trainer = (
        _number(3, BPE)
        + _number(4, len(tokens))
        + _number(35, 1)  # byte_fallback
        + _number(40, ids["unknown"])
        + _number(41, ids["bos"])
        + _number(42, ids["eos"])
        + _number(43, 2**64 - 1)  # pad_id: -1
        + _text(45, tokens[ids["unknown"]])
        + _text(46, tokens[ids["bos"]])
        + _text(47, tokens[ids["eos"]])
    )
    normalizer = (
        _text(1, "identity")
        + _number(3, int(space_before))
        + _number(4, 0)  # remove_extra_whitespaces
        + _number(5, 1)  # escape_whitespaces
    )
    return b"".join(pieces) + _message(2, trainer) + _message(3, normalizer)


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _number(field: int, value: int) -> bytes:
    return _key(field, 0) + _varint(value)


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())


def _message(field: int, value: bytes) -> bytes:
    return _key(field, 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    if value < 0:
        raise ValueError(f"{value} where a number from 0 belongs")
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)

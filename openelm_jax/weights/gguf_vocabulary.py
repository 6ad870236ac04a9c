"""SentencePiece models as GGUF's list of tokens, and back.

llama.cpp merges pairs by the scores of what they become and writes the rest as bytes: what
SentencePiece does with a model like LLaMA's, and with no other.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openelm_jax.errors import UserError
from openelm_jax.tokenizer import Tokenizer, protobuf_fields, tokenizer_from_bytes

NORMAL, UNKNOWN, USER_DEFINED = 1, 2, 4
"""Types of a piece, the same numbers in both formats."""
BPE = 2
KEY = "tokenizer.ggml."
LISTS = ("tokens", "scores", "token_type")


@dataclass(frozen=True)
class Vocabulary:
    """Every piece of a tokenizer: its text, score and type; and whether a space is put before."""

    tokens: tuple[bytes, ...]
    scores: tuple[float, ...]
    types: tuple[int, ...]
    unknown_id: int
    space_before: bool


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Return the pieces of a tokenizer; raises UserError if llama.cpp makes other tokens of text.

    Field numbers are those of sentencepiece_model.proto.
    """
    model = list(protobuf_fields(tokenizer.model_bytes))
    trainer, normalizer = (dict(protobuf_fields(dict(model).get(field, b""))) for field in (2, 3))
    faults = {
        "its model is not BPE": trainer.get(3, 1) != BPE,
        "it has no byte_fallback": not trainer.get(35),
        "it puts spaces behind words": trainer.get(24),
        "it normalises text": normalizer.get(2),
        "it removes spaces": normalizer.get(4, 1),
        "it keeps spaces as they are": not normalizer.get(5, 1),
    }
    if reasons := [reason for reason, holds in faults.items() if holds]:
        raise UserError(
            f"--to gguf: llama.cpp makes other tokens of text than this tokenizer, since "
            f"{' and '.join(reasons)}; export --to hf."
        )
    pieces = [dict(protobuf_fields(value)) for field, value in model if field == 1]
    types = tuple(piece.get(3, NORMAL) for piece in pieces)
    return Vocabulary(
        tokens=tuple(piece[1] for piece in pieces),
        scores=tuple(_float_of_bits(piece.get(2, 0)) for piece in pieces),
        types=types,
        unknown_id=types.index(UNKNOWN),
        space_before=bool(normalizer.get(3, 1)),
    )


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


def _float_of_bits(bits: int) -> float:
    return struct.unpack("<f", bits.to_bytes(4, "little"))[0]

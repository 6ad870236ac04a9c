"""What becomes of a record: bad, dropped by a filter, or kept; and each of it counted.

Lanes and audits go through here both, so that an audit says what a run will do. `counts_C` is a
row of `columns.Column`, whose counters are raised in place.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from openelm_jax.data.columns import Column
from openelm_jax.data.manifest import Shard
from openelm_jax.data.readers import Record
from openelm_jax.data.text import (
    Flaw,
    TextRules,
    corenet_row,
    cut_long,
    encode_piece,
    parse_record,
    passes_char_filter,
    pieces_of,
)
from openelm_jax.tokenizer import Tokenizer

Counts = np.ndarray | list[int]
"""A list where it is raised often: that is twice as fast."""


def pad_id(tokenizer: Tokenizer, rules: TextRules) -> int | None:
    """Return the token that fills rows up; None where none need be."""
    return tokenizer.vocab_size if rules.packing == "corenet" else None


def read_text(
    record: Record, shard: Shard, text_key: str, rules: TextRules, counts_C: Counts
) -> tuple[str | None, Flaw | None]:
    """Return the text of a record, at most the longest that is used, and what is wrong with it."""
    text, flaw = parse_record(record, shard, text_key)
    counts_C[Column.RECORDS] += 1
    if flaw is not None:
        counts_C[Column[flaw.upper()]] += 1
    if text is None:
        return None, flaw
    kept = cut_long(text, rules)
    counts_C[Column.CHARS] += len(text)
    counts_C[Column.BYTES] += len(text) if text.isascii() else len(text.encode())
    counts_C[Column.CUT_CHARS] += len(text) - len(kept)
    return kept, flaw


def accept(
    text: str, tokenizer: Tokenizer, rules: TextRules, counts_C: Counts
) -> Iterator[np.ndarray]:
    """Return what the filters leave of a document, made when asked: its tokens in parts, int32
    [some tokens], or with packing=corenet a row of each piece, int32 [row_length]; nothing if it is
    dropped."""
    if rules.packing == "corenet":
        return _accept_pieces(text, tokenizer, rules, counts_C)
    return _accept_whole(text, tokenizer, rules, counts_C)


def _accept_whole(
    text: str, tokenizer: Tokenizer, rules: TextRules, counts_C: Counts
) -> Iterator[np.ndarray]:
    if not _has_chars(text, rules, counts_C):
        return
    parts = encode_piece(text, tokenizer, rules)
    first, count = [], 0
    for part in parts:
        first.append(part)
        count += len(part)
        if count >= rules.min_tokens:
            break
    if not _has_tokens(count, rules, counts_C):
        return
    yield from first
    for part in parts:
        count += len(part)
        yield part
    counts_C[Column.KEPT_DOCUMENTS] += 1
    counts_C[Column.KEPT_TOKENS] += count


def _accept_pieces(
    text: str, tokenizer: Tokenizer, rules: TextRules, counts_C: Counts
) -> Iterator[np.ndarray]:
    filler = pad_id(tokenizer, rules)
    assert filler is not None
    for piece in pieces_of(text, rules):
        if not _has_chars(piece, rules, counts_C):
            continue
        tokens = np.concatenate(list(encode_piece(piece, tokenizer, rules)))
        if not _has_tokens(len(tokens), rules, counts_C):
            continue
        row, truncated, padded = corenet_row(tokens, rules.row_length, filler)
        counts_C[Column.KEPT_DOCUMENTS] += 1
        counts_C[Column.KEPT_TOKENS] += len(tokens)
        counts_C[Column.TRUNCATED_TOKENS] += truncated
        counts_C[Column.PADDED_TOKENS] += padded
        yield row


def _has_chars(piece: str, rules: TextRules, counts_C: Counts) -> bool:
    if passes_char_filter(piece, rules):
        return True
    counts_C[Column.CHAR_FILTER_DOCUMENTS] += 1
    counts_C[Column.CHAR_FILTER_CHARS] += len(piece)
    return False


def _has_tokens(tokens: int, rules: TextRules, counts_C: Counts) -> bool:
    if tokens >= rules.min_tokens:
        return True
    counts_C[Column.TOKEN_FILTER_DOCUMENTS] += 1
    counts_C[Column.TOKEN_FILTER_TOKENS] += tokens
    return False

"""The held-out documents as rows in which each token after <s> is predicted exactly once.

N rows, L tokens of a row, T = L - 1 targets of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from openelm_jax.config import DataConfig
from openelm_jax.data.manifest import list_manifest
from openelm_jax.data.text import (
    BadRecordLimit,
    TextRules,
    check_source,
    encode_document,
    normalise,
    read_texts,
)
from openelm_jax.errors import UserError
from openelm_jax.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, eq=False)
class ValidationSet:
    """Rows of the held-out documents, normalised like the others but neither filtered nor cut."""

    rows_NL: np.ndarray
    """int32; the last row of a document is filled up with 0."""
    loss_mask_NT: np.ndarray
    """bool; which of a row's targets, its tokens but the first, count."""
    num_bytes: int
    """UTF-8 bytes of the normalised documents, to turn nats into bits per byte."""
    num_documents: int


def validation_set(
    config: DataConfig, tokenizer: Tokenizer, *, row_length: int
) -> ValidationSet | None:
    """Return the held-out documents, each as <s> document </s>; None when nothing is held out.

    Raises UserError when all of them are empty, besides what reading them raises. A damaged file
    is refused whatever data.on_damaged_shard says: what remains of it would be another measure.
    """
    manifest = list_manifest(config)
    rules = TextRules.of(config, row_length)
    rows, masks, num_bytes, num_documents = [], [], 0, 0
    for source in manifest.sources:
        if not source.holdout:
            continue
        check_source(source, source.holdout)
        limit = BadRecordLimit(source.name, config.max_bad_fraction)
        for text in read_texts(source, source.holdout, limit):
            text = normalise(text, rules)
            document_rows, document_mask = cut_document(
                encode_document(text, tokenizer), row_length
            )
            rows.append(document_rows)
            masks.append(document_mask)
            num_bytes += len(text.encode())
            num_documents += 1
    if not rows:
        return None
    if num_bytes == 0:
        shards = [shard for source in manifest.sources for shard in source.holdout]
        raise UserError(
            f"data.sources: all {num_documents} held-out documents are empty texts, in "
            f"{', '.join(shard.path for shard in shards)}; hold out documents with text, or none."
        )
    return ValidationSet(
        rows_NL=np.concatenate(rows),
        loss_mask_NT=np.concatenate(masks),
        num_bytes=num_bytes,
        num_documents=num_documents,
    )


def cut_document(tokens: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows int32 [N, L], loss mask bool [N, T]) of one document of two tokens or more.

    Rows are L - 1 apart: each begins with the last token of the one before.
    """
    stride = row_length - 1
    num_rows = -(-(len(tokens) - 1) // stride)
    padded = np.zeros(num_rows * stride + 1, dtype=np.int32)
    padded[: len(tokens)] = tokens
    rows_NL = np.lib.stride_tricks.sliding_window_view(padded, row_length)[::stride]
    target_of_NT = np.arange(1, num_rows * stride + 1).reshape(num_rows, stride)
    return rows_NL, target_of_NT < len(tokens)

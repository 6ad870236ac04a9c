"""Documents laid end to end and cut into rows, with nothing padded and nothing thrown away.

A row has `row_length` tokens and begins with the last token of the row before it: of the
row_length - 1 (input, target) pairs in a row, each token of the stream is a target exactly once,
but for the very first. A row may hold the end of one document and the beginning of the next.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import numpy as np

Origin = TypeVar("Origin")


class Packer(Generic[Origin]):
    """Tokens that have been added and are not yet wholly in rows; each document has an origin."""

    def __init__(self, row_length: int) -> None:
        assert row_length >= 2
        self._row_length = row_length
        self._documents: deque[tuple[Origin, np.ndarray]] = deque()
        self._skip = 0
        self._available = 0

    def add(self, origin: Origin, tokens: np.ndarray, skip: int = 0) -> None:
        """Append a document; `skip` tokens of the very first one are not used."""
        if skip:
            assert not self._documents
            assert skip < len(tokens)
            self._skip = skip
        self._documents.append((origin, tokens))
        self._available += len(tokens) - skip

    def is_ready(self) -> bool:
        """Whether there are tokens enough for a row."""
        return self._available >= self._row_length

    def take_row(self) -> np.ndarray:
        """Return the next row, [row_length]."""
        assert self.is_ready()
        pieces, needed, start = [], self._row_length, self._skip
        for _, tokens in self._documents:
            pieces.append(tokens[start : start + needed])
            needed -= len(pieces[-1])
            start = 0
            if needed == 0:
                break
        self._advance(self._row_length - 1)
        return np.concatenate(pieces)

    def first_token(self) -> tuple[Origin, int] | None:
        """Return the origin of the document that the next row begins in, and its tokens before
        that row; None when nothing has been added."""
        return (self._documents[0][0], self._skip) if self._documents else None

    def _advance(self, count: int) -> None:
        self._available -= count
        self._skip += count
        while self._skip >= len(self._documents[0][1]):
            self._skip -= len(self._documents.popleft()[1])

"""Documents to rows: laid end to end and cut, or a row a piece as CoreNet has it.

Both know, for the next row, the document it begins in and how much of that document earlier rows
have used: that is what a position names.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import numpy as np

Origin = TypeVar("Origin")


class Packer(Generic[Origin]):
    """Rows cut from documents laid end to end: nothing is padded, nothing thrown away.

    A row has `row_length` tokens and begins with the last token of the row before it: of the
    row_length - 1 (input, target) pairs in a row, each token of the stream is a target exactly
    once, but for the very first. A row may hold the end of one document and the beginning of the
    next. Documents come in parts, so that a long one need not be there as a whole.
    """

    def __init__(self, row_length: int, skip: int = 0) -> None:
        """The first `skip` tokens of the very first document are not used."""
        assert row_length >= 2
        self._row_length = row_length
        self._unused = skip
        # Origin, tokens of its document before these, and these.
        self._parts: deque[tuple[Origin, int, np.ndarray]] = deque()
        self._taken = 0  # of the first part
        self._available = 0
        self._length = 0  # of the document so far

    @property
    def unused(self) -> int:
        """Tokens of the first document that are still to be passed over."""
        return self._unused

    @property
    def is_behind(self) -> bool:
        """Whether the first document has not reached the first row yet."""
        return not self._parts

    def begin(self, origin: Origin) -> None:
        """Begin a document."""
        self._origin = origin
        self._length = 0

    def end(self) -> None:
        """Note that the document is whole; the rows do not depend on it."""

    def extend(self, tokens: np.ndarray) -> None:
        """Add the next tokens of the document."""
        start = self._length
        self._length += len(tokens)
        if self._unused:
            passed = min(self._unused, len(tokens))
            self._unused -= passed
            start, tokens = start + passed, tokens[passed:]
        if len(tokens):
            self._parts.append((self._origin, start, tokens))
            self._available += len(tokens)

    def is_ready(self) -> bool:
        """Whether there are tokens enough for a row."""
        return self._available >= self._row_length

    def take_row(self) -> np.ndarray:
        """Return the next row, [row_length]."""
        assert self.is_ready()
        pieces, needed, start = [], self._row_length, self._taken
        for _, _, tokens in self._parts:
            pieces.append(tokens[start : start + needed])
            needed -= len(pieces[-1])
            start = 0
            if needed == 0:
                break
        self._advance(self._row_length - 1)
        return np.concatenate(pieces)

    def first(self) -> tuple[Origin, int] | None:
        """Return the origin of the document that the next row begins in, and its tokens before
        that row; None when nothing has been added."""
        if not self._parts:
            return None
        origin, start, _ = self._parts[0]
        return origin, start + self._taken

    def _advance(self, count: int) -> None:
        self._available -= count
        self._taken += count
        while self._taken >= len(self._parts[0][2]):
            self._taken -= len(self._parts.popleft()[2])


class RowQueue(Generic[Origin]):
    """Rows that each hold a piece of a document, in order."""

    def __init__(self, skip: int = 0) -> None:
        """The first `skip` rows of the very first document are not used."""
        self._unused = skip
        self._rows: deque[tuple[Origin, int, np.ndarray]] = deque()
        self._document: tuple[Origin, int] | None = None  # the open one, and its rows so far

    @property
    def unused(self) -> int:
        """Rows of the first document that are still to be passed over."""
        return self._unused

    @property
    def is_behind(self) -> bool:
        """Whether the first document has not reached the first row yet."""
        return self._unused > 0

    def begin(self, origin: Origin) -> None:
        """Begin a document."""
        self._document = (origin, 0)

    def extend(self, row: np.ndarray) -> None:
        """Add the next row of the document."""
        assert self._document is not None
        origin, count = self._document
        if self._unused:
            self._unused -= 1
        else:
            self._rows.append((origin, count, row))
        self._document = (origin, count + 1)

    def end(self) -> None:
        """Note that the document is whole."""
        self._document = None

    def is_ready(self) -> bool:
        """Whether there is a row."""
        return bool(self._rows)

    def take_row(self) -> np.ndarray:
        """Return the next row."""
        return self._rows.popleft()[2]

    def first(self) -> tuple[Origin, int] | None:
        """Return the origin of the document that the next row is of, and its rows before that one;
        None when the next row is of a document that has not begun."""
        if self._rows:
            origin, count, _ = self._rows[0]
            return origin, count
        return self._document

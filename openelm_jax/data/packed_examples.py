"""Examples laid side by side in rows, whole, each of which begins with <s> and sees itself alone.

Legend: B rows, L tokens of a row, T = L - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from openelm_jax.data.chat import Encoded


class Rows(NamedTuple):
    """Tokens of rows, int32 [B, L], and which of their L - 1 targets count, bool [B, T]."""

    tokens_BL: np.ndarray
    counted_BT: np.ndarray


def pack(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Return which examples share which row: each in one, none cut, longest first, best fit.

    No example may be longer than a row. The same lengths give the same rows.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(row_length + 1)]  # rows by the room they have
    for i in order:
        assert 0 < lengths[i] <= row_length, "an example longer than a row"
        room = next((room for room in range(lengths[i], row_length + 1) if with_room[room]), None)
        if room is None:
            room, row = row_length, len(rows)
            rows.append([])
        else:
            row = with_room[room].pop()
        rows[row].append(i)
        with_room[room - lengths[i]].append(row)
    return rows


class PackedRows(Sequence[Rows]):
    """The rows of `pack` for examples, each made when it is asked for, as a batch of one.

    Learned tokens count as targets, <s> never. Behind the last example stand zeros, uncounted.
    """

    def __init__(self, examples: Sequence[Encoded], row_length: int) -> None:
        self._examples = examples
        self._row_length = row_length
        self._rows = pack([len(example.tokens) for example in examples], row_length)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: Any) -> Any:
        return lay([self._examples[j] for j in self._rows[i]], self._row_length)


def lay(examples: Sequence[Encoded], row_length: int) -> Rows:
    """Return one row of examples in their order."""
    tokens_BL = np.zeros((1, row_length), np.int32)
    learned_BL = np.zeros((1, row_length), bool)
    start = 0
    for tokens, learned in examples:
        stop = start + len(tokens)
        tokens_BL[0, start:stop] = tokens
        learned_BL[0, start:stop] = learned
        learned_BL[0, start] = False
        start = stop
    return Rows(tokens_BL, learned_BL[:, 1:])


def stack(rows: Sequence[Rows]) -> Rows:
    """Return rows as one batch."""
    return Rows(*(np.concatenate(parts) for parts in zip(*rows, strict=True)))

"""Where the data stands between two batches: all that is needed to go on exactly there.

A table of integers, one row for each source in each lane, which knows nothing of hosts, workers
or prefetching, and the fingerprint of everything else that decides the rows.
Axes: N lanes, S sources, C columns (`columns.Column`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from openelm_jax.data.columns import COUNTERS, Column
from openelm_jax.errors import UserError

VERSION = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Position:
    """The state of the data before batch `step`: of all lanes, or of those of one host."""

    step: int
    fingerprint: dict[str, Any]
    """Values of JSON by name; equal fingerprints give equal rows."""
    lanes: range
    """The lanes that the table is of."""
    table_NSC: np.ndarray
    """int64."""

    @property
    def is_whole(self) -> bool:
        """Whether it is the position of every lane."""
        return self.lanes == range(self.fingerprint["data.lanes"])

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, which `from_json` turns back into an equal position."""
        assert self.is_whole, "a position of some lanes is joined with the others before it is kept"
        return {
            "version": VERSION,
            "step": self.step,
            "fingerprint": self.fingerprint,
            "columns": [column.name.lower() for column in Column],
            "table": self.table_NSC.tolist(),
        }

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Position:
        """Return the position that `to_json` described; raises UserError for another version."""
        if plain.get("version") != VERSION:
            raise UserError(
                f"data position: version {plain.get('version')} is not {VERSION}, the one this "
                "program writes; continue the run with the program that wrote it."
            )
        table_NSC = np.array(plain["table"], dtype=np.int64)
        return cls(
            step=plain["step"],
            fingerprint=plain["fingerprint"],
            lanes=range(len(table_NSC)),
            table_NSC=table_NSC,
        )


def join_positions(positions: Sequence[Position]) -> Position:
    """Return the position of all lanes from those of the hosts, in any order."""
    ordered = sorted(positions, key=lambda position: position.lanes.start)
    first, last = ordered[0], ordered[-1]
    assert all(p.step == first.step and p.fingerprint == first.fingerprint for p in ordered)
    assert all(a.lanes.stop == b.lanes.start for a, b in pairwise(ordered))
    whole = Position(
        step=first.step,
        fingerprint=first.fingerprint,
        lanes=range(first.lanes.start, last.lanes.stop),
        table_NSC=np.concatenate([position.table_NSC for position in ordered]),
    )
    assert whole.is_whole
    return whole


def check_fingerprint(
    saved: dict[str, Any], current: dict[str, Any], *, reweight: bool = False
) -> None:
    """Raise UserError naming every field in which a saved fingerprint differs.

    With `reweight` the sources' weights may.
    """
    differing = [
        name
        for name in sorted(saved.keys() | current.keys())
        if saved.get(name) != current.get(name) and not (reweight and name.endswith(".weight"))
    ]
    if differing:
        differences = "; ".join(
            f"{name} was {_short(saved.get(name))} and is {_short(current.get(name))}"
            for name in differing
        )
        only_weights = all(name.endswith(".weight") for name in differing)
        cure = (
            "go back to the saved weights, or go on with these by --reweight"
            if only_weights
            else "go back to the saved settings, or start a new run"
        )
        raise UserError(
            f"data position: it belongs to rows in another order, because {differences}; {cure}."
        )


def count(position: Position, source: int) -> dict[str, int]:
    """Return the counters of a source, summed over lanes, and the least and most epochs of a lane.

    They count what was read before the document in which each lane's next row begins.
    """
    table_NC = position.table_NSC[:, source]
    counters = {column.name.lower(): int(table_NC[:, column].sum()) for column in COUNTERS}
    epochs_N = table_NC[:, Column.EPOCH]
    return counters | {"least_epochs": int(epochs_N.min()), "most_epochs": int(epochs_N.max())}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

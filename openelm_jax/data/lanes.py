"""Lanes: the logical streams that make a batch the same on any number of hosts and workers.

Lane l holds rows l * R to (l + 1) * R of every batch, and reads its own part of every source, for
ever (`source_lane.py`). Each row's source is drawn anew for each step. What a lane has read is one
row of integers per source, and travels with the rows that it describes.

Axes: N lanes, S sources, C columns of the state, R rows of a lane, L tokens of a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from openelm_jax.data import order
from openelm_jax.data.columns import BAD, Column
from openelm_jax.data.engine import DatasetIterator, IterDataset
from openelm_jax.data.source_lane import Plan, SourceLane
from openelm_jax.data.text import BadRecordLimit


class LaneGroup(IterDataset):
    """Some lanes from a position on; an element is one step of them.

    Elements are dicts: `step`, `lanes` [N], `rows` int32 [N, R, L], `states` int64 [N, S, C] after
    the step. `set_slice` is what Grain's worker processes call to share the lanes out.
    """

    def __init__(self, plan: Plan, lanes: range, step: int, states_NSC: np.ndarray) -> None:
        """`states_NSC` are those of `lanes`."""
        super().__init__()
        self._plan = plan
        self._lanes = lanes
        self._step = step
        self._states_NSC = states_NSC

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        del sequential_slice  # lanes carry their names, so that either way of slicing will do
        self._lanes = self._lanes[sl]
        self._states_NSC = self._states_NSC[sl]

    def __iter__(self) -> LaneGroupIterator:
        iterator = LaneGroupIterator(self._plan, self._lanes)
        iterator.set_state({"step": self._step, "states": self._states_NSC})
        return iterator


class LaneGroupIterator(DatasetIterator):
    """The elements of a LaneGroup; a source is opened in a lane when it is first drawn there."""

    def __init__(self, plan: Plan, lanes: range) -> None:
        super().__init__()
        self._plan = plan
        self._lanes = lanes

    def __next__(self) -> dict[str, Any]:
        plan, size = self._plan, self._plan.rows_per_lane
        sources_B = order.draw_sources(
            plan.seed, self._step, plan.weights_S, plan.global_batch_size
        )
        shape = (len(self._lanes), size, plan.rules.row_length)
        rows_NRL = np.empty(shape, dtype=np.int32)
        for place, lane in enumerate(self._lanes):
            drawn = sources_B[lane * size : (lane + 1) * size]
            for row, source in enumerate(drawn):
                rows_NRL[place, row] = next(self._stream(place, int(source)))
            for source in set(drawn.tolist()):
                self._states_NSC[place, source] = self._stream(place, source).get_state()
        self._step += 1
        return {
            "step": self._step - 1,
            "lanes": np.array(self._lanes),
            "rows": rows_NRL,
            "states": self._states_NSC.copy(),
        }

    def get_state(self) -> dict[str, Any]:
        return {"step": self._step, "states": self._states_NSC}

    def set_state(self, state: dict[str, Any]) -> None:
        self._step = int(state["step"])
        self._states_NSC = np.array(state["states"], dtype=np.int64)
        self._streams: dict[tuple[int, int], SourceLane] = {}
        self._limits = [
            BadRecordLimit(
                source.name,
                self._plan.max_bad_fraction,
                records=int(states_NC[:, Column.RECORDS].sum()),
                bad=int(states_NC[:, BAD].sum()),
                passes_left=int((states_NC[:, Column.EPOCH] == 0).sum()),
            )
            for source, states_NC in zip(
                self._plan.manifest.sources, self._states_NSC.swapaxes(0, 1), strict=True
            )
        ]

    def _stream(self, place: int, source: int) -> SourceLane:
        if (place, source) not in self._streams:
            self._streams[place, source] = SourceLane(
                self._plan,
                source,
                self._lanes[place],
                self._states_NSC[place, source],
                self._limits[source],
            )
        return self._streams[place, source]

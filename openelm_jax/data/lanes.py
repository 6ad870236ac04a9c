"""Lanes: the logical streams that make a batch the same on any number of hosts and workers.

Lane l holds rows l * R to (l + 1) * R of every batch and reads its own part of every source, for
ever: shards in an order of its own each epoch, the records of a block shuffled, documents packed a
source at a time. Each row's source is drawn anew for each step. What a lane has read is one row
of integers per source, and travels with the rows it describes: it names the document in which the
next row begins, and its counters are those before that document, so that reading the document
again counts it once.

Axes: N lanes, S sources, C columns of the state, R rows of a lane, L tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from openelm_jax.data import order
from openelm_jax.data.engine import DatasetIterator, IterDataset
from openelm_jax.data.manifest import Manifest, Shard
from openelm_jax.data.packing import Packer
from openelm_jax.data.readers import Reader, Record, open_reader
from openelm_jax.data.text import (
    BadRecordLimit,
    encode_document,
    parse_record,
    passes_char_filter,
)
from openelm_jax.errors import UserError
from openelm_jax.tokenizer import Tokenizer

# A lane gives a source up after so many documents without one that passes the filters.
MAX_BARREN_RECORDS = 1_000_000


class Column(IntEnum):
    """The state of one source in one lane."""

    EPOCH = 0
    SHARD = 1  # place in this epoch's order of the lane's shards
    BLOCK = 2  # position of the block in the shard
    RECORD = 3  # number in the shard of the block's first record
    INDEX = 4  # place in the shuffled block
    SKIP = 5  # tokens of the document before the next row
    RECORDS = 6
    BYTES = 7
    CHARS = 8
    CHAR_FILTER_DOCUMENTS = 9
    CHAR_FILTER_CHARS = 10
    TOKEN_FILTER_DOCUMENTS = 11
    TOKEN_FILTER_TOKENS = 12
    KEPT_DOCUMENTS = 13
    KEPT_TOKENS = 14
    BAD_JSON = 15
    BAD_UTF8 = 16
    BAD_KEY = 17
    REPAIRED = 18
    ROWS = 19


COUNTERS = tuple(column for column in Column if column >= Column.RECORDS)
BAD = (Column.BAD_JSON, Column.BAD_UTF8, Column.BAD_KEY)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that decides the rows of every lane, and where the shards are."""

    manifest: Manifest
    tokenizer: Tokenizer
    row_length: int
    global_batch_size: int
    lanes: int
    min_chars: int
    min_tokens: int
    max_bad_fraction: float
    seed: int
    block_bytes: int

    @property
    def rows_per_lane(self) -> int:
        return self.global_batch_size // self.lanes

    @property
    def weights_S(self) -> np.ndarray:
        return np.array([source.weight for source in self.manifest.sources])

    def first_states_NSC(self) -> np.ndarray:
        """Return the state of every lane before the first batch."""
        return np.zeros((self.lanes, len(self.manifest.sources), len(Column)), dtype=np.int64)

    def shards_of_lane(self, source: int, lane: int) -> tuple[list[int], int, int]:
        """Return a lane's shards of a source (their numbers in the manifest), stride and offset."""
        count = len(self.manifest.sources[source].shards)
        shuffled = order.permutation((self.seed, order.SHARDS, source), count)
        places, stride, offset = order.shards_of_lane(lane, self.lanes, count)
        return [int(shuffled[place]) for place in places], stride, offset


class SourceLane(DatasetIterator):
    """Endless rows [L] of one source in one lane."""

    def __init__(
        self, plan: Plan, source: int, lane: int, state_C: np.ndarray, limit: BadRecordLimit
    ) -> None:
        super().__init__()
        self._plan = plan
        self._source_index = source
        self._source = plan.manifest.sources[source]
        self._lane = lane
        self._shards, self._stride, self._offset = plan.shards_of_lane(source, lane)
        self._limit = limit
        self.set_state(state_C)

    def __next__(self) -> np.ndarray:
        while not self._packer.is_ready():
            self._add_document()
        self._rows += 1
        return self._packer.take_row()

    def get_state(self) -> Any:
        first = self._packer.first_token()
        state_C = (self._restored if first is None else first[0]).copy()
        if first is not None:
            state_C[Column.SKIP] = first[1]
        state_C[Column.ROWS] = self._rows
        return state_C

    def set_state(self, state: Any) -> None:
        self._restored = np.array(state, dtype=np.int64)
        self._now = self._restored.copy()  # where the next record is, and the counters so far
        self._now[Column.SKIP] = 0
        self._rows = int(self._restored[Column.ROWS])
        self._packer: Packer[np.ndarray] = Packer(self._plan.row_length)
        self._records: list[tuple[int, Record]] | None = None
        self._reader: Reader | None = None
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        key = (
            self._plan.seed,
            order.EPOCH,
            self._source_index,
            self._lane,
            int(self._now[Column.EPOCH]),
        )
        self._epoch_shards = [
            self._shards[place] for place in order.permutation(key, len(self._shards))
        ]
        self._records_of_epoch = self._kept_of_epoch = self._barren = 0

    def _add_document(self) -> None:
        """Read until a document passes the filters, and give it to the packer."""
        while True:
            number, record = self._seek_record()
            before = self._now.copy()
            tokens = self._read_document(number, record)
            self._now[Column.INDEX] += 1
            if tokens is not None:
                break
        skip = 0
        if self._packer.first_token() is None and self._rows:  # the first one after a restore
            skip = int(self._restored[Column.SKIP])
            position = slice(Column.EPOCH, Column.SKIP)
            moved = (before[position] != self._restored[position]).any()
            if moved or skip >= len(tokens):
                raise UserError(
                    f"{self._shard.path}: its documents have changed since the checkpoint was "
                    "written; put the old file back, or start a new run."
                )
        self._packer.add(before, tokens, skip)

    def _seek_record(self) -> tuple[int, Record]:
        """Return the next record and its number in the shard, reading on as far as needed."""
        now = self._now
        while True:
            if self._records is None:
                self._read_block()
            assert self._records is not None
            if now[Column.INDEX] < len(self._records):
                return self._records[now[Column.INDEX]]
            self._records = None
            now[Column.INDEX] = 0
            if self._next_block is not None:
                now[Column.BLOCK] = self._next_block
                now[Column.RECORD] += self._block_length
                continue
            now[Column.BLOCK] = now[Column.RECORD] = 0
            now[Column.SHARD] += 1
            self._reader = None
            if now[Column.SHARD] == len(self._epoch_shards):
                self._end_epoch()

    def _read_block(self) -> None:
        now = self._now
        shard_number = self._epoch_shards[now[Column.SHARD]]
        self._shard: Shard = self._source.shards[shard_number]
        if self._reader is None:
            self._reader = open_reader(self._shard, self._source.text_key, self._plan.block_bytes)
        position, first = int(now[Column.BLOCK]), int(now[Column.RECORD])
        block = self._reader.read_block(position)
        self._next_block, self._block_length = block.next_position, len(block.records)
        skipped = (self._offset - first) % self._stride
        mine = range(skipped, len(block.records), self._stride)
        key = (
            self._plan.seed,
            order.RECORDS,
            self._source_index,
            self._lane,
            int(now[Column.EPOCH]),
            shard_number,
            position,
        )
        self._records = [
            (first + mine[place], block.records[mine[place]])
            for place in order.permutation(key, len(mine))
        ]

    def _read_document(self, number: int, record: Record) -> np.ndarray | None:
        """Return the framed tokens of a record, or None when it is bad or dropped, and count it."""
        now, plan = self._now, self._plan
        text, flaw = parse_record(record, self._shard, self._source.text_key)
        self._limit.count(self._shard, number, record, flaw)
        now[Column.RECORDS] += 1
        self._records_of_epoch += 1
        self._barren += 1
        if flaw is not None:
            now[Column[flaw.upper()]] += 1
        if self._barren > MAX_BARREN_RECORDS:
            self._refuse_barren(f"the last {MAX_BARREN_RECORDS} records")
        if text is None:
            return None
        now[Column.CHARS] += len(text)
        now[Column.BYTES] += len(text) if text.isascii() else len(text.encode())
        if not passes_char_filter(text, plan.min_chars):
            now[Column.CHAR_FILTER_DOCUMENTS] += 1
            now[Column.CHAR_FILTER_CHARS] += len(text)
            return None
        tokens = encode_document(text, plan.tokenizer)
        if len(tokens) < plan.min_tokens:
            now[Column.TOKEN_FILTER_DOCUMENTS] += 1
            now[Column.TOKEN_FILTER_TOKENS] += len(tokens)
            return None
        now[Column.KEPT_DOCUMENTS] += 1
        now[Column.KEPT_TOKENS] += len(tokens)
        self._kept_of_epoch += 1
        self._barren = 0
        return tokens

    def _end_epoch(self) -> None:
        if self._records_of_epoch == 0:
            raise UserError(
                f"data.sources {self._source.name}: lane {self._lane} of {self._plan.lanes} holds "
                "no record; lower data.lanes, or take files without records out."
            )
        if self._kept_of_epoch == 0:
            self._refuse_barren("all records")
        if self._now[Column.EPOCH] == 0:
            self._limit.end_first_pass()
        self._now[Column.EPOCH] += 1
        self._now[Column.SHARD] = 0
        self._begin_epoch()

    def _refuse_barren(self, which: str) -> None:
        now, plan = self._now, self._plan
        raise UserError(
            f"data.sources {self._source.name}: no training text in {which} of lane {self._lane} "
            f"of {plan.lanes}: of {now[Column.RECORDS]} records "
            f"{now[Column.CHAR_FILTER_DOCUMENTS]} have fewer characters than data.min_chars "
            f"{plan.min_chars}, {now[Column.TOKEN_FILTER_DOCUMENTS]} fewer tokens than "
            f"data.min_tokens {plan.min_tokens}, {sum(now[column] for column in BAD)} are bad; "
            "lower the thresholds or data.lanes, or give other files."
        )


class LaneGroup(IterDataset):
    """Some lanes from a position on; an element is one step of them.

    Elements are dicts: `step`, `lanes` [N], `rows` int32 [N, R, L], `states` int64 [N, S, C] after
    the step. `set_slice` is what Grain's worker processes call to share the lanes out.
    """

    def __init__(self, plan: Plan, step: int, states_NSC: np.ndarray) -> None:
        super().__init__()
        self._plan = plan
        self._step = step
        self._states_NSC = states_NSC
        self._lanes = range(plan.lanes)

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        del sequential_slice  # lanes carry their names, so that either way of slicing will do
        self._lanes = self._lanes[sl]

    def __iter__(self) -> LaneGroupIterator:
        iterator = LaneGroupIterator(self._plan, self._lanes)
        iterator.set_state({"step": self._step, "states": self._states_NSC[list(self._lanes)]})
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
        rows_NRL = np.empty((len(self._lanes), size, plan.row_length), dtype=np.int32)
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
        return {"step": self._step, "states": self._states_NSC.copy()}

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

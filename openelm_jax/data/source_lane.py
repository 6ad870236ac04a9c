"""One source in one lane: its part of the shards, read for ever, filtered, tokenised, packed.

Shards come in an order of their own each epoch, the records of a block shuffled. The state is a
row of integers: it names the document in which the next row begins, and its counters are those
before that document, so that reading the document again counts it once.

Axes: N lanes, S sources, C columns of the state, L tokens of a row.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from openelm_jax.data import order
from openelm_jax.data.columns import BAD, Column
from openelm_jax.data.engine import DatasetIterator
from openelm_jax.data.filters import accept, pad_id, read_text
from openelm_jax.data.manifest import Manifest, Shard
from openelm_jax.data.packing import Packer, RowQueue
from openelm_jax.data.readers import Part, Reader, Record, open_reader
from openelm_jax.data.text import BadRecordLimit, TextRules
from openelm_jax.errors import UserError
from openelm_jax.tokenizer import Tokenizer

# A lane gives a source up after so many records without one that passes the filters, or after so
# many seconds if it has read enough by then to be sure.
MAX_BARREN_RECORDS = 1_000_000
MAX_BARREN_SECONDS = 60.0
BARREN_RECORDS_TO_BE_SURE = 1_000


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that decides the rows of every lane, and where the shards are."""

    manifest: Manifest
    tokenizer: Tokenizer
    rules: TextRules
    global_batch_size: int
    lanes: int
    max_bad_fraction: float
    skip_damage: bool
    seed: int
    block_bytes: int

    @property
    def rows_per_lane(self) -> int:
        return self.global_batch_size // self.lanes

    @property
    def weights_S(self) -> np.ndarray:
        return np.array([source.weight for source in self.manifest.sources])

    @property
    def pad_id(self) -> int | None:
        """What fills rows up; None where none need be."""
        return pad_id(self.tokenizer, self.rules)

    def first_states_NSC(self) -> np.ndarray:
        """Return the state of every lane before the first batch."""
        return np.zeros((self.lanes, len(self.manifest.sources), len(Column)), dtype=np.int64)

    def shards_of_lane(self, source: int, lane: int) -> tuple[list[int], Part]:
        """Return a lane's shards of a source (numbers in the manifest), and its part of each."""
        count = len(self.manifest.sources[source].shards)
        shuffled = order.permutation((self.seed, order.SHARDS, source), count)
        places, sharers, number = order.shards_of_lane(lane, self.lanes, count)
        return [int(shuffled[place]) for place in places], Part(number, sharers)


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
        self._shards, self._part = plan.shards_of_lane(source, lane)
        self._limit = limit
        self._document: Iterator[bool] = iter(())
        self.set_state(state_C)

    def __next__(self) -> np.ndarray:
        self._waiting_since = time.monotonic()
        while not self._packer.is_ready():
            if next(self._document, None) is None:
                self._document = self._open_document()
        self._rows += 1
        return self._packer.take_row()

    def get_state(self) -> Any:
        first = self._packer.first()
        assert first is not None, "a state is that after a row"
        state_C = np.array(first[0], dtype=np.int64)
        state_C[Column.SKIP] = first[1]
        state_C[Column.ROWS] = self._rows
        return state_C

    def set_state(self, state: Any) -> None:
        self._restored: list[int] = np.asarray(state).tolist()
        self._now = self._restored.copy()  # where the next record is, and the counters so far
        self._now[Column.SKIP] = 0
        self._rows = self._restored[Column.ROWS]
        skip = self._restored[Column.SKIP]
        rules = self._plan.rules
        self._packer: Packer[list[int]] | RowQueue[list[int]] = (
            RowQueue(skip) if rules.packing == "corenet" else Packer(rules.row_length, skip)
        )
        self._document = iter(())
        self._records: list[tuple[int, Record]] | None = None
        self._reader: Reader | None = None
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        epoch, most = self._now[Column.EPOCH], self._source.max_epochs
        if most is not None and epoch >= most:
            raise UserError(
                f"data.sources {self._source.name}: lane {self._lane} of {self._plan.lanes} has "
                f"read its part max_epochs ({most}) times and the next row needs more; raise "
                "max_epochs, or end the run here (a lower weight, or fewer training.steps, would "
                "have made it last)."
            )
        key = (self._plan.seed, order.EPOCH, self._source_index, self._lane, epoch)
        self._epoch_shards = [
            self._shards[place] for place in order.permutation(key, len(self._shards))
        ]
        self._records_of_epoch = self._barren = 0
        self._has_kept = False

    def _open_document(self) -> Iterator[bool]:
        """Return what gives the next document with text to the packer, a part a step."""
        while True:
            number, record = self._seek_record()
            before = self._now.copy()
            self._now[Column.INDEX] += 1
            text = self._read_text(number, record)
            if text is not None:
                self._packer.begin(before)
                return self._pack(before, text)

    def _seek_record(self) -> tuple[int, Record]:
        """Return the next record and its number, reading on as far as needed."""
        now = self._now
        while True:
            if self._records is None:
                self._read_block()
            assert self._records is not None
            index = now[Column.INDEX]
            if index < len(self._records):
                found = self._records[index]
                self._records[index] = (0, None)  # its text is not needed any more
                return found
            self._records = None
            now[Column.INDEX] = 0
            if self._following is not None:
                now[Column.BLOCK], now[Column.RECORD] = self._following
                continue
            now[Column.BLOCK] = now[Column.RECORD] = 0
            now[Column.SHARD] += 1
            now[Column.SHARDS] += 1
            now[Column.DAMAGED_SHARDS] += self._is_damaged
            self._reader = None
            if now[Column.SHARD] == len(self._epoch_shards):
                self._end_epoch()

    def _read_block(self) -> None:
        now = self._now
        shard_number = self._epoch_shards[now[Column.SHARD]]
        self._shard: Shard = self._source.shards[shard_number]
        if self._reader is None:
            self._reader = open_reader(
                self._shard, self._source.text_key, self._plan.block_bytes, self._part
            )
        position = now[Column.BLOCK]
        block = self._reader.read_block(position, now[Column.RECORD])
        self._is_damaged = block.damage is not None
        if block.damage is not None and not self._plan.skip_damage:
            raise UserError(block.damage)
        self._following = (
            None if block.next_position is None else (block.next_position, block.next_number)
        )
        key = (
            self._plan.seed,
            order.RECORDS,
            self._source_index,
            self._lane,
            now[Column.EPOCH],
            shard_number,
            position,
        )
        self._records = [
            (block.numbers[place], block.records[place])
            for place in order.permutation(key, len(block.records))
        ]

    def _read_text(self, number: int, record: Record) -> str | None:
        """Return the text of a record, or None when it is bad."""
        if self._barren >= MAX_BARREN_RECORDS or (
            self._barren >= BARREN_RECORDS_TO_BE_SURE
            and time.monotonic() - self._waiting_since > MAX_BARREN_SECONDS
        ):
            self._refuse_barren(f"the last {self._barren} records")
        text, flaw = read_text(
            record, self._shard, self._source.text_key, self._plan.rules, self._now
        )
        self._limit.count(self._shard, number, record, flaw, self._part)
        self._records_of_epoch += 1
        self._barren += 1
        return text

    def _pack(self, before: list[int], text: str) -> Iterator[bool]:
        """Give what the filters leave of a document to the packer, part by part; the document that
        a restored position names has to be as it was."""
        plan, packer = self._plan, self._packer
        expected = packer.unused > 0
        place = slice(Column.EPOCH, Column.SKIP)
        if expected and before[place] != self._restored[place]:
            self._refuse_changed()
        for tokens in accept(text, plan.tokenizer, plan.rules, self._now):
            self._has_kept = True
            self._barren = 0
            self._waiting_since = time.monotonic()
            packer.extend(tokens)
            yield True
        packer.end()
        if expected and packer.is_behind:
            self._refuse_changed()

    def _end_epoch(self) -> None:
        if self._records_of_epoch == 0:
            raise UserError(
                f"data.sources {self._source.name}: lane {self._lane} of {self._plan.lanes} holds "
                "no record; lower data.lanes, or take files without records out."
            )
        if not self._has_kept:
            self._refuse_barren("all records")
        if self._now[Column.EPOCH] == 0:
            self._limit.end_first_pass()
        self._now[Column.EPOCH] += 1
        self._now[Column.SHARD] = 0
        self._begin_epoch()

    def _refuse_barren(self, which: str) -> None:
        now, rules = self._now, self._plan.rules
        raise UserError(
            f"data.sources {self._source.name}: no training text in {which} of lane {self._lane} "
            f"of {self._plan.lanes}: of {now[Column.RECORDS]} records "
            f"{now[Column.CHAR_FILTER_DOCUMENTS]} have fewer characters than data.min_chars "
            f"{rules.min_chars}, {now[Column.TOKEN_FILTER_DOCUMENTS]} fewer tokens than "
            f"data.min_tokens {rules.min_tokens}, {sum(now[column] for column in BAD)} are bad; "
            "lower the thresholds or data.lanes, or give other files."
        )

    def _refuse_changed(self) -> None:
        raise UserError(
            f"{self._shard.path}: its documents have changed since the checkpoint was "
            "written; put the old file back, or start a new run."
        )

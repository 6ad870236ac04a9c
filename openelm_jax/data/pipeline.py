"""From shards to batches, endlessly, with the exact position after each.

    data = open_data(config, tokenizer, row_length=2049, global_batch_size=2048)
    rows_BL, position = next(data)

B rows of the batch (of several hosts: of this host's lanes), L tokens of a row (one more than the
context), S sources, P places of a source's shards in their permuted list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from openelm_jax.config import DataConfig
from openelm_jax.data import order
from openelm_jax.data.engine import DatasetIterator, iterate
from openelm_jax.data.lanes import LaneGroup
from openelm_jax.data.manifest import Manifest, Shard, Source, list_manifest
from openelm_jax.data.position import Position, check_fingerprint, count
from openelm_jax.data.readers import each_part_holds_records
from openelm_jax.data.source_lane import Plan
from openelm_jax.data.text import (
    BadRecordLimit,
    TextRules,
    check_source,
    passes_char_filter,
    read_texts,
)
from openelm_jax.data.validation import ValidationSet, validation_set
from openelm_jax.errors import UserError
from openelm_jax.tokenizer import Tokenizer

__all__ = [
    "DataIterator",
    "Position",
    "ValidationSet",
    "open_data",
    "training_texts",
    "validation_set",
]

# Raised whenever the same settings would give other rows than before.
ORDER_VERSION = 2
MOST_LANES = 256
BYTES_PER_LANE = 2_000_000
# All streams of a run may be open in one process: their blocks fit in memory together.
MOST_BLOCK_BYTES = 4 << 20
ALL_BLOCKS_BYTES = 1 << 30


def open_data(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    row_length: int,
    global_batch_size: int,
    host: int = 0,
    hosts: int = 1,
) -> DataIterator:
    """Return the endless batches of `config`'s mixture, from the first one on.

    Of several hosts each makes the rows of its own lanes, which follow one another: all hosts'
    rows together are the batch that one host would make. Raises UserError for data that is missing
    or cannot be used, at once where a first look shows it.
    """
    plan = make_plan(config, tokenizer, row_length=row_length, global_batch_size=global_batch_size)
    if plan.lanes % hosts:
        raise UserError(
            f"data.lanes {plan.lanes} cannot be shared out evenly among {hosts} hosts; set "
            f"data.lanes to a multiple of {hosts} that divides training.global_batch_size "
            f"{global_batch_size}."
        )
    share = plan.lanes // hosts
    return DataIterator(
        plan,
        _fingerprint(config, plan),
        lanes=range(host * share, (host + 1) * share),
        workers=min(config.workers, share),
    )


def make_plan(
    config: DataConfig, tokenizer: Tokenizer, *, row_length: int, global_batch_size: int
) -> Plan:
    """Return what decides every row, after a first look at the data."""
    manifest = list_manifest(config)
    skip_damage = config.on_damaged_shard == "skip_rest"
    for source in manifest.sources:
        check_source(source, source.shards, skip_damage=skip_damage)
    lanes = _lanes(config, manifest, global_batch_size)
    return Plan(
        manifest=manifest,
        tokenizer=tokenizer,
        rules=TextRules.of(config, row_length),
        global_batch_size=global_batch_size,
        lanes=lanes,
        max_bad_fraction=config.max_bad_fraction,
        skip_damage=skip_damage,
        seed=config.seed,
        block_bytes=min(MOST_BLOCK_BYTES, ALL_BLOCKS_BYTES // (lanes * len(manifest.sources))),
    )


def training_texts(config: DataConfig) -> Iterator[str]:
    """Return the training documents that pass the character filter, once, in manifest order.

    Raises UserError at once for data that is missing, and at the end of a source of which no
    document passes.
    """
    manifest = list_manifest(config)
    skip_damage = config.on_damaged_shard == "skip_rest"
    for source in manifest.sources:
        check_source(source, source.shards, skip_damage=skip_damage)
    return (text for source in manifest.sources for text in _passing_texts(config, source))


def choose_lanes(num_bytes: int, global_batch_size: int) -> int:
    """Return the largest divisor of the batch that is at most 256 and leaves 2 MB to each lane."""
    most = max(1, min(MOST_LANES, num_bytes // BYTES_PER_LANE))
    return max(lanes for lanes in _divisors(global_batch_size) if lanes <= most)


class DataIterator(DatasetIterator):
    """Endless (rows int32 [B, L], position after them); a position can be gone back to at any time.

    One thread at a time may use it.
    """

    def __init__(
        self, plan: Plan, fingerprint: dict[str, Any], *, lanes: range, workers: int
    ) -> None:
        super().__init__()
        self._plan = plan
        self._lanes = lanes
        self._workers = workers
        self.fingerprint = fingerprint
        self._go_to(0, plan.first_states_NSC()[lanes.start : lanes.stop])

    @property
    def manifest(self) -> Manifest:
        """The shards that are read."""
        return self._plan.manifest

    @property
    def pad_id(self) -> int | None:
        """The token that fills rows up, which is no target; None when rows are always full."""
        return self._plan.pad_id

    def __next__(self) -> tuple[np.ndarray, Position]:
        plan = self._plan
        shape = (len(self._lanes), plan.rows_per_lane, plan.rules.row_length)
        rows_NRL = np.empty(shape, dtype=np.int32)
        missing = len(self._lanes)
        while missing:
            element = next(self._elements)
            assert element["step"] == self._step
            places = element["lanes"] - self._lanes.start
            rows_NRL[places] = element["rows"]
            self._table_NSC[places] = element["states"]
            missing -= len(places)
        self._step += 1
        return rows_NRL.reshape(-1, plan.rules.row_length), self.get_state()

    def get_state(self) -> Any:
        """Return the position of the next batch, of this host's lanes."""
        return Position(
            step=self._step,
            fingerprint=self.fingerprint,
            lanes=self._lanes,
            table_NSC=self._table_NSC.copy(),
        )

    def set_state(self, state: Any, *, reweight: bool = False) -> None:
        """Go to a whole position; raises UserError when it belongs to other data.

        With `reweight` the weights of its sources may be others than they were.
        """
        check_fingerprint(state.fingerprint, self.fingerprint, reweight=reweight)
        assert state.is_whole
        self._elements.close()
        self._go_to(state.step, state.table_NSC[self._lanes.start : self._lanes.stop])

    def counters(self, position: Position) -> dict[str, dict[str, int]]:
        """Return for each source what had been read, dropped and kept at a position."""
        return {
            source.name: count(position, index)
            for index, source in enumerate(self._plan.manifest.sources)
        }

    def close(self) -> None:
        """Let go of what is open and end the workers; there are no batches afterwards."""
        self._elements.close()
        super().close()

    def _go_to(self, step: int, table_NSC: np.ndarray) -> None:
        self._step = step
        self._table_NSC = np.array(table_NSC, dtype=np.int64)
        group = LaneGroup(self._plan, self._lanes, step, self._table_NSC.copy())
        contents = f"lanes {self._lanes.start} to {self._lanes.stop - 1}"
        self._elements = iterate(group, self._workers, contents)


def _passing_texts(config: DataConfig, source: Source) -> Iterator[str]:
    rules = TextRules.of(config, row_length=2)
    limit = BadRecordLimit(source.name, config.max_bad_fraction)
    skip_damage = config.on_damaged_shard == "skip_rest"
    passed = False
    for text in read_texts(source, source.shards, limit, skip_damage=skip_damage):
        if passes_char_filter(text, rules):
            passed = True
            yield text
    if not passed:
        raise UserError(
            f"data.sources {source.name}: no text to train a tokenizer on: of {limit.records} "
            f"records {limit.records - limit.bad} have fewer characters than data.min_chars "
            f"{config.min_chars}, {limit.bad} are bad; lower the threshold, or give other files."
        )


def _fingerprint(config: DataConfig, plan: Plan) -> dict[str, Any]:
    rules = plan.rules
    fields: dict[str, Any] = {
        "data order": ORDER_VERSION,
        "data files": plan.manifest.sha256(),
        "data.sources": [source.name for source in config.sources],
        "data.min_chars": rules.min_chars,
        "data.min_tokens": rules.min_tokens,
        "data.packing": rules.packing,
        "data.char_filter": rules.char_filter,
        "data.normalize": rules.normalize,
        "data.lanes": plan.lanes,
        "data.seed": config.seed,
        "model.context_length": rules.row_length - 1,
        "tokenizer": plan.tokenizer.sha256,
        "training.global_batch_size": plan.global_batch_size,
        "block bytes": plan.block_bytes,
        "longest document": rules.max_document_chars,
    }
    for source in config.sources:
        fields[f"data.sources.{source.name}.text_key"] = source.text_key
        fields[f"data.sources.{source.name}.weight"] = float(source.weight)
    return fields


def _lanes(config: DataConfig, manifest: Manifest, global_batch_size: int) -> int:
    """Return data.lanes, or the most up to `choose_lanes` that each have records of every source.

    Raises UserError when data.lanes leave a lane without a record.
    """
    most = config.lanes or choose_lanes(manifest.num_bytes, global_batch_size)
    assert global_batch_size % most == 0, (global_batch_size, most)
    # Where each lane has shards of its own nothing is read: they are taken to hold records.
    shared = [
        (source, _look_at_places(config, source, index))
        for index, source in enumerate(manifest.sources)
        if len(source.shards) < most
    ]
    largest = next(
        lanes
        for lanes in reversed(_divisors(global_batch_size))
        if lanes <= most
        and all(_works(lanes, len(source.shards), holds) for source, (_, holds) in shared)
    )
    if config.lanes is None or largest == most:
        return largest
    for source, (shards_P, holds) in shared:
        for place, shard in enumerate(shards_P):
            if not holds(place, 1):
                raise UserError(
                    f"data.sources {source.name}: {shard.path} holds no record; take it out of "
                    "the source's files."
                )
        if not _works(most, len(shards_P), holds):
            raise UserError(
                f"data.sources {source.name}: {most} lanes leave some without a record; the most "
                f"that work for training.global_batch_size {global_batch_size} are "
                f"data.lanes {largest}."
            )
    raise AssertionError("a source has too few records")


def _look_at_places(
    config: DataConfig, source: Source, index: int
) -> tuple[list[Shard], Callable[[int, int], bool]]:
    """Return the shard at each place of a source, and what tells of the one at a place whether
    each of so many parts of it holds a record."""
    shuffled = order.permutation((config.seed, order.SHARDS, index), len(source.shards))
    shards_P = [source.shards[int(number)] for number in shuffled]
    skip_damage = config.on_damaged_shard == "skip_rest"

    @functools.cache
    def holds(place: int, of: int) -> bool:
        return each_part_holds_records(
            shards_P[place], source.text_key, of, skip_damage=skip_damage
        )

    return shards_P, holds


def _works(lanes: int, num_shards: int, holds: Callable[[int, int], bool]) -> bool:
    """Whether each lane has a record of a source."""
    if num_shards < lanes:
        return all(
            holds(place, order.lanes_of_place(place, lanes, num_shards))
            for place in range(num_shards)
        )
    return all(
        any(holds(place, 1) for place in order.shards_of_lane(lane, lanes, num_shards)[0])
        for lane in range(lanes)
    )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]

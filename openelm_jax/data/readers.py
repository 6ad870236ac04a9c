"""Shards to records, a block at a time, from any block on, and a part of a shard if wanted.

How a shard is parted, so that several lanes can share it:

| format | part j of k |
| --- | --- |
| jsonl | a range of bytes, the lines that begin in it; with less than 1 MiB a part, a stride |
| parquet | a range of row groups; with fewer groups than parts, a stride |
| array_record | a range of records |
| jsonl.gz, jsonl.zst, demo | a stride: the records whose number leaves j when divided by k |
| txt | its one record is in part 0 |
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openelm_jax.data import demo, line_files, record_files, storage
from openelm_jax.data.blocks import (
    WHOLE,
    Block,
    DamagedFile,
    Part,
    Reader,
    Record,
    describe_damage,
    read_bytes,
    require_size,
    take_stride,
)
from openelm_jax.data.manifest import Shard
from openelm_jax.errors import UserError

__all__ = [
    "WHOLE",
    "Block",
    "Part",
    "Reader",
    "Record",
    "count_records",
    "each_part_holds_records",
    "locate",
    "open_reader",
    "read_blocks",
    "splits_by_position",
]

COUNTED_BYTES = 1 << 20
# To see whether a range holds a record.
PROBED_BYTES, PROBES_AT_ONCE = 1 << 16, 16
# A record of a range so far into a file is named by the range: to count the lines before it takes
# too long.
LINES_COUNTED_BYTES = 64 << 20


def open_reader(shard: Shard, text_key: str, block_bytes: int, part: Part = WHOLE) -> Reader:
    """Return the reader of a part of `shard`; its blocks hold about `block_bytes` of text.

    Raises UserError when the file is not what was listed.
    """
    if shard.format == "demo":
        return _DemoReader(shard, part)
    require_size(shard, storage.size_of(shard.path))
    match shard.format:
        case "parquet":
            return record_files.ParquetReader(shard, text_key, block_bytes, part)
        case "array_record":
            return record_files.ArrayRecordReader(shard, text_key, block_bytes, part)
        case "txt":
            return _TextReader(shard, part)
        case _:
            return line_files.LineReader(shard, block_bytes, part)


def read_blocks(
    shard: Shard,
    text_key: str,
    block_bytes: int,
    part: Part = WHOLE,
    *,
    skip_damage: bool = False,
) -> Iterator[Block]:
    """Yield the blocks of a shard, or of a part of it, from its beginning.

    Raises UserError for a damaged file, unless `skip_damage` leaves it at what can be read.
    """
    reader = open_reader(shard, text_key, block_bytes, part)
    position: int | None = 0
    number = 0
    while position is not None:
        block = reader.read_block(position, number)
        if block.damage is not None and not skip_damage:
            raise UserError(block.damage)
        yield block
        position, number = block.next_position, block.next_number


def locate(shard: Shard, number: int, part: Part = WHOLE) -> str:
    """Return where a record of a part is, as people name it: FILE:LINE, FILE, row N or FILE; far
    into a large text FILE, line N after byte B, blank lines not counted.

    `number` is one of `Block.numbers`. Reads a text up to there: for messages only.
    """
    if shard.format == "txt":
        return shard.path
    if shard.format in ("parquet", "array_record", "demo"):
        return f"{shard.path}, row {number}"
    begin = line_files.first_byte(shard, part)
    if begin > LINES_COUNTED_BYTES:
        return f"{shard.path}, line {number + 1} after byte {begin:,}"
    return f"{shard.path}:{line_files.line_of_record(shard, number, part)}"


def splits_by_position(shard: Shard, of: int) -> bool:
    """Whether each of `of` parts is a range, so that all of them cost no more than the whole.

    Looks into the index of parquet and array_record, and nowhere else: the ranges of these hold
    records, while a line of a jsonl that is longer than a range leaves one without any.
    """
    try:
        match shard.format:
            case "parquet":
                return len(record_files.rows_of_groups(shard)) >= of
            case "array_record":
                return record_files.count_array_records(shard) >= of
    except DamagedFile:
        return False
    return line_files.splits_into_ranges(shard, of)


def each_part_holds_records(
    shard: Shard, text_key: str, of: int, *, skip_damage: bool = False
) -> bool:
    """Whether each of `of` parts of a shard holds a record.

    Reads the first line of each range of a jsonl, and the file as far as `of` records where it
    has neither ranges nor an index. Raises UserError as `count_records` does.
    """
    if not line_files.splits_into_ranges(shard, of):
        return count_records(shard, text_key, of, skip_damage=skip_damage) >= of

    def holds_records(number: int) -> bool:
        blocks = read_blocks(shard, text_key, PROBED_BYTES, Part(number, of))
        return any(block.records for block in blocks)

    with ThreadPoolExecutor(PROBES_AT_ONCE) as pool:  # a remote store takes long to answer
        return all(pool.map(holds_records, range(of)))


def count_records(shard: Shard, text_key: str, most: int, *, skip_damage: bool = False) -> int:
    """Return the records of a shard, counted up to `most`.

    Reads the file where it has no index. Raises UserError for a damaged file, unless
    `skip_damage` leaves it at what can be read.
    """
    try:
        match shard.format:
            case "txt":
                return min(1, most)
            case "parquet":
                return min(sum(record_files.rows_of_groups(shard)), most)
            case "array_record":
                return min(record_files.count_array_records(shard), most)
    except DamagedFile as error:
        if skip_damage:
            return 0
        raise UserError(describe_damage(shard, error)) from error
    count = 0
    for block in read_blocks(shard, text_key, COUNTED_BYTES, skip_damage=skip_damage):
        count += len(block.records)
        if count >= most:
            break
    return min(count, most)


class _TextReader:
    """A text file is one document; a byte order mark is none of it."""

    def __init__(self, shard: Shard, part: Part) -> None:
        self._shard = shard
        self._is_mine = part.number == 0

    def read_block(self, position: int, number: int) -> Block:
        assert (position, number) == (0, 0)
        if not self._is_mine:
            return Block([], [], None, 1)
        data = read_bytes(self._shard, 0, self._shard.size)
        return Block([data.removeprefix(codecs.BOM_UTF8)], [0], None, 1)


class _DemoReader:
    """All documents of a half of the demo corpus in one block."""

    def __init__(self, shard: Shard, part: Part) -> None:
        half: demo.Part = "holdout" if shard.name.endswith("holdout") else "train"
        self._records = demo.read(Path(shard.path), half)
        self._part = part

    def read_block(self, position: int, number: int) -> Block:
        assert (position, number) == (0, 0)
        return take_stride(self._records, 0, self._part, None)

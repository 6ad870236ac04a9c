"""The records of .parquet and .array_record, whose own index finds each of them.

Positions and numbers are the records' numbers in the file.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import orjson

from openelm_jax.data import storage
from openelm_jax.data.blocks import (
    WHOLE,
    Block,
    DamagedFile,
    Part,
    Record,
    describe_damage,
    read_bytes,
    take_stride,
)
from openelm_jax.data.manifest import Shard
from openelm_jax.errors import UserError


def rows_of_groups(shard: Shard) -> list[int]:
    """Return the rows of each row group of a .parquet; raises DamagedFile."""
    with _open_parquet(shard, _RangeFile(shard)) as file:
        return _rows_of_groups(file)


def count_array_records(shard: Shard) -> int:
    """Return the records of an .array_record; raises DamagedFile."""
    with _open_array_record(shard) as file:
        return file.num_records()


class ParquetReader:
    """The text column of a part of a .parquet; a block is a row group, or a piece of a large one.

    A piece is decoded from the beginning of its row group on, the price of holding no more.
    """

    def __init__(self, shard: Shard, text_key: str, block_bytes: int, part: Part) -> None:
        self._shard = shard
        self._text_key = text_key
        self._block_bytes = block_bytes
        self._part = part
        self._file = _RangeFile(shard)

    def read_block(self, position: int, number: int) -> Block:
        try:
            return self._read(position)
        except DamagedFile:
            self._file = _RangeFile(self._shard)
        try:
            return self._read(position)
        except DamagedFile as error:
            return Block([], [], None, number, describe_damage(self._shard, error))

    def _read(self, position: int) -> Block:
        with _open_parquet(self._shard, self._file) as file:
            column = self._find_column(file)
            starts = [0, *itertools.accumulate(_rows_of_groups(file))]
            num_groups = len(starts) - 1
            first, stop, stride = 0, starts[-1], self._part
            if num_groups >= self._part.of:
                first = starts[num_groups * self._part.number // self._part.of]
                stop = starts[num_groups * (self._part.number + 1) // self._part.of]
                stride = WHOLE
            row = position or first
            if row >= stop:
                return Block([], [], None, row)
            group = bisect.bisect_right(starts, row) - 1
            num_bytes = file.metadata.row_group(group).column(column).total_uncompressed_size
            num_rows = max(1, (starts[group + 1] - starts[group]) * self._block_bytes // num_bytes)
            end = min(row + num_rows, starts[group + 1])
            records = self._read_rows(file, group, row - starts[group], end - starts[group])
        return take_stride(records, row, stride, end if end < stop else None)

    def _read_rows(self, file, group: int, first: int, stop: int) -> list[Record]:
        import pyarrow

        records: list[Record] = []
        end = 0
        for batch in file.iter_batches(
            stop - first, row_groups=[group], columns=[self._text_key], use_threads=False
        ):
            start, end = end, end + len(batch)
            if end > first:
                column = batch.column(0)[max(first - start, 0) : stop - start]
                if pyarrow.types.is_dictionary(column.type):
                    column = column.cast(column.type.value_type)
                # Bytes, not strings: bad UTF-8 is a bad record, not a bad file.
                records += column.cast(pyarrow.large_binary()).to_pylist()
            if end >= stop:
                break
        return records

    def _find_column(self, file) -> int:
        """Return which of the file's columns holds the text; raises UserError when none does."""
        import pyarrow

        schema = file.schema_arrow
        if self._text_key not in schema.names:
            raise UserError(
                f"{self._shard.path}: there is no column {self._text_key!r} but "
                f"{', '.join(schema.names)}; set the source's text_key (data.sources) to the "
                "column with the text."
            )
        kind = schema.field(self._text_key).type
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        # Where every text is missing, or there is no row, a column may have no type: null.
        tests = ("string", "large_string", "string_view", "binary", "large_binary", "null")
        if not any(getattr(pyarrow.types, f"is_{test}")(kind) for test in tests):
            raise UserError(
                f"{self._shard.path}: the column {self._text_key!r} holds {kind}, not text; "
                "set the source's text_key (data.sources) to the column with the text."
            )
        paths = [file.schema.column(index).path for index in range(len(file.schema.names))]
        return paths.index(self._text_key)


class ArrayRecordReader:
    """A part of an .array_record: JSON objects, or tf.train.Examples, which become JSON objects."""

    def __init__(self, shard: Shard, text_key: str, block_bytes: int, part: Part) -> None:
        self._shard = shard
        self._text_key = text_key
        self._block_bytes = block_bytes
        self._part = part

    def read_block(self, position: int, number: int) -> Block:
        block = self._read(position, number)
        return block if block.damage is None else self._read(position, number)

    def _read(self, position: int, number: int) -> Block:
        try:
            with _open_array_record(self._shard) as file:
                count = file.num_records()
                first = position or count * self._part.number // self._part.of
                stop = count * (self._part.number + 1) // self._part.of
                if first >= stop:
                    return Block([], [], None, first)
                end = min(stop, first + max(1, count * self._block_bytes // self._shard.size))
                read, reason = _read_array_records(file, first, end)
        except DamagedFile as error:
            return Block([], [], None, number, describe_damage(self._shard, error))
        records = [_as_json(record, self._text_key) for record in read]
        if reason is not None:
            return take_stride(records, first, WHOLE, None, describe_damage(self._shard, reason))
        return take_stride(records, first, WHOLE, end if end < stop else None)


class _RangeFile:
    """A file that is open only while it is read.

    Of a remote one the index and the last range are kept: all pieces of a row group need the same.
    """

    closed = False

    def __init__(self, shard: Shard) -> None:
        self.index: Any = None
        self.is_remote = storage.is_url(shard.path)
        self._shard = shard
        self._position = 0
        self._kept_at, self._kept = 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._shard.size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, length: int) -> bytes:
        start = self._position
        offset = start - self._kept_at
        if offset >= 0 and offset + length <= len(self._kept):
            data = self._kept[offset : offset + length]
        else:
            data = read_bytes(self._shard, start, length)
            if self.is_remote:
                self._kept_at, self._kept = start, data
        self._position += len(data)
        return data


@contextmanager
def _open_parquet(shard: Shard, source: _RangeFile) -> Iterator[Any]:
    """Give a pyarrow.parquet.ParquetFile; what it raises becomes DamagedFile."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(
            pyarrow.PythonFile(source, mode="r"),
            metadata=source.index,
            page_checksum_verification=True,
        ) as file:
            if source.is_remote:
                source.index = file.metadata
            yield file
    except (OSError, pyarrow.ArrowException) as error:
        raise DamagedFile(error) from error


def _rows_of_groups(file) -> list[int]:
    return [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]


@contextmanager
def _open_array_record(shard: Shard) -> Iterator[Any]:
    try:
        from array_record.python.array_record_module import ArrayRecordReader as File
    except ImportError as error:
        raise UserError(
            f"{shard.path}: files of this kind need the package array_record, which there is not "
            "for every system; install it, or convert the file to jsonl."
        ) from error
    file = File(storage.local_copy(shard.path), "readahead_buffer_size:0,max_parallelism:0")
    if file.ok():
        try:
            yield file
        finally:
            with suppress(RuntimeError):  # it repeats what reading has raised
                file.close()
        return
    storage.size_of(shard.path)  # raises when it is not there at all
    try:
        file.close()
    except RuntimeError as error:
        raise DamagedFile(error) from error


def _read_array_records(file, first: int, stop: int) -> tuple[list[bytes], str | None]:
    """Return the records up to `stop` or up to the first that is broken, and what broke it."""
    try:
        return file.read(first, stop), None
    except RuntimeError:
        pass
    records: list[bytes] = []
    for number in range(first, stop):
        try:
            records += file.read([number])
        except RuntimeError as error:
            return records, str(error)
    return records, None


def _as_json(record: bytes, text_key: str) -> Record:
    """Return a record as JSON; None for a tf.train.Example without one text under the key."""
    if record[:1] == b"{":
        return record
    try:
        texts = _texts_of_example(record, text_key.encode())
    except (ValueError, IndexError):
        return record  # neither JSON nor an Example, as whoever parses it will find
    if len(texts) != 1:
        return None
    try:
        return orjson.dumps({text_key: texts[0].decode()})
    except UnicodeDecodeError:
        return texts[0]


def _texts_of_example(record: bytes, key: bytes) -> list[bytes]:
    """Return the bytes_list of a feature of a tf.train.Example.

    Field numbers of tensorflow/core/example/{example,feature}.proto: Example.features 1,
    Features.feature 1 (a map: key 1, value 2), Feature.bytes_list 1, BytesList.value 1.
    Raises ValueError or IndexError when the record is no Example.
    """
    texts: list[bytes] = []
    for features in _fields(record, 1):
        for entry in _fields(features, 1):
            if b"".join(_fields(entry, 1)[-1:]) == key:
                feature = b"".join(_fields(entry, 2))
                texts = [text for values in _fields(feature, 1) for text in _fields(values, 1)]
    return texts


def _fields(message: bytes, number: int) -> list[bytes]:
    """Return the length-delimited fields `number` of a protocol buffer message."""
    found = []
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        length = 0
        match tag & 7:
            case 0:
                _, position = _varint(message, position)
            case 1:
                length = 8
            case 2:
                length, position = _varint(message, position)
            case 5:
                length = 4
            case _:
                raise ValueError("no such wire type")
        field = message[position : position + length]
        if len(field) < length:
            raise ValueError("the message breaks off")
        position += length
        if tag == number << 3 | 2:
            found.append(field)
    return found


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """Return the integer at `position`, and the position after it."""
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7

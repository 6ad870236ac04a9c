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
    INPUT_BYTES,
    WHOLE,
    Block,
    DamagedFile,
    Part,
    Record,
    describe_damage,
    input_bytes,
    read_bytes,
    take_stride,
)
from openelm_jax.data.manifest import Shard
from openelm_jax.errors import UserError
from openelm_jax.tokenizer import protobuf_fields

# What pyarrow may hold in a process between blocks: for each stream some pages of a column. A
# stream that comes when there is no room decodes its row group from the beginning for each block.
MOST_KEPT_BYTES = 1 << 30


def rows_of_groups(shard: Shard) -> list[int]:
    """Return the rows of each row group of a .parquet; raises DamagedFile."""
    with _damage_of_parquet():
        return _rows_of_groups(_open_parquet(shard, INPUT_BYTES))


def count_array_records(shard: Shard) -> int:
    """Return the records of an .array_record; raises DamagedFile."""
    with _open_array_record(shard) as file:
        return file.num_records()


class ParquetReader:
    """The text column of a part of a .parquet; a block is a row group, or a piece of a large one.

    A row group that is read on is decoded on, page by page, while `MOST_KEPT_BYTES` leave room; one
    that is read from the middle is decoded up to there once.
    """

    def __init__(self, shard: Shard, text_key: str, block_bytes: int, part: Part) -> None:
        self._shard = shard
        self._text_key = text_key
        self._block_bytes = block_bytes
        self._part = part
        self._start_afresh()

    def read_block(self, position: int, number: int) -> Block:
        try:
            return self._read(position)
        except DamagedFile:
            self._start_afresh()
        try:
            return self._read(position)
        except DamagedFile as error:
            return Block([], [], None, number, describe_damage(self._shard, error))

    def _start_afresh(self) -> None:
        # Kept within a row group; of a remote file the index is kept longer.
        self._column: _Column | None = None
        self._index: Any = None

    def _read(self, position: int) -> Block:
        import pyarrow

        column, self._column = self._column, None
        with _damage_of_parquet():
            if column is None:
                column = _Column(self._shard, self._text_key, self._block_bytes, self._index)
            if storage.is_url(self._shard.path):
                self._index = column.index
            starts = column.starts
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
            end = min(row + column.rows_of_block(group), starts[group + 1])
            block_first = row + (stride.number - row) % stride.of
            records = column.read(group, row, end, stride)
        if end < starts[group + 1] and pyarrow.total_allocated_bytes() <= MOST_KEPT_BYTES:
            self._column = column
        return Block(
            records=records,
            numbers=list(range(block_first, end, stride.of)),
            next_position=end if end < stop else None,
            next_number=end,
        )


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


class _Column:
    """The text column of a .parquet, decoded from row to row within a group.

    Raises UserError when there is no such column. Rows are numbered from the file's first.
    """

    def __init__(self, shard: Shard, text_key: str, block_bytes: int, index: Any) -> None:
        self._text_key = text_key
        self._block_bytes = block_bytes
        self._file = _open_parquet(shard, input_bytes(shard, block_bytes), index)
        self._number = _find_column(self._file, shard, text_key)
        self.index = self._file.metadata
        self.starts = [0, *itertools.accumulate(_rows_of_groups(self._file))]
        self._group: int | None = None
        self._row = 0
        self._rest: Any = None

    def rows_of_block(self, group: int) -> int:
        """Return in how many rows of a group there is about a block of text."""
        num_rows = self.starts[group + 1] - self.starts[group]
        num_bytes = self.index.row_group(group).column(self._number).total_uncompressed_size
        return max(1, num_rows * self._block_bytes // num_bytes)

    def read(self, group: int, first: int, stop: int, stride: Part) -> list[Record]:
        """Return those of the rows of a group whose numbers are in the stride."""
        if group != self._group or first < self._row:
            self._group, self._row, self._rest = group, self.starts[group], None
            self._batches = self._file.iter_batches(
                self.rows_of_block(group),
                row_groups=[group],
                columns=[self._text_key],
                use_threads=False,
            )
        while self._row < first:
            self._take(first)
        records: list[Record] = []
        while self._row < stop:
            skipped = (stride.number - self._row) % stride.of
            records += _as_bytes(self._take(stop))[skipped :: stride.of].to_pylist()
        return records

    def _take(self, stop: int) -> Any:
        """Return the next rows, up to `stop` at most."""
        rest = self._rest
        if rest is None:
            batch = next(self._batches, None)
            if batch is None:
                raise DamagedFile("a row group has fewer rows than its index says")
            rest = batch.column(0)
        taken, rest = rest[: stop - self._row], rest[stop - self._row :]
        self._row += len(taken)
        self._rest = rest if len(rest) else None  # an empty slice would hold the whole batch
        return taken


class _RangeFile:
    """A file that is open only while it is read."""

    closed = False

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._position = 0

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
        data = read_bytes(self._shard, self._position, length)
        self._position += len(data)
        return data


@contextmanager
def _damage_of_parquet() -> Iterator[None]:
    """Make DamagedFile of what pyarrow raises."""
    import pyarrow

    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        raise DamagedFile(error) from error


def _open_parquet(shard: Shard, num_bytes: int, index: Any = None) -> Any:
    """Return a pyarrow.parquet.ParquetFile that reads `num_bytes` of a column at once."""
    import pyarrow
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(
        pyarrow.PythonFile(_RangeFile(shard), mode="r"),
        metadata=index,
        buffer_size=num_bytes,
        pre_buffer=False,
        page_checksum_verification=True,
    )


def _find_column(file, shard: Shard, text_key: str) -> int:
    """Return which of the file's columns holds the text; raises UserError when none does."""
    import pyarrow

    schema = file.schema_arrow
    if text_key not in schema.names:
        raise UserError(
            f"{shard.path}: there is no column {text_key!r} but {', '.join(schema.names)}; set the "
            "source's text_key (data.sources) to the column with the text."
        )
    kind = schema.field(text_key).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    # Where every text is missing, or there is no row, a column may have no type: null.
    tests = ("string", "large_string", "string_view", "binary", "large_binary", "null")
    if not any(getattr(pyarrow.types, f"is_{test}")(kind) for test in tests):
        raise UserError(
            f"{shard.path}: the column {text_key!r} holds {kind}, not text; set the source's "
            "text_key (data.sources) to the column with the text."
        )
    paths = [file.schema.column(index).path for index in range(len(file.schema.names))]
    return paths.index(text_key)


def _as_bytes(column: Any) -> Any:
    """Return texts as bytes, since bad UTF-8 is a bad record and not a bad file."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.cast(pyarrow.large_binary())


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
    raise DamagedFile("array_record does not say why")


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
    except ValueError:
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
    Raises ValueError when the record is no Example.
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
    return [
        value
        for field, value in protobuf_fields(message)
        if field == number and isinstance(value, bytes)
    ]

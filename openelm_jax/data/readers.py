"""Shards to records, a block at a time, from any block on.

A block is what is held in memory: some megabytes of lines, one row group, or the demo corpus.
Positions are byte offsets (of the uncompressed text for .gz) or row group numbers. A record is one
line of JSON, or the UTF-8 text itself; None is a missing text. No file stays open between blocks.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from openelm_jax.data import demo
from openelm_jax.data.manifest import Shard
from openelm_jax.errors import UserError

Record = bytes | None


@dataclass(frozen=True)
class Block:
    """Records that follow one another in a shard, and the position after them."""

    records: list[Record]
    next_position: int | None
    """None at the end of the shard."""


class Reader(Protocol):
    """What reads one shard."""

    def read_block(self, position: int) -> Block: ...


def open_reader(shard: Shard, text_key: str, block_bytes: int) -> Reader:
    """Return the reader of `shard`; raises UserError when the file is not what was listed."""
    if shard.format == "demo":
        return _DemoReader(shard)
    try:
        size = os.path.getsize(shard.path)
    except OSError as error:
        raise UserError(f"{shard.path}: the file is gone since it was listed; put it back.") from (
            error
        )
    if size != shard.size:
        raise UserError(
            f"{shard.path}: the file had {shard.size} bytes when it was listed and has {size} now; "
            "leave the data alone while a run reads it, and start again."
        )
    if shard.format == "parquet":
        return _ParquetReader(shard, text_key)
    return _LineReader(shard, block_bytes)


def read_blocks(shard: Shard, text_key: str, block_bytes: int) -> Iterator[Block]:
    """Yield the blocks of a shard from its beginning."""
    reader = open_reader(shard, text_key, block_bytes)
    position: int | None = 0
    while position is not None:
        block = reader.read_block(position)
        yield block
        position = block.next_position


def locate(shard: Shard, number: int) -> str:
    """Return where record `number` (from 0) is, as people name it: FILE:LINE, or FILE, row N.

    Reads the file up to there: for messages only.
    """
    if shard.format in ("parquet", "demo"):
        return f"{shard.path}, row {number}"
    lines = _open_lines(shard)
    for line_number, line in enumerate(lines, start=1):
        if line.strip():
            if number == 0:
                return f"{shard.path}:{line_number}"
            number -= 1
    raise AssertionError(f"{shard.path} has no such record")


class _LineReader:
    """Lines of .jsonl and .jsonl.gz; blank ones are no records."""

    def __init__(self, shard: Shard, block_bytes: int) -> None:
        self._shard = shard
        self._block_bytes = block_bytes
        self._lines = _open_lines(shard)

    def read_block(self, position: int) -> Block:
        try:
            self._lines.seek(position)  # forward in .gz decompresses, backward starts again
            data = self._lines.read(self._block_bytes)
            at_end = len(data) < self._block_bytes
            if not at_end and not data.endswith(b"\n"):
                data += self._lines.readline()
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(self._shard, error) from error
        records: list[Record] = [line for line in data.split(b"\n") if line.strip()]
        return Block(records, None if at_end else position + len(data))


class _ParquetReader:
    """The text column of .parquet; a block is a row group."""

    def __init__(self, shard: Shard, text_key: str) -> None:
        self._shard = shard
        self._text_key = text_key

    def read_block(self, position: int) -> Block:
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(self._shard.path) as file:
                self._check_column(file.schema_arrow)
                if file.num_row_groups == 0:
                    return Block([], None)
                column = file.read_row_group(position, [self._text_key], use_threads=False)[0]
                following = position + 1 if position + 1 < file.num_row_groups else None
        except (OSError, pyarrow.ArrowException) as error:
            raise _unreadable(self._shard, error) from error
        if pyarrow.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        # Bytes, not strings: bad UTF-8 is a bad record, not a bad file.
        return Block(column.cast(pyarrow.large_binary()).to_pylist(), following)

    def _check_column(self, schema) -> None:
        import pyarrow

        if self._text_key not in schema.names:
            raise UserError(
                f"{self._shard.path}: there is no column {self._text_key!r} but "
                f"{', '.join(schema.names)}; set the source's text_key (data.sources) to the "
                "column with the text."
            )
        kind = schema.field(self._text_key).type
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        tests = ("string", "large_string", "string_view", "binary", "large_binary")
        if not any(getattr(pyarrow.types, f"is_{test}")(kind) for test in tests):
            raise UserError(
                f"{self._shard.path}: the column {self._text_key!r} holds {kind}, not text; "
                "set the source's text_key (data.sources) to the column with the text."
            )


class _DemoReader:
    """All documents of a part of the demo corpus in one block."""

    def __init__(self, shard: Shard) -> None:
        part: demo.Part = "holdout" if shard.name.endswith("holdout") else "train"
        self._records = demo.read(Path(shard.path), part)

    def read_block(self, position: int) -> Block:
        assert position == 0
        return Block(list(self._records), None)


class _ClosedBetweenReads(io.RawIOBase):
    """A file that is open only while it is read, so that thousands of streams need no handles."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET
        self._position = offset
        return offset

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer) -> int:
        with open(self._path, "rb", buffering=0) as file:
            file.seek(self._position)
            count = file.readinto(buffer)
        assert count is not None
        self._position += count
        return count


def _open_lines(shard: Shard) -> BinaryIO:
    file = io.BufferedReader(_ClosedBetweenReads(shard.path), buffer_size=1 << 18)
    return gzip.GzipFile(fileobj=file) if shard.format == "jsonl.gz" else file  # type: ignore[return-value]


def _unreadable(shard: Shard, error: Exception) -> UserError:
    return UserError(
        f"{shard.path}: the file cannot be read as {shard.format} ({error}); replace it, or take "
        "it out of the source's files."
    )

"""The lines of .jsonl, .jsonl.gz and .jsonl.zst, from any line on.

Positions are byte offsets of the uncompressed text. Only `read_bytes` touches files, so nothing
is open between blocks. A compressed text that is read on keeps its decompressor; one that is read
from the middle is decompressed up to there once.
"""

from __future__ import annotations

import codecs
import sys
import zlib
from collections.abc import Iterator
from typing import Protocol

import zstandard

from openelm_jax.data.blocks import (
    WHOLE,
    Block,
    Part,
    Record,
    describe_damage,
    input_bytes,
    read_bytes,
    take_stride,
)
from openelm_jax.data.manifest import Shard

# The parts of a plain text are ranges of bytes when these are at least so long.
RANGE_BYTES = 1 << 20
# Read at once to find the end of a line.
LINE_BYTES = 1 << 16
# Compressed bytes that are decompressed at once: what comes out of them has no bound but the
# format's, so they are few.
PIECE_BYTES = 1 << 12
SKIP_BYTES = 1 << 20


def splits_into_ranges(shard: Shard, of: int) -> bool:
    """Whether the parts of a text are ranges of bytes, and not every `of`-th record."""
    return shard.format == "jsonl" and shard.size // of >= RANGE_BYTES


def first_byte(shard: Shard, part: Part) -> int:
    """Return from which byte on the records of a part, and no others, are counted."""
    return _range_of(shard, part)[0] if splits_into_ranges(shard, part.of) else 0


class LineReader:
    """Lines of one part of a text; blank ones are no records, and a byte order mark is no text."""

    def __init__(self, shard: Shard, block_bytes: int, part: Part) -> None:
        self._shard = shard
        self._block_bytes = block_bytes
        self._begin, self._stop, self._stride = 0, sys.maxsize, part
        if shard.format == "jsonl":
            self._stop = shard.size
        if splits_into_ranges(shard, part.of):
            self._begin, self._stop = _range_of(shard, part)
            self._stride = WHOLE
        self._start_afresh()

    def read_block(self, position: int, number: int) -> Block:
        lines, next_position = self._read_lines(position)
        if self._text.damage is not None:
            self._start_afresh()
            lines, next_position = self._read_lines(position)
        damage = self._text.damage
        if damage is not None:
            lines, damage = lines[: lines.rfind(b"\n") + 1], describe_damage(self._shard, damage)
        if position == self._begin == 0:
            lines = lines.removeprefix(codecs.BOM_UTF8)
        records: list[Record] = [line for line in lines.split(b"\n") if line.strip()]
        return take_stride(records, number, self._stride, next_position, damage)

    def _start_afresh(self) -> None:
        self._text = _open_text(self._shard, self._block_bytes)
        # The beginning of a line that was read behind the last block, and its position.
        self._ahead, self._ahead_at = b"", 0

    def _read_lines(self, position: int) -> tuple[bytes, int | None]:
        """Return about a block of whole lines, and the position after them or None at the end.

        Their number depends on nothing but the position: as many lines as fit into a block, or
        into the smallest doubling of a block that holds one.
        """
        if position == 0 and self._begin > 0:
            position = self._find_first_line()
            if position == self._stop:
                return b"", None
        data = self._ahead if position == self._ahead_at else b""
        wanted = min(self._block_bytes, self._stop - position + LINE_BYTES)
        while True:
            if len(data) < wanted:
                data += self._text.read(position + len(data), wanted - len(data))
            at_end = len(data) < wanted
            reaches_stop = position + len(data) >= self._stop
            if reaches_stop:  # the line that holds the byte before the stop is the last one
                newline = data.find(b"\n", self._stop - 1 - position)
            else:
                newline = data.rfind(b"\n")
            if at_end or newline >= 0:
                break
            wanted *= 2
        if reaches_stop and newline >= 0:
            return data[: newline + 1], None
        if at_end:
            return data, None
        self._ahead, self._ahead_at = data[newline + 1 :], position + newline + 1
        return data[: newline + 1], self._ahead_at

    def _find_first_line(self) -> int:
        """Return where the first line begins that begins in the range, or the stop."""
        position = self._begin - 1
        while position < self._stop - 1:
            data = self._text.read(position, min(LINE_BYTES, self._stop - 1 - position))
            newline = data.find(b"\n")
            if newline >= 0:
                return position + newline + 1
            if not data:
                break
            position += len(data)
        return self._stop


def line_of_record(shard: Shard, number: int, part: Part) -> int:
    """Return in which line, from 1, of its file record `number` of a part is; reads up to there."""
    begin = first_byte(shard, part)
    for line_number, (position, line) in enumerate(
        _each_line(_open_text(shard, SKIP_BYTES)), start=1
    ):
        mark = codecs.BOM_UTF8 if position == 0 else b""
        if position >= begin and line.removeprefix(mark).strip():
            if number == 0:
                return line_number
            number -= 1
    raise AssertionError(f"{shard.path} has no such record")


class _Text(Protocol):
    """The uncompressed text of a file."""

    damage: str | None
    """Why the text ends where it does, if it should not."""

    def read(self, position: int, length: int) -> bytes:
        """Return bytes of the text; fewer only at its end."""
        ...


class _PlainText:
    damage: str | None = None

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def read(self, position: int, length: int) -> bytes:
        return read_bytes(self._shard, position, length)


class _CompressedText:
    def __init__(self, shard: Shard, num_bytes: int) -> None:
        """`num_bytes` of the file are read at once."""
        self.damage: str | None = None
        self._shard = shard
        self._num_bytes = num_bytes
        self._begin()

    def read(self, position: int, length: int) -> bytes:
        if position < self._position:
            self._begin()
        while self._position < position:
            if not self._take(min(SKIP_BYTES, position - self._position)):
                return b""
        return self._take(length)

    def _begin(self) -> None:
        self._chunks = _decompress(self._shard, self._num_bytes)
        self._rest = b""
        self._position = 0

    def _take(self, length: int) -> bytes:
        chunks, count = [self._rest], len(self._rest)
        while count < length:
            try:
                chunk = next(self._chunks, None)
            except (EOFError, zlib.error, zstandard.ZstdError) as error:
                self.damage = str(error)
                break
            if chunk is None:
                break
            chunks.append(chunk)
            count += len(chunk)
        data = b"".join(chunks)
        data, self._rest = data[:length], data[length:]
        self._position += len(data)
        return data


def _open_text(shard: Shard, block_bytes: int) -> _Text:
    if shard.format == "jsonl":
        return _PlainText(shard)
    return _CompressedText(shard, input_bytes(shard, block_bytes))


def _range_of(shard: Shard, part: Part) -> tuple[int, int]:
    return (
        shard.size * part.number // part.of,
        shard.size * (part.number + 1) // part.of,
    )


def _each_line(text: _Text) -> Iterator[tuple[int, bytes]]:
    """Yield the position of each line, and the line without its end."""
    position, rest = 0, b""
    while data := text.read(position + len(rest), SKIP_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield position, line
            position += len(line) + 1
    yield position, rest


def _decompress(shard: Shard, num_bytes: int) -> Iterator[bytes]:
    """Yield the text of all members of a .gz or frames of a .zst, in the same chunks each time.

    Raises zlib.error or ZstdError where the data is corrupt, and EOFError where it breaks off:
    at the end zlib and zstandard are content with half a stream.
    """
    is_gzip = shard.format == "jsonl.gz"
    is_first = True
    # A .zst of `zstd --long=31` needs the window; the default refuses above 2**27 bytes.
    frames = None if is_gzip else zstandard.ZstdDecompressor(max_window_size=2**31)
    stream = None
    for piece in _pieces(shard, num_bytes):
        data = piece
        while data:
            if stream is None:
                if is_gzip and not is_first:
                    data = data.lstrip(b"\0")  # what tapes and tar leave behind a member
                    if not data:
                        break
                stream = zlib.decompressobj(wbits=31) if frames is None else frames.decompressobj()
                is_first = False
            if chunk := stream.decompress(data):
                yield chunk
            data = b""
            if stream.eof:
                data, stream = stream.unused_data, None
    if stream is not None:
        raise EOFError("it breaks off before its end")


def _pieces(shard: Shard, num_bytes: int) -> Iterator[bytes]:
    for start in range(0, shard.size, num_bytes):
        data = read_bytes(shard, start, num_bytes)
        for at in range(0, len(data), PIECE_BYTES):
            yield data[at : at + PIECE_BYTES]

"""What every reader of shards gives: records, a block at a time.

A block is what is held in memory: about `block_bytes` of text, of whole lines or rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from openelm_jax.data import storage
from openelm_jax.data.manifest import Shard
from openelm_jax.errors import UserError

# Bytes of a file that are asked for at once, and held, while it is read on. A remote store takes
# long to answer, so that more of it is asked for, but no more than a block: thousands of shards
# may be open.
INPUT_BYTES, MOST_INPUT_BYTES = 1 << 18, 4 << 20

Record = bytes | None
"""A line of JSON, or the UTF-8 text itself; None is a missing text."""


@dataclass(frozen=True)
class Part:
    """Part `number`, from 0, of `of` parts that together hold each record of a shard once."""

    number: int
    of: int


WHOLE = Part(0, 1)


@dataclass(frozen=True)
class Block:
    """Records of a part that follow one another, and where the next block is."""

    records: list[Record]
    numbers: list[int]
    """What `locate` finds each record by."""
    next_position: int | None
    """None at the end of the part, and where damage ends it."""
    next_number: int
    damage: str | None = None
    """The sentence about a file that cannot be read further than these records."""


class Reader(Protocol):
    """What reads one part of a shard.

    The first block is at position 0 with number 0, each other one where the block before it says;
    the same two integers give the same block in any reader of the part.
    """

    def read_block(self, position: int, number: int) -> Block: ...


class DamagedFile(Exception):
    """The reason why a file, or what follows in it, cannot be read as its format."""


def take_stride(
    records: Sequence[Record],
    number: int,
    part: Part,
    next_position: int | None,
    damage: str | None = None,
) -> Block:
    """Return the block of every `part.of`-th record, of records counted from `number`."""
    first = (part.number - number) % part.of
    return Block(
        records=list(records[first :: part.of]),
        numbers=list(range(number + first, number + len(records), part.of)),
        next_position=next_position,
        next_number=number + len(records),
        damage=damage,
    )


def input_bytes(shard: Shard, block_bytes: int) -> int:
    """Return how many bytes to ask for at once of a shard that is read in blocks of so many."""
    if not storage.is_url(shard.path):
        return INPUT_BYTES
    return max(INPUT_BYTES, min(block_bytes, MOST_INPUT_BYTES) // INPUT_BYTES * INPUT_BYTES)


def read_bytes(shard: Shard, start: int, length: int) -> bytes:
    """Return `length` bytes of a shard from `start` on, fewer only at its end.

    Raises UserError when that is not where it was when the shard was listed, besides what
    `storage.read` raises.
    """
    length = max(0, min(length, shard.size - start))
    data = storage.read(shard.path, start, length)
    if len(data) < length:
        require_size(shard, start + len(data))
    return data


def require_size(shard: Shard, size: int) -> None:
    """Raise UserError when `size` is not what the shard had when it was listed."""
    if size != shard.size:
        raise UserError(
            f"{shard.path}: the file had {shard.size} bytes when it was listed and has {size} now; "
            "leave the data alone while a run reads it, and start again."
        )


def describe_damage(shard: Shard, reason: object) -> str:
    """Return the sentence about a file that cannot be read as its format."""
    return (
        f"{shard.path}: the file cannot be read as {shard.format} ({reason}); replace it, or take "
        "it out of the source's files, or set data.on_damaged_shard skip_rest to train on what "
        "comes before."
    )

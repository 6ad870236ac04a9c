"""The state of one source in one lane: a row of integers, a place and counters."""

from __future__ import annotations

from enum import IntEnum


class Column(IntEnum):
    """What each integer is; those from RECORDS on count what was read before the place."""

    EPOCH = 0
    SHARD = 1  # place in this epoch's order of the lane's shards
    BLOCK = 2  # position of the block in the shard
    RECORD = 3  # number of the block's first record
    INDEX = 4  # place in the shuffled block
    SKIP = 5  # tokens of the document before the next row; rows of it with packing=corenet
    RECORDS = 6
    BYTES = 7
    CHARS = 8
    CUT_CHARS = 9
    CHAR_FILTER_DOCUMENTS = 10
    CHAR_FILTER_CHARS = 11
    TOKEN_FILTER_DOCUMENTS = 12
    TOKEN_FILTER_TOKENS = 13
    KEPT_DOCUMENTS = 14
    KEPT_TOKENS = 15
    TRUNCATED_TOKENS = 16
    PADDED_TOKENS = 17
    BAD_JSON = 18
    BAD_UTF8 = 19
    BAD_KEY = 20
    REPAIRED = 21
    SHARDS = 22  # read to their end
    DAMAGED_SHARDS = 23
    ROWS = 24


COUNTERS = tuple(column for column in Column if column >= Column.RECORDS)
BAD = (Column.BAD_JSON, Column.BAD_UTF8, Column.BAD_KEY)

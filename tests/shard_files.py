"""Shards in every format, written and read a part at a time, for the tests of the readers."""

from __future__ import annotations

import gzip
import json

import pyarrow
import pyarrow.parquet
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter

from openelm_jax.data.manifest import Shard
from openelm_jax.data.readers import WHOLE, open_reader

FORMATS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "array_record")


def json_lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def write(path, texts, kind):
    """Write a shard: .gz in two members, .zst in two frames, .parquet in row groups of five."""
    half = len(texts) // 2
    match kind:
        case "jsonl":
            path.write_bytes(json_lines(texts))
        case "jsonl.gz":
            path.write_bytes(
                gzip.compress(json_lines(texts[:half])) + gzip.compress(json_lines(texts[half:]))
            )
        case "jsonl.zst":
            path.write_bytes(
                zstandard.compress(json_lines(texts[:half]))
                + zstandard.compress(json_lines(texts[half:]))
            )
        case "parquet":
            table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
            pyarrow.parquet.write_table(table, path, row_group_size=5)
        case "array_record":
            write_array_record(path, [json.dumps({"text": text}).encode() for text in texts])


def write_array_record(path, records, options="group_size:1"):
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()


def shard_of(path, kind=None):
    kind = kind or path.name.split(".", 1)[1]
    return Shard(name=path.name, path=str(path), size=path.stat().st_size, format=kind)


def make_shard(folder, kind, texts):
    write(folder / f"a.{kind}", texts, kind)
    return shard_of(folder / f"a.{kind}")


def blocks_of(shard, block_bytes, part=WHOLE):
    """Return ((position, number), block) for all blocks of a part."""
    reader = open_reader(shard, "text", block_bytes, part)
    found, position, number = [], 0, 0
    while position is not None:
        found.append(((position, number), reader.read_block(position, number)))
        position, number = found[-1][1].next_position, found[-1][1].next_number
    return found


def text_of(shard, record):
    return record.decode() if shard.format in ("parquet", "txt") else json.loads(record)["text"]


def texts_of(shard, block_bytes, part=WHOLE):
    return [
        text_of(shard, record)
        for _, block in blocks_of(shard, block_bytes, part)
        for record in block.records
    ]

"""The corpora of the paper's mixture are read as they come, in the files that CoreNet names."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pyarrow.parquet
import pytest
import zstandard

from openelm_jax.config import DataConfig, SourceConfig
from openelm_jax.data.manifest import list_manifest
from openelm_jax.data.readers import Part, open_reader
from openelm_jax.data.text import parse_record

FORMATS = Path(__file__).parent / "data" / "formats"
# Pattern: the field with the text, the format, and how many files match.
LAYOUTS = {
    "refinedweb/refinedweb-*-of-05534.parquet": ("content", "parquet", 2),
    "pile/pile-*-of-01650.parquet": ("text", "parquet", 1),
    "pile/*.jsonl.zst": ("text", "jsonl.zst", 1),
    "redpajama/arxiv/arxiv-*-00099.jsonl": ("text", "jsonl", 1),
    "redpajama/book/book-*-00001.jsonl": ("text", "jsonl", 1),
    "redpajama/c4/c4-*-01024.jsonl": ("text", "jsonl", 1),
    "redpajama/common_crawl/**/*.jsonl.zst": ("text", "jsonl.zst", 1),
    "redpajama/github/github-*-00098.jsonl": ("text", "jsonl", 1),
    "redpajama/stackexchange/stackexchange-*-00001.jsonl": ("text", "jsonl", 1),
    "redpajama/wikipedia/wiki-*-00001.jsonl": ("text", "jsonl", 1),
    "dolma-v1_6/books/books-*.json.gz": ("text", "jsonl.gz", 1),
    "dolma-v1_6/pes2o/pes2o_v2-*.json.gz": ("text", "jsonl.gz", 1),
    "dolma-v1_6/reddit/reddit-v5-dedupe-pii-nsfw-toxic-*.json.gz": ("text", "jsonl.gz", 1),
    "dolma-v1_6/stack/stack-v4-train-*.json.gz": ("text", "jsonl.gz", 1),
    "dolma-v1_6/wiki/en_simple_wiki_v0-*.json.gz": ("text", "jsonl.gz", 1),
    "dolma-real/documents/*.json.gz": ("text", "jsonl.gz", 2),
}


def texts_in(path: str, key: str) -> list[str]:
    """Return the texts of a file, read without this project."""
    file = Path(path)
    if file.suffix == ".parquet":
        return pyarrow.parquet.read_table(file)[key].to_pylist()
    data = file.read_bytes()
    if file.suffix == ".gz":
        data = gzip.decompress(data)
    if file.suffix == ".zst":
        with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as stream:
            data = stream.read()
    return [json.loads(line)[key] for line in data.decode().split("\n") if line]


def read_texts(shard, key: str, part: Part) -> list[str | None]:
    reader = open_reader(shard, key, 1 << 20, part)
    texts, position, number = [], 0, 0
    while position is not None:
        block = reader.read_block(position, number)
        assert block.damage is None
        for record in block.records:
            text, flaw = parse_record(record, shard, key)
            assert flaw is None
            texts.append(text)
        position, number = block.next_position, block.next_number
    return texts


@pytest.mark.parametrize("pattern", LAYOUTS)
def test_every_document_of_a_native_layout_is_read(pattern):
    key, kind, num_files = LAYOUTS[pattern]
    source = SourceConfig(name="source", files=(pattern,), text_key=key)
    (listed,) = list_manifest(DataConfig(root=str(FORMATS), sources=(source,))).sources
    assert len(listed.shards) == num_files
    for shard in listed.shards:
        expected = texts_in(shard.path, key)
        assert shard.format == kind
        assert len(expected) >= 2
        assert read_texts(shard, key, Part(0, 1)) == expected
        thirds = [read_texts(shard, key, Part(number, 3)) for number in range(3)]
        assert sorted(itertools.chain(*thirds)) == sorted(expected)


def test_every_file_of_the_collection_is_matched_by_one_pattern():
    files = {path for path in FORMATS.rglob("*") if path.is_file() and path.suffix != ".md"}
    matched = [path for pattern in LAYOUTS for path in FORMATS.glob(pattern)]
    assert sorted(matched) == sorted(files)

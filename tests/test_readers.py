"""Every format gives its records once, in order, and from any block on."""

import gzip
import io
import json

import pytest
from corpora import documents, write

from openelm_jax.data.manifest import Shard
from openelm_jax.data.readers import locate, open_reader, read_blocks
from openelm_jax.data.text import parse_record
from openelm_jax.errors import UserError

ENDINGS = ("jsonl", "jsonl.gz", "parquet")


def shard_of(path, kind=None):
    kind = kind or path.name.split(".", 1)[1]
    return Shard(name=path.name, path=str(path), size=path.stat().st_size, format=kind)


def texts_of(shard, blocks):
    return [parse_record(record, shard, "text")[0] for block in blocks for record in block.records]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("block_bytes", [1, 700, 1 << 20])
def test_every_record_is_read_once_in_order(tmp_path, ending, block_bytes):
    texts = documents(23)
    write(tmp_path / f"a.{ending}", texts)
    shard = shard_of(tmp_path / f"a.{ending}")
    assert texts_of(shard, read_blocks(shard, "text", block_bytes)) == texts


@pytest.mark.parametrize("ending", ENDINGS)
def test_reading_can_begin_at_any_block_in_any_order(tmp_path, ending):
    write(tmp_path / f"a.{ending}", documents(23))
    shard = shard_of(tmp_path / f"a.{ending}")
    blocks, positions, position = [], [], 0
    reader = open_reader(shard, "text", 700)
    while position is not None:
        positions.append(position)
        blocks.append(reader.read_block(position))
        position = blocks[-1].next_position
    assert len(blocks) > 3
    for position, block in reversed(list(zip(positions, blocks, strict=True))):
        assert reader.read_block(position) == block
        assert open_reader(shard, "text", 700).read_block(position) == block


def test_blank_lines_carriage_returns_and_a_missing_last_newline_make_no_records(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"text": "one"}\r\n  \n\n{"text": "two"}\n{"text": "three"}')
    shard = shard_of(path)
    for block_bytes in (1, 5, 1000):
        assert texts_of(shard, read_blocks(shard, "text", block_bytes)) == ["one", "two", "three"]
    assert [locate(shard, n) for n in range(3)] == [f"{path}:{line}" for line in (2, 5, 6)]


def test_a_gz_of_several_members_is_read_to_the_end(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    parts = [gzip.compress((json.dumps({"text": text}) + "\n").encode()) for text in "abc"]
    path.write_bytes(b"".join(parts))
    shard = shard_of(path)
    assert texts_of(shard, read_blocks(shard, "text", 5)) == ["a", "b", "c"]


def test_no_file_stays_open_between_blocks(tmp_path, monkeypatch):
    opened = []
    real_open = open
    for ending in ("jsonl", "jsonl.gz"):
        write(tmp_path / f"a.{ending}", documents(23))
        reader = open_reader(shard_of(tmp_path / f"a.{ending}"), "text", 700)

        def spy(*arguments, **options):
            opened.append(real_open(*arguments, **options))
            return opened[-1]

        monkeypatch.setattr("builtins.open", spy)
        reader.read_block(0)
        monkeypatch.undo()
    assert len(opened) >= 2
    assert all(isinstance(file, io.FileIO) and file.closed for file in opened)


def test_parquet_strings_may_be_dictionary_encoded_or_missing(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    column = pyarrow.array(["x", None, "y", "x"]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
    shard = shard_of(path)
    assert [r for b in read_blocks(shard, "text", 1) for r in b.records] == [b"x", None, b"y", b"x"]


def test_a_file_that_changed_or_went_since_it_was_listed_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, documents(2))
    shard = shard_of(path)
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(UserError, match="bytes when it was listed"):
        open_reader(shard, "text", 100)
    path.unlink()
    with pytest.raises(UserError, match="is gone since"):
        open_reader(shard, "text", 100)


def test_a_broken_container_is_refused_by_name(tmp_path):
    for ending in ("jsonl.gz", "parquet"):
        path = tmp_path / f"a.{ending}"
        write(path, documents(50))
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(UserError, match=rf"a\.{ending}: the file cannot be read as {ending}"):
            list(read_blocks(shard_of(path), "text", 1 << 20))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (b'{"text": "a"}', ("a", None)),
        (b'{"text": "a", "n": 123456789012345678901234567890}', ("a", None)),
        (b'{"text": "a', (None, "bad_json")),
        (b"[" * 100_000, (None, "bad_json")),
        (b'{"text": "\xff"}', (None, "bad_utf8")),
        (b'{"body": "a"}', (None, "bad_key")),
        (b'{"text": 3}', (None, "bad_key")),
        (b'["text"]', (None, "bad_key")),
        (b'{"text": "\\ud83d\\ude00"}', ("\U0001f600", None)),
        (b'{"text": "a\\ud83d!"}', ("a\ufffd!", "repaired")),
    ],
)
def test_each_flaw_of_a_line_has_its_name(record, expected):
    shard = Shard(name="a", path="a", size=1, format="jsonl")
    assert parse_record(record, shard, "text") == expected


def test_each_flaw_of_a_column_has_its_name():
    shard = Shard(name="a", path="a", size=1, format="parquet")
    assert parse_record(None, shard, "text") == (None, "bad_key")
    assert parse_record(b"\xff", shard, "text") == (None, "bad_utf8")
    assert parse_record("é".encode(), shard, "text") == ("é", None)

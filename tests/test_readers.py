"""Every format gives its records once, in order, from any block on."""

from __future__ import annotations

import codecs
import gzip
import http.server
import os
import re
import struct
import threading
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from corpora import documents
from shard_files import (
    FORMATS,
    blocks_of,
    json_lines,
    make_shard,
    shard_of,
    text_of,
    texts_of,
    write,
)

from openelm_jax.data import line_files, record_files
from openelm_jax.data.manifest import Shard
from openelm_jax.data.readers import (
    WHOLE,
    Part,
    count_records,
    locate,
    open_reader,
    read_blocks,
)
from openelm_jax.data.text import parse_record
from openelm_jax.errors import UserError

COMPRESSED = ("jsonl.gz", "jsonl.zst")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("block_bytes", [1, 700, 1 << 20])
def test_every_record_is_read_once_in_order(tmp_path, kind, block_bytes):
    texts = documents(23)
    shard = make_shard(tmp_path, kind, texts)
    assert texts_of(shard, block_bytes) == texts


@pytest.mark.parametrize("kind", FORMATS)
def test_read_blocks_gives_the_whole_shard_with_the_records_numbered(tmp_path, kind):
    texts = documents(23)
    shard = make_shard(tmp_path, kind, texts)
    blocks = list(read_blocks(shard, "text", 700))
    assert [text_of(shard, record) for block in blocks for record in block.records] == texts
    assert [number for block in blocks for number in block.numbers] == list(range(23))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("part", [WHOLE, Part(1, 2), Part(4, 7)])
def test_reading_can_begin_at_any_block_in_any_order(tmp_path, monkeypatch, kind, part):
    monkeypatch.setattr(line_files, "RANGE_BYTES", 1000)
    shard = make_shard(tmp_path, kind, documents(40))
    found = blocks_of(shard, 300, part)
    assert len(found) > 2
    reader = open_reader(shard, "text", 300, part)
    for where, block in reversed(found):
        assert reader.read_block(*where) == block
        assert open_reader(shard, "text", 300, part).read_block(*where) == block


@pytest.mark.parametrize("kind", FORMATS)
def test_a_block_holds_about_as_many_bytes_as_asked_for(tmp_path, kind):
    shard = make_shard(tmp_path, kind, documents(40, words=(50, 60)))  # 300 bytes or so each
    sizes = [sum(map(len, block.records)) for _, block in blocks_of(shard, 1000)]
    assert max(sizes) < 2500
    assert len(sizes) > 5


def test_blank_lines_carriage_returns_and_a_missing_last_newline_make_no_records(tmp_path):
    data = b'\n{"text": "one"}\r\n  \n\n{"text": "two"}\n{"text": "three"}'
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(data))
    for path in tmp_path.iterdir():
        shard = shard_of(path)
        for block_bytes in (1, 5, 1000):
            assert texts_of(shard, block_bytes) == ["one", "two", "three"]
        assert [locate(shard, n) for n in range(3)] == [f"{path}:{line}" for line in (2, 5, 6)]


@pytest.mark.parametrize("kind", ["jsonl", *COMPRESSED])
@pytest.mark.parametrize("range_bytes", [1000, 1 << 20])
@pytest.mark.parametrize("part", [WHOLE, Part(0, 3), Part(1, 3), Part(2, 3)])
def test_a_byte_order_mark_is_no_text_and_moves_nothing(
    tmp_path, monkeypatch, kind, range_bytes, part
):
    monkeypatch.setattr(line_files, "RANGE_BYTES", range_bytes)
    lines = json_lines(documents(23))
    pack = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.compress}[kind]
    found = []
    for start in (codecs.BOM_UTF8, b"   "):  # as many bytes that are no text either
        path = tmp_path / f"{len(found)}.{kind}"
        path.write_bytes(pack(start + lines))
        shard = shard_of(path)
        blocks = blocks_of(shard, 700, part)
        places = [locate(shard, n, part).split(":")[-1] for _, b in blocks for n in b.numbers]
        found.append(([where for where, _ in blocks], places, texts_of(shard, 700, part)))
        for where, block in reversed(blocks):
            assert open_reader(shard, "text", 700, part).read_block(*where) == block
    assert found[0] == found[1]
    assert len(found[0][0]) > 2


def test_only_one_mark_is_passed_over_and_only_where_a_file_begins(tmp_path):
    mark = codecs.BOM_UTF8
    path = tmp_path / "a.jsonl"
    path.write_bytes(mark + b'\n"one"\n' + mark + b'"two"\n')
    shard = shard_of(path)
    [(_, block)] = blocks_of(shard, 1000)
    assert block.records == [b'"one"', mark + b'"two"']  # a mark and nothing is a blank line
    assert [locate(shard, number) for number in block.numbers] == [f"{path}:2", f"{path}:3"]
    path = tmp_path / "a.txt"
    path.write_bytes(mark + mark + b"one" + mark)
    assert texts_of(shard_of(path), 1) == ["\ufeffone\ufeff"]


def test_a_gz_may_have_zeros_between_and_behind_its_members(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    parts = [gzip.compress(json_lines([text])) for text in "abc"]
    path.write_bytes(parts[0] + b"\0" * 9 + parts[1] + parts[2] + b"\0" * 5000)
    assert texts_of(shard_of(path), 5) == ["a", "b", "c"]


@pytest.mark.parametrize("window_log", [28, 31])
def test_a_zst_may_need_a_long_window(tmp_path, window_log):
    path = tmp_path / "a.jsonl.zst"
    text = json_lines(["far", "away"])
    # RFC 8878: magic number, no flags, window descriptor; one raw block, the last.
    frame = bytes([0x28, 0xB5, 0x2F, 0xFD, 0, (window_log - 10) << 3])
    frame += ((len(text) << 3) | 1).to_bytes(3, "little") + text
    with pytest.raises(zstandard.ZstdError, match="too much memory"):
        zstandard.ZstdDecompressor().decompressobj().decompress(frame)
    path.write_bytes(frame)
    assert texts_of(shard_of(path), 1000) == ["far", "away"]


def test_a_zst_may_hold_skippable_frames(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    skippable = struct.pack("<II", 0x184D2A50, 3) + b"abc"
    path.write_bytes(zstandard.compress(json_lines("a")) + skippable)
    assert texts_of(shard_of(path), 1000) == ["a"]


def test_a_text_file_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo — three\n", encoding="utf-8")
    shard = shard_of(path)
    assert texts_of(shard, 1) == ["one\n\ntwo — three\n"]
    assert texts_of(shard, 1, Part(0, 3)) == ["one\n\ntwo — three\n"]
    assert texts_of(shard, 1, Part(2, 3)) == []
    assert locate(shard, 0) == str(path)
    assert count_records(shard, "text", 5) == 1


# What is read and what is held


def test_no_file_stays_open_between_blocks(tmp_path):
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("open files are not listed here")
    for kind in FORMATS:
        shard = make_shard(tmp_path, kind, documents(40))
        reader = open_reader(shard, "text", 700)
        block = reader.read_block(0, 0)
        assert block.next_position is not None
        opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        assert shard.path not in opened


@pytest.mark.parametrize("kind", COMPRESSED)
def test_a_compressed_text_is_read_through_once_in_small_pieces(tmp_path, reads, kind):
    noise = np.random.default_rng(0).bytes(600_000).hex()
    texts = [noise[start : start + 6000] for start in range(0, len(noise), 6000)]
    shard = make_shard(tmp_path, kind, texts)
    assert len(blocks_of(shard, 10_000)) > 50
    assert sum(length for _, length in reads) == shard.size
    assert max(length for _, length in reads) <= 1 << 18 < shard.size


def write_large_group(path, num_rows=1000):
    """Write a .parquet of 3 MB: one row group, pages of 100 rows or fewer."""
    noise = np.random.default_rng(0).bytes(num_rows * 1500).hex()
    table = pyarrow.table({"text": [noise[n * 3000 : n * 3000 + 3000] for n in range(num_rows)]})
    pyarrow.parquet.write_table(
        table,
        path,
        compression="none",
        use_dictionary=False,
        data_page_size=150_000,
        write_batch_size=10,
    )
    assert pyarrow.parquet.ParquetFile(path).num_row_groups == 1


def parquet_by_url(path):
    import fsspec

    url = f"memory://{path.parent.name}/{path.name}"
    fsspec.filesystem("memory").pipe_file(url, path.read_bytes())
    return Shard(name=path.name, path=url, size=path.stat().st_size, format="parquet")


@pytest.mark.parametrize("part", [WHOLE, Part(1, 3)])
@pytest.mark.parametrize("shard_by", [shard_of, parquet_by_url])
def test_a_large_row_group_is_read_once_a_few_pages_at_a_time(tmp_path, reads, part, shard_by):
    write_large_group(tmp_path / "a.parquet")
    shard = shard_by(tmp_path / "a.parquet")
    found = blocks_of(shard, 100_000, part)
    assert len(found) > 20
    assert sum(length for _, length in reads) < 1.2 * shard.size
    assert max(length for _, length in reads) < 1 << 19 < shard.size / 5
    for where, block in found:
        assert open_reader(shard, "text", 100_000, part).read_block(*where) == block


def test_a_row_group_may_be_read_from_rows_that_begin_no_block(tmp_path):
    write_large_group(tmp_path / "a.parquet")
    shard = shard_of(tmp_path / "a.parquet")
    rows = [record for _, block in blocks_of(shard, 1 << 30) for record in block.records]
    reader = open_reader(shard, "text", 100_000, Part(1, 2))
    for first in (7, 8, 500, 41, 999):
        for _ in range(2):
            block = reader.read_block(first, first)
            assert block.numbers == [n for n in range(first, block.next_number) if n % 2]
            assert block.records == [rows[n] for n in block.numbers]
            first = block.next_position
            if first is None:
                break


def test_without_room_for_its_pages_a_row_group_gives_the_same_blocks(tmp_path, reads, monkeypatch):
    write_large_group(tmp_path / "a.parquet")
    shard = shard_of(tmp_path / "a.parquet")
    expected = blocks_of(shard, 100_000)
    kept = pyarrow.total_allocated_bytes()
    monkeypatch.setattr(record_files, "MOST_KEPT_BYTES", -1)
    reader = open_reader(shard, "text", 100_000)
    for where, block in expected:
        assert reader.read_block(*where) == block
        assert pyarrow.total_allocated_bytes() <= kept


# Remote files


class RangeServer(http.server.SimpleHTTPRequestHandler):
    """A web server of a folder that answers requests for a range of a file."""

    folder: str

    def do_HEAD(self):
        self.answer(b"")

    def do_GET(self):
        self.answer(Path(self.folder + self.path).read_bytes())

    def answer(self, data):
        size = os.path.getsize(self.folder + self.path)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked:
            data = data[int(asked[1]) : int(asked[2]) + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {asked[1]}-{asked[2]}/{size}")
        else:
            self.send_response(200)
        self.send_header("Accept-Ranges", "bytes")
        length = size if self.command == "HEAD" else len(data)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@pytest.fixture(params=["memory", "http"])
def publish(request, tmp_path):
    """Return a function that gives the URL of a file of tmp_path."""
    if request.param == "memory":
        import fsspec

        def put(path):
            url = f"memory://{tmp_path.name}/{path.name}"
            fsspec.filesystem("memory").pipe_file(url, path.read_bytes())
            return url

        yield put
        return
    pytest.importorskip("aiohttp")
    handler = type("Here", (RangeServer,), {"folder": str(tmp_path)})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield lambda path: f"http://127.0.0.1:{server.server_port}/{path.name}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("kind", [*FORMATS, "txt"])
def test_every_format_reads_the_same_by_url(tmp_path, publish, kind):
    texts = documents(23)
    path = tmp_path / f"a.{kind}"
    if kind == "txt":
        path.write_text(texts[0], encoding="utf-8")
    else:
        write(path, texts, kind)
    remote = Shard(name=path.name, path=publish(path), size=path.stat().st_size, format=kind)
    for part in (WHOLE, Part(0, 3)):
        here = [block for _, block in blocks_of(shard_of(path), 1500, part)]
        assert [block for _, block in blocks_of(remote, 1500, part)] == here
        assert here[0].records


@pytest.mark.parametrize("kind", COMPRESSED)
def test_a_remote_text_is_asked_for_in_pieces_of_a_block(tmp_path, reads, kind):
    import fsspec

    texts = [np.random.default_rng(n).bytes(3000).hex() for n in range(800)]
    path = tmp_path / f"a.{kind}"
    write(path, texts, kind)
    url = f"memory://{tmp_path.name}/{path.name}"
    fsspec.filesystem("memory").pipe_file(url, path.read_bytes())
    remote = Shard(name=path.name, path=url, size=path.stat().st_size, format=kind)
    for block_bytes, most in ((1000, 1 << 18), (1 << 20, 1 << 20), (64 << 20, 4 << 20)):
        reads.clear()
        assert texts_of(remote, block_bytes) == texts
        assert max(length for _, length in reads) == min(most, remote.size)
        assert len(reads) == -(-remote.size // most)


# Files that changed, and the flaws of records


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_that_changed_or_went_since_it_was_listed_is_refused(tmp_path, kind):
    shard = make_shard(tmp_path, kind, documents(2))
    path = tmp_path / shard.name
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(UserError, match="bytes when it was listed"):
        open_reader(shard, "text", 100)
    path.unlink()
    with pytest.raises(UserError, match="is gone since"):
        open_reader(shard, "text", 100)


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

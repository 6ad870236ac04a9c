"""The parts of a shard hold each of its records once, whatever the format."""

from __future__ import annotations

import pytest
from corpora import documents
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from shard_files import (
    FORMATS,
    blocks_of,
    json_lines,
    make_shard,
    shard_of,
    texts_of,
)

from openelm_jax.data import line_files, readers
from openelm_jax.data.readers import (
    Part,
    count_records,
    each_part_holds_records,
    locate,
    splits_by_position,
)

COMPRESSED = ("jsonl.gz", "jsonl.zst")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("of", [2, 3, 5, 11, 30])
@pytest.mark.parametrize("range_bytes", [100, 1 << 20])
def test_parts_hold_each_record_once_and_in_order(tmp_path, monkeypatch, kind, of, range_bytes):
    monkeypatch.setattr(line_files, "RANGE_BYTES", range_bytes)
    texts = documents(23)
    shard = make_shard(tmp_path, kind, texts)
    parts = [texts_of(shard, 700, Part(number, of)) for number in range(of)]
    assert sorted(text for part in parts for text in part) == sorted(texts)
    for part in parts:
        places = [texts.index(text) for text in part]
        assert places == sorted(places)


@pytest.mark.parametrize("kind", ["jsonl", *COMPRESSED])
def test_parts_of_a_small_or_compressed_text_take_every_kth_record(tmp_path, kind):
    texts = documents(23)
    shard = make_shard(tmp_path, kind, texts)
    for number in range(4):
        assert texts_of(shard, 500, Part(number, 4)) == texts[number::4]
        blocks = [block for _, block in blocks_of(shard, 500, Part(number, 4))]
        assert [n for block in blocks for n in block.numbers] == list(range(number, 23, 4))
    assert not splits_by_position(shard, 4)


line_ends = st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\n  \n"])
lines = st.lists(st.tuples(st.integers(1, 40), line_ends), min_size=1, max_size=30)


@settings(max_examples=150, deadline=None)
@given(lines=lines, of=st.integers(1, 9), block_bytes=st.integers(1, 200), cut=st.booleans())
def test_a_line_belongs_to_the_range_its_first_byte_is_in(
    tmp_path_factory, lines, of, block_bytes, cut
):
    path = tmp_path_factory.mktemp("ranges") / "a.jsonl"
    data = b"".join(b"%d:" % n + b"x" * length + end for n, (length, end) in enumerate(lines))
    data = data.rstrip() if cut else data
    assume(len(data) >= of)
    path.write_bytes(data)
    shard = shard_of(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_files, "RANGE_BYTES", 1)
        patch.setattr(line_files, "LINE_BYTES", 7)
        for number in range(of):
            begin, stop = (len(data) * edge // of for edge in (number, number + 1))
            expected, place = [], 0
            for line_number, line in enumerate(data.split(b"\n"), start=1):
                if begin <= place < stop and line.strip():
                    expected.append((line, f"{path}:{line_number}"))
                place += len(line) + 1
            part = Part(number, of)
            found = [
                (record, locate(shard, n, part))
                for _, block in blocks_of(shard, block_bytes, part)
                for record, n in zip(block.records, block.numbers, strict=True)
            ]
            assert found == expected


def test_a_record_far_into_a_large_text_is_named_without_reading_what_is_before_it(
    tmp_path, monkeypatch, reads
):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(["x" * 1000] * 4200))
    shard = shard_of(path)
    half = shard.size // 2
    monkeypatch.setattr(readers, "LINES_COUNTED_BYTES", half)
    assert locate(shard, 3, Part(1, 2)) == f"{path}:2104"
    reads.clear()
    monkeypatch.setattr(readers, "LINES_COUNTED_BYTES", half - 1)
    assert locate(shard, 3, Part(1, 2)) == f"{path}, line 4 after byte {half:,}"
    assert reads == []
    assert locate(shard, 4199, Part(4, 5)) == f"{path}:4200"  # a stride counts from the beginning


def test_a_range_of_a_large_text_reads_little_more_than_itself(tmp_path, reads):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(["x" * 1000] * 4200))
    shard = shard_of(path)
    assert splits_by_position(shard, 4)
    assert not splits_by_position(shard, 5)
    counts = []
    for number in range(4):
        reads.clear()
        counts.append(len(texts_of(shard, 1 << 22, Part(number, 4))))
        assert sum(length for _, length in reads) < shard.size / 4 + 3 * line_files.LINE_BYTES
    assert sum(counts) == 4200
    assert max(counts) - min(counts) <= 1


def test_parts_of_a_parquet_with_row_groups_enough_are_ranges_of_them(tmp_path):
    texts = documents(23)
    shard = make_shard(tmp_path, "parquet", texts)  # five groups of 5, 5, 5, 5 and 3 rows
    assert [splits_by_position(shard, of) for of in (2, 5, 6)] == [True, True, False]
    assert texts_of(shard, 700, Part(0, 2)) == texts[:10]
    assert texts_of(shard, 700, Part(1, 2)) == texts[10:]
    numbers = [n for _, block in blocks_of(shard, 700, Part(1, 2)) for n in block.numbers]
    assert numbers == list(range(10, 23))
    assert locate(shard, 10, Part(1, 2)) == f"{shard.path}, row 10"
    assert texts_of(shard, 700, Part(4, 6)) == texts[4::6]


def test_parts_of_an_array_record_are_ranges_of_records(tmp_path):
    texts = documents(23)
    shard = make_shard(tmp_path, "array_record", texts)
    assert texts_of(shard, 700, Part(1, 4)) == texts[5:11]
    assert [splits_by_position(shard, of) for of in (23, 24)] == [True, False]
    assert locate(shard, 5, Part(1, 4)) == f"{shard.path}, row 5"


@pytest.mark.parametrize("kind", FORMATS)
def test_records_are_counted_up_to_the_most_that_is_asked_for(tmp_path, kind):
    shard = make_shard(tmp_path, kind, documents(23))
    assert [count_records(shard, "text", most) for most in (1, 22, 23, 100)] == [1, 22, 23, 23]


def test_an_index_is_counted_without_reading_records(tmp_path, reads):
    shard = make_shard(tmp_path, "parquet", documents(5000))
    assert count_records(shard, "text", 10_000) == 5000
    assert sum(length for _, length in reads) < shard.size / 2


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("range_bytes", [100, 1 << 20])
def test_whether_each_part_holds_records_is_said_as_reading_them_shows(
    tmp_path, monkeypatch, kind, range_bytes
):
    monkeypatch.setattr(line_files, "RANGE_BYTES", range_bytes)
    shard = make_shard(tmp_path, kind, documents(9))
    said = {of: each_part_holds_records(shard, "text", of) for of in range(1, 14)}
    assert said == {of: all(texts_of(shard, 700, Part(n, of)) for n in range(of)) for of in said}
    assert set(said.values()) == {True, False}


def test_to_see_whether_ranges_hold_records_little_of_them_is_read(tmp_path, reads):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(["x" * 1000] * 4200))
    shard = shard_of(path)
    assert each_part_holds_records(shard, "text", 4)
    assert sum(length for _, length in reads) <= 4 * 3 * line_files.LINE_BYTES < shard.size / 5

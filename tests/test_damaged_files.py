"""A file that breaks off or is corrupt is told by name, after all that can be read before that."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter

from openelm_jax.data import storage
from openelm_jax.data.manifest import Shard
from openelm_jax.data.readers import (
    WHOLE,
    Part,
    count_records,
    open_reader,
    read_blocks,
    splits_by_position,
)
from openelm_jax.errors import UserError

_NOISE = np.random.default_rng(0).bytes(100_000).hex()
# Not to be compressed much, so that half a file holds about half the lines.
TEXTS = [f"{n} {_NOISE[n * 500 : n * 500 + 500]}" for n in range(400)]
LINES = [json.dumps({"text": text}).encode() for text in TEXTS]
DATA = b"\n".join(LINES) + b"\n"
FORMATS = ("jsonl.gz", "jsonl.zst", "parquet", "array_record")


def write(path, data: bytes) -> Shard:
    path.write_bytes(data)
    kind = path.name.split(".", 1)[1]
    return Shard(name=path.name, path=str(path), size=len(data), format=kind)


def sound_file(folder, kind) -> bytes:
    path = folder / f"sound.{kind}"
    match kind:
        case "jsonl.gz":
            compressor = zlib.compressobj(wbits=31)
            path.write_bytes(compress_each_line(compressor, zlib.Z_SYNC_FLUSH))
        case "jsonl.zst":
            compressor = zstandard.ZstdCompressor().compressobj()
            path.write_bytes(compress_each_line(compressor, zstandard.COMPRESSOBJ_FLUSH_BLOCK))
        case "parquet":
            table = pyarrow.table({"text": TEXTS})
            pyarrow.parquet.write_table(
                table, path, row_group_size=100, compression="none", write_page_checksum=True
            )
        case "array_record":
            writer = ArrayRecordWriter(str(path), "group_size:1")
            for line in LINES:
                writer.write(line)
            writer.close()
    return path.read_bytes()


def compress_each_line(compressor, flush: int) -> bytes:
    """Return the lines as a block of the compressed format each, so that half can be read."""
    blocks = [compressor.compress(line + b"\n") + compressor.flush(flush) for line in LINES]
    return b"".join([*blocks, compressor.flush()])


def flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0x5A]) + data[place + 1 :]


def read_all(shard, block_bytes=20_000, part=WHOLE):
    """Return all records that can be read, and the damage."""
    reader = open_reader(shard, "text", block_bytes, part)
    records, position, number = [], 0, 0
    while position is not None:
        block = reader.read_block(position, number)
        assert block.damage is None or block.next_position is None
        assert open_reader(shard, "text", block_bytes, part).read_block(position, number) == block
        records += block.records
        position, number = block.next_position, block.next_number
    return records, block.damage


def sentence(shard, reason: str) -> str:
    return (
        f"{shard.path}: the file cannot be read as {shard.format} ({reason}); replace it, or take "
        "it out of the source's files, or set data.on_damaged_shard skip_rest to train on what "
        "comes before."
    )


@pytest.mark.parametrize("block_bytes", [600, 20_000, 1 << 20])
def test_a_gz_that_breaks_off_gives_its_whole_lines(tmp_path, block_bytes):
    data = sound_file(tmp_path, "jsonl.gz")
    data = data[: len(data) // 2]
    readable = zlib.decompressobj(wbits=31).decompress(data)
    expected = readable[: readable.rindex(b"\n")].split(b"\n")
    assert 100 < len(expected) < 300
    shard = write(tmp_path / "a.jsonl.gz", data)
    records, damage = read_all(shard, block_bytes)
    assert records == expected == LINES[: len(expected)]
    assert damage == sentence(shard, "it breaks off before its end")


@pytest.mark.parametrize("block_bytes", [600, 20_000, 1 << 20])
def test_a_zst_that_breaks_off_is_noticed_and_gives_its_whole_lines(tmp_path, block_bytes):
    data = sound_file(tmp_path, "jsonl.zst")
    data = data[: len(data) // 2]
    readable = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    expected = readable[: readable.rindex(b"\n")].split(b"\n")
    assert 100 < len(expected) < 300
    shard = write(tmp_path / "a.jsonl.zst", data)
    records, damage = read_all(shard, block_bytes)
    assert records == expected == LINES[: len(expected)]
    assert damage == sentence(shard, "it breaks off before its end")


def test_a_file_that_breaks_off_in_its_second_member_or_frame_is_noticed(tmp_path):
    for kind in ("jsonl.gz", "jsonl.zst"):
        data = sound_file(tmp_path, kind)
        shard = write(tmp_path / f"a.{kind}", data + data[:10])
        records, damage = read_all(shard)
        assert records == LINES
        assert damage == sentence(shard, "it breaks off before its end")


def test_a_flipped_bit_in_a_gz_is_found_by_its_checksum(tmp_path):
    data = gzip.compress(DATA, compresslevel=0)  # stored as it is
    place = data.index(TEXTS[3].encode()) + 10
    shard = write(tmp_path / "a.jsonl.gz", flip(data, place))
    records, damage = read_all(shard)
    # What was delivered before the checksum at the end is wrong in one line.
    assert [n for n, record in enumerate(records) if record != LINES[n]] == [3]
    assert len(records) > 390
    assert damage is not None
    assert "incorrect data check" in damage


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst"])
def test_corrupt_data_ends_a_compressed_text(tmp_path, kind):
    data = sound_file(tmp_path, kind)
    middle = len(data) // 2
    shard = write(tmp_path / f"a.{kind}", data[:middle] + b"\xff" * 100 + data[middle + 100 :])
    found = [read_all(shard, block_bytes) for block_bytes in (600, 20_000, 1 << 20)]
    records, damage = found[0]
    assert found == [found[0]] * 3
    assert damage is not None
    assert damage.startswith(f"{shard.path}: the file cannot be read as {kind} (")
    is_gzip = kind == "jsonl.gz"
    stream = (
        zlib.decompressobj(wbits=31) if is_gzip else zstandard.ZstdDecompressor().decompressobj()
    )
    sound = stream.decompress(data[:middle]).count(b"\n")
    # Some lines before the place are lost with the last piece, some behind it may come out wrong.
    assert records[: sound - 20] == LINES[: sound - 20]
    assert sound - 20 <= len(records) < sound + 20


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_not_of_its_format_at_all_is_told(tmp_path, kind):
    shard = write(tmp_path / f"a.{kind}", b"<html>404 not found</html>\n" * 20)
    records, damage = read_all(shard)
    assert records == []
    assert damage is not None
    assert damage.startswith(f"{shard.path}: the file cannot be read as {kind} (")
    assert read_all(shard, part=Part(1, 2)) == ([], damage)


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst"])
def test_zeros_where_a_file_was_never_written_are_damage(tmp_path, kind):
    shard = write(tmp_path / f"a.{kind}", bytes(5000))
    records, damage = read_all(shard)
    assert records == []
    assert damage is not None


@pytest.mark.parametrize("kind", ["parquet", "array_record"])
def test_an_index_that_is_cut_off_leaves_nothing_to_read(tmp_path, kind):
    shard = write(tmp_path / f"a.{kind}", sound_file(tmp_path, kind)[:-40])
    records, damage = read_all(shard)
    assert records == []
    assert damage is not None
    assert damage.startswith(f"{shard.path}: the file cannot be read as {kind} (")
    assert not splits_by_position(shard, 2)


def test_a_row_group_with_a_wrong_checksum_ends_a_parquet(tmp_path):
    data = sound_file(tmp_path, "parquet")
    place = data.index(TEXTS[250].encode()) + 100
    shard = write(tmp_path / "a.parquet", flip(data, place))
    records, damage = read_all(shard, 1 << 20)
    assert records == [text.encode() for text in TEXTS[:200]]
    assert damage is not None
    assert "CRC" in damage
    assert read_all(shard, 1 << 20, Part(3, 4)) == ([text.encode() for text in TEXTS[300:]], None)


def test_a_wrong_page_ends_a_parquet_after_the_blocks_before_it(tmp_path):
    pyarrow.parquet.write_table(
        pyarrow.table({"text": TEXTS}),
        tmp_path / "sound.parquet",
        compression="none",
        use_dictionary=False,
        data_page_size=5000,
        write_batch_size=1,
        write_statistics=False,  # they would hold texts too
        write_page_checksum=True,
    )
    data = (tmp_path / "sound.parquet").read_bytes()
    place = data.index(TEXTS[250].encode()) + 100
    shard = write(tmp_path / "a.parquet", flip(data, place))
    records, damage = read_all(shard, 5000)
    assert 220 < len(records) <= 250
    assert records == [text.encode() for text in TEXTS[: len(records)]]
    assert damage is not None
    assert "CRC" in damage


def test_an_array_record_that_is_refused_without_a_reason_is_damaged(tmp_path, monkeypatch):
    class Refused:
        def __init__(self, *arguments):
            pass

        def ok(self):
            return False

        def close(self):
            pass

    shard = write(tmp_path / "a.array_record", sound_file(tmp_path, "array_record"))
    monkeypatch.setattr("array_record.python.array_record_module.ArrayRecordReader", Refused)
    assert read_all(shard) == ([], sentence(shard, "array_record does not say why"))


def test_a_broken_record_ends_an_array_record(tmp_path):
    data = bytearray(sound_file(tmp_path, "array_record"))
    place = len(data) // 3
    data[place : place + 8] = b"\xff" * 8
    shard = write(tmp_path / "a.array_record", bytes(data))
    found = [read_all(shard, block_bytes) for block_bytes in (1, 20_000, 1 << 20)]
    records, damage = found[0]
    assert [records for records, _ in found] == [records] * 3
    assert records == LINES[: len(records)]
    assert 100 < len(records) < 300
    assert damage is not None
    assert damage.startswith(f"{shard.path}: the file cannot be read as array_record (Corrupted")


@pytest.mark.parametrize("kind", FORMATS)
def test_damage_stops_the_reading_of_a_shard_unless_it_is_skipped(tmp_path, kind):
    data = sound_file(tmp_path, kind)
    shard = write(tmp_path / f"a.{kind}", data[: len(data) * 2 // 3])
    _, damage = read_all(shard)
    with pytest.raises(UserError) as error:
        list(read_blocks(shard, "text", 20_000))
    assert str(error.value) == damage
    records = [r for b in read_blocks(shard, "text", 20_000, skip_damage=True) for r in b.records]
    assert records == read_all(shard)[0]
    with pytest.raises(UserError) as error:
        count_records(shard, "text", 1000)
    assert str(error.value) == damage
    assert count_records(shard, "text", 1000, skip_damage=True) == len(records)


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet"])
def test_damage_that_is_gone_when_read_once_more_is_none(tmp_path, monkeypatch, kind):
    shard = write(tmp_path / f"a.{kind}", sound_file(tmp_path, kind))
    sound = read_all(shard)
    assert sound[1] is None
    real, calls = storage.read, itertools.count()

    def read(path, start, length):
        data = real(path, start, length)
        return b"\xff" * len(data) if next(calls) == 0 else data

    for block_bytes in (20_000, 1 << 20):
        calls = itertools.count()
        monkeypatch.setattr(storage, "read", read)
        reader = open_reader(shard, "text", block_bytes)
        block = reader.read_block(0, 0)
        monkeypatch.undo()
        assert block == open_reader(shard, "text", block_bytes).read_block(0, 0)


def test_damage_met_in_the_middle_is_read_once_more_from_the_start(tmp_path, monkeypatch):
    shard = write(tmp_path / "a.jsonl.zst", sound_file(tmp_path, "jsonl.zst"))
    monkeypatch.setattr("openelm_jax.data.blocks.INPUT_BYTES", 1 << 14)
    real, failed = storage.read, []

    def read(path, start, length):
        data = real(path, start, length)
        if start > 50_000 and not failed:
            failed.append(start)
            return b"\xff" * len(data)
        return data

    monkeypatch.setattr(storage, "read", read)
    blocks = list(read_blocks(shard, "text", 20_000))
    assert failed
    assert [record for block in blocks for record in block.records] == LINES


@pytest.mark.parametrize("kind", [*FORMATS, "jsonl"])
def test_a_file_that_cannot_be_reached_is_no_damage(tmp_path, kind):
    data = DATA if kind == "jsonl" else sound_file(tmp_path, kind)
    shard = write(tmp_path / f"a.{kind}", data)
    reader = open_reader(shard, "text", 20_000)
    (tmp_path / f"a.{kind}").unlink()
    with pytest.raises(UserError, match="is gone since it was listed; put it back"):
        reader.read_block(0, 0)

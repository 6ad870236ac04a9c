"""A damaged file in a mixture: it stops the stream, or is counted and read no further.

Each is the middle one of three shards; the other two are sound.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from corpora import config, documents, source, tokenizer, write

from openelm_jax.config import DataConfig
from openelm_jax.data import pipeline
from openelm_jax.data.pipeline import DataIterator, Position, open_data, training_texts
from openelm_jax.errors import UserError

SOUND = documents(12, seed=1, words=(20, 60))
DAMAGED = documents(240, seed=2, words=(20, 60))
ROWS_OF_A_GROUP = 60
WHOLE = 150
"""Documents before the place where a file breaks off."""


def lines_of(texts: list[str]) -> list[bytes]:
    return [json.dumps({"text": text}).encode() + b"\n" for text in texts]


def break_off_gz(path: Path) -> list[str]:
    compressor = zlib.compressobj(wbits=31)
    return _break_off(path, compressor.compress, lambda: compressor.flush(zlib.Z_SYNC_FLUSH))


def break_off_zst(path: Path) -> list[str]:
    compressor = zstandard.ZstdCompressor().compressobj()
    return _break_off(
        path, compressor.compress, lambda: compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    )


def _break_off(
    path: Path, compress: Callable[[bytes], bytes], flush: Callable[[], bytes]
) -> list[str]:
    blocks = [compress(line) + flush() for line in lines_of(DAMAGED)]
    path.write_bytes(b"".join(blocks[:WHOLE]) + blocks[WHOLE][:5])
    return DAMAGED[:WHOLE]


def flip_gz(path: Path) -> list[str]:
    """Make a letter of a document another one: only the checksum at the end tells."""
    data = gzip.compress(b"".join(lines_of(DAMAGED)), compresslevel=0, mtime=0)
    place = data.index(b'"2/3 ') + 1
    path.write_bytes(data[:place] + b"#" + data[place + 1 :])
    changed = [*DAMAGED]
    changed[3] = "#" + changed[3][1:]
    # Bytes go through zlib in pieces of 4 KiB; the last piece holds the checksum.
    read = zlib.decompressobj(wbits=31).decompress(data[: (len(data) - 1) // 4096 * 4096])
    return changed[: read.count(b"\n")]


def cut_parquet(path: Path) -> list[str]:
    write(path, DAMAGED)
    path.write_bytes(path.read_bytes()[:-40])
    return []  # the index was at the end


def flip_parquet(path: Path) -> list[str]:
    table = pyarrow.table({"text": DAMAGED})
    pyarrow.parquet.write_table(
        table,
        path,
        row_group_size=ROWS_OF_A_GROUP,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    data = path.read_bytes()
    place = data.index(DAMAGED[2 * ROWS_OF_A_GROUP + 7].encode())
    path.write_bytes(data[:place] + b"#" + data[place + 1 :])
    return DAMAGED[: 2 * ROWS_OF_A_GROUP]


def break_off_array_record(path: Path) -> list[str]:
    write(path, DAMAGED)
    path.write_bytes(path.read_bytes()[:-40])
    return []


DAMAGE = {
    "jsonl.gz that breaks off": (break_off_gz, "it breaks off before its end"),
    "jsonl.gz with a flipped bit": (flip_gz, "incorrect data check"),
    "jsonl.zst that breaks off": (break_off_zst, "it breaks off before its end"),
    "parquet that breaks off": (cut_parquet, ""),
    "parquet with a flipped bit": (flip_parquet, "CRC"),
    "array_record that breaks off": (break_off_array_record, ""),
}


@pytest.fixture(params=DAMAGE)
def damage(request, tmp_path: Path) -> tuple[Path, list[str], str]:
    """Return the damaged file, what can be read of it, and why no more."""
    name = request.param
    make, reason = DAMAGE[name]
    ending = name.split(" ")[0]
    for number, texts in enumerate((SOUND[:6], SOUND[6:])):
        write(tmp_path / "web" / f"{2 * number}.{ending}", texts)
    path = tmp_path / "web" / f"1.{ending}"
    return path, make(path), reason


def settings_of(path: Path, policy: str, **changes) -> DataConfig:
    return config(path.parents[1], source("web"), on_damaged_shard=policy, **changes)


def open_one(settings: DataConfig, *, row_length: int = 33, batch: int = 1) -> DataIterator:
    return open_data(settings, tokenizer(), row_length=row_length, global_batch_size=batch)


def one_epoch(data: DataIterator) -> Position:
    """Return the position at which each lane's next row begins in the second epoch."""
    position = data.get_state()
    while data.counters(position)["web"]["least_epochs"] == 0:
        _, position = next(data)
    return position


def through_json(position: Position) -> Position:
    return Position.from_json(json.loads(json.dumps(position.to_json())))


def num_tokens(texts: list[str]) -> int:
    return sum(len(tokenizer().encode(text)) + 2 for text in texts)


def test_it_stops_the_stream_by_its_name_and_with_the_ways_out(damage) -> None:
    path, _, reason = damage
    kind = path.name.split(".", 1)[1]
    data = open_one(settings_of(path, "raise"))
    position = data.get_state()

    with pytest.raises(UserError) as refusal:  # noqa: PT012
        while data.counters(position)["web"]["least_epochs"] == 0:
            _, position = next(data)

    message = str(refusal.value)
    assert message.startswith(f"{path}: the file cannot be read as {kind} (")
    assert reason in message
    assert message.endswith(
        "); replace it, or take it out of the source's files, or set data.on_damaged_shard "
        "skip_rest to train on what comes before."
    )
    assert data.counters(position)["web"]["damaged_shards"] == 0


def test_skipped_it_is_counted_and_what_comes_before_the_damage_is_read(damage) -> None:
    path, readable, _ = damage
    data = open_one(settings_of(path, "skip_rest"))

    counters = data.counters(one_epoch(data))["web"]

    texts = [*SOUND, *readable]
    assert (counters["shards"], counters["damaged_shards"]) == (3, 1)
    assert counters["records"] == counters["kept_documents"] == len(texts)
    assert counters["chars"] == sum(map(len, texts))
    assert counters["kept_tokens"] == num_tokens(texts)
    assert list(training_texts(settings_of(path, "skip_rest"))) == [
        *SOUND[:6],
        *readable,
        *SOUND[6:],
    ]


def test_a_run_goes_on_to_the_bit_before_in_and_behind_the_damage(damage, monkeypatch) -> None:
    monkeypatch.setattr(pipeline, "MOST_BLOCK_BYTES", 12_000)  # several blocks a shard
    path, _, _ = damage
    settings = settings_of(path, "skip_rest", min_tokens=60)
    data = open_one(settings, row_length=257)
    positions, rows = [data.get_state()], []
    while data.counters(positions[-1])["web"]["damaged_shards"] < 2 or len(rows) < 12:
        row, position = next(data)
        rows.append(row)
        positions.append(position)

    for start in range(0, len(rows) - 1, 5):
        again = open_one(settings, row_length=257)
        again.set_state(through_json(positions[start]))
        for step in range(start, min(start + 3, len(rows))):
            row, position = next(again)
            assert (row == rows[step]).all()
            assert position.to_json() == positions[step + 1].to_json()


def test_a_run_that_it_stopped_goes_on_with_skip_rest_as_if_it_had_been_set_before(damage) -> None:
    path, _, _ = damage
    whole = open_one(settings_of(path, "skip_rest"))
    stopped = open_one(settings_of(path, "raise"))
    position = stopped.get_state()
    with pytest.raises(UserError, match="cannot be read as"):  # noqa: PT012
        while True:
            _, position = next(stopped)

    again = open_one(settings_of(path, "skip_rest"))
    again.set_state(through_json(position))

    for _ in range(position.step):
        next(whole)
    for _ in range(60):
        (row, place), (expected, expected_place) = next(again), next(whole)
        assert (row == expected).all()
        assert place.to_json() == expected_place.to_json()


def test_each_lane_that_shares_it_counts_it(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    readable = break_off_gz(tmp_path / "web" / "1.jsonl.gz")
    data = open_one(settings_of(tmp_path / "web" / "x", "skip_rest", lanes=4), batch=4)

    position = one_epoch(data)

    table_NC = position.table_NSC[:, 0]
    epochs_N = [row[0] for row in table_NC.tolist()]
    counters = data.counters(position)["web"]
    assert min(epochs_N) == 1
    assert counters["damaged_shards"] == counters["shards"] == sum(epochs_N)
    assert counters["records"] >= len(readable)


def test_lanes_are_counted_on_what_can_be_read(tmp_path: Path) -> None:
    """Six documents can be read of a file that 8 lanes would share: 4 of them can."""
    (tmp_path / "web").mkdir()
    blocks = lines_of(DAMAGED[:20])
    data = gzip.compress(b"".join(blocks[:6])) + gzip.compress(b"".join(blocks[6:]))[:12]
    (tmp_path / "web" / "1.jsonl.gz").write_bytes(data)
    place = tmp_path / "web" / "x"

    with pytest.raises(UserError, match=r"1\.jsonl\.gz: the file cannot be read"):
        open_one(settings_of(place, "raise", lanes=8), batch=8)
    with pytest.raises(UserError, match=r"8 lanes leave some without .* are data\.lanes 4\."):
        open_one(settings_of(place, "skip_rest", lanes=8), batch=8)
    next(open_one(settings_of(place, "skip_rest", lanes=4), batch=8))


def test_a_source_of_which_damage_leaves_nothing_is_refused_though_skipped(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    cut_parquet(tmp_path / "web" / "1.parquet")
    settings = settings_of(tmp_path / "web" / "x", "skip_rest")

    for use in (open_one, training_texts):
        with pytest.raises(UserError, match=r"there is no record in any of its 1 files"):
            use(settings)


def test_a_bit_that_makes_no_json_of_a_line_is_a_bad_record_besides(tmp_path: Path) -> None:
    path = tmp_path / "web" / "1.jsonl.gz"
    write(path.with_name("0.jsonl.gz"), SOUND)
    data = gzip.compress(b"".join(lines_of(DAMAGED)), compresslevel=0, mtime=0)
    place = data.index(b'"2/3 ')
    path.write_bytes(data[:place] + b"#" + data[place + 1 :])
    stream = open_one(settings_of(path, "skip_rest", max_bad_fraction=0.1))

    counters = stream.counters(one_epoch(stream))["web"]

    assert counters["damaged_shards"] == 1
    assert counters["bad_json"] == 1
    assert counters["kept_documents"] == counters["records"] - 1


@pytest.mark.parametrize("window_log", [28, 31])
def test_a_zst_with_a_long_window_is_no_damage(tmp_path: Path, window_log: int) -> None:
    path = tmp_path / "web" / "1.jsonl.zst"
    path.parent.mkdir()
    text = b"".join(lines_of(SOUND))
    # RFC 8878: magic number, no flags, window descriptor; one raw block, the last.
    frame = bytes([0x28, 0xB5, 0x2F, 0xFD, 0, (window_log - 10) << 3])
    path.write_bytes(frame + (len(text) << 3 | 1).to_bytes(3, "little") + text)
    data = open_one(settings_of(path, "raise"))

    counters = data.counters(one_epoch(data))["web"]

    assert counters["kept_documents"] == len(SOUND)
    assert counters["damaged_shards"] == 0

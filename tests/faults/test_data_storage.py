"""Files that change, go, or cannot be reached while a stream reads them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from corpora import config, documents, source, tokenizer, write_shards
from fsspec.implementations.memory import MemoryFileSystem
from shard_files import make_shard

from openelm_jax.data import pipeline, storage
from openelm_jax.data.pipeline import DataIterator, Position, open_data
from openelm_jax.data.readers import open_reader
from openelm_jax.errors import UserError

FORMATS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "array_record"]
STEPS = 60


def open_one(root: Path | str, **changes) -> DataIterator:
    settings = config(root, source("web"), **{"lanes": 2, **changes})
    return open_data(settings, tokenizer(), row_length=65, global_batch_size=2)


def take(data: DataIterator, steps: int) -> list[tuple[list, dict]]:
    return [(rows.tolist(), position.to_json()) for rows, position in itertools.islice(data, steps)]


def through_json(position: Position) -> Position:
    return Position.from_json(json.loads(json.dumps(position.to_json())))


def read_until_refused(data: DataIterator) -> tuple[Position, str]:
    """Return the last position before a UserError, and what that said."""
    position = data.get_state()
    with pytest.raises(UserError) as refusal:  # noqa: PT012
        for _ in range(1000):
            _, position = next(data)
    return position, str(refusal.value)


# --- On this machine.


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("policy", ["raise", "skip_rest"])
def test_a_file_that_changed_its_size_is_refused_when_it_is_opened(
    tmp_path: Path, ending: str, policy: str
) -> None:
    write_shards(tmp_path / "web", documents(20), ending, 2)
    data = open_one(tmp_path, on_damaged_shard=policy)
    sizes = {}
    for path in (tmp_path / "web").iterdir():
        sizes[str(path)] = path.stat().st_size
        path.write_bytes(path.read_bytes() + b"\n")

    position, message = read_until_refused(data)

    named = message.split(": ")[0]
    assert message == (
        f"{named}: the file had {sizes[named]} bytes when it was listed and has {sizes[named] + 1} "
        "now; leave the data alone while a run reads it, and start again."
    )
    assert data.counters(position)["web"]["damaged_shards"] == 0


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_a_file_that_shrinks_while_it_is_read_is_neither_at_its_end_nor_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr("openelm_jax.data.blocks.INPUT_BYTES", 1000)
    shard = make_shard(tmp_path, ending, documents(200))
    reader = open_reader(shard, "text", 1000)
    block = reader.read_block(0, 0)
    path, size = tmp_path / shard.name, shard.size * 2 // 3
    path.write_bytes(path.read_bytes()[:size])

    with pytest.raises(UserError) as refusal:  # noqa: PT012
        while block.next_position is not None:
            block = reader.read_block(block.next_position, block.next_number)

    assert str(refusal.value).startswith(
        f"{path}: the file had {shard.size} bytes when it was listed and has {size} now; "
    )


@pytest.mark.parametrize("ending", FORMATS)
def test_a_file_that_is_gone_is_named_and_put_back_lets_the_run_go_on(
    tmp_path: Path, ending: str
) -> None:
    write_shards(tmp_path / "web", documents(20), ending, 6)
    expected = take(open_one(tmp_path), STEPS)
    data = open_one(tmp_path, on_damaged_shard="skip_rest")
    next(data)
    (tmp_path / "web").rename(tmp_path / "elsewhere")

    position, message = read_until_refused(data)

    assert message.startswith(f"{tmp_path}/web/0")
    assert message.endswith(": the file is gone since it was listed; put it back.")
    (tmp_path / "elsewhere").rename(tmp_path / "web")
    again = open_one(tmp_path)
    again.set_state(through_json(position))
    assert take(again, STEPS - position.step) == expected[position.step :]


# --- Far away.


class Store:
    """A copy of a folder in memory, whose answers fail as often as `fails` yields True."""

    def __init__(self, folder: Path) -> None:
        self.url = f"memory://{folder.name}"
        self.fails: Iterator[bool] = itertools.repeat(False)
        self.failures = 0
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                name = f"{self.url}/{path.relative_to(folder)}"
                fsspec.filesystem("memory").pipe_file(name, path.read_bytes())

    def answer(self, real, *arguments, **options):
        if next(self.fails):
            self.failures += 1
            raise ConnectionResetError("reset by peer")
        return real(*arguments, **options)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request) -> Store:
    write_shards(tmp_path / "web", documents(40), request.param, 3)
    store = Store(tmp_path)
    for name in ("cat_file", "get_file", "info", "ls"):
        real = getattr(MemoryFileSystem, name)

        def answer(*arguments, real=real, **options):
            return store.answer(real, *arguments, **options)

        monkeypatch.setattr(MemoryFileSystem, name, answer)
    monkeypatch.setattr(storage, "WAITS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(storage, "_copies", {})
    monkeypatch.setattr(pipeline, "MOST_BLOCK_BYTES", 1000)
    return store


@pytest.mark.parametrize("store", FORMATS, indirect=True)
def test_reads_that_fail_and_recover_change_no_batch(tmp_path: Path, store: Store) -> None:
    expected = take(open_one(tmp_path), STEPS)
    store.fails = itertools.cycle([False, True, True, False, False, True])

    found = take(open_one(store.url), STEPS)

    assert found == expected
    assert store.failures > 10


@pytest.mark.parametrize("policy", ["raise", "skip_rest"])
@pytest.mark.parametrize("store", FORMATS, indirect=True)
def test_a_store_that_never_recovers_is_one_sentence_and_the_run_goes_on_when_it_is_back(
    tmp_path: Path, store: Store, policy: str
) -> None:
    expected = take(open_one(tmp_path), STEPS)
    data = open_one(store.url, on_damaged_shard=policy)
    take(data, 3)
    store.fails = itertools.repeat(True)

    position, message = read_until_refused(data)

    assert message.startswith(f"{store.url}/web/0")
    assert ": it cannot be read (reset by peer) in 4 tries" in message
    assert message.endswith("; see that its storage is there, and start again.")
    assert "\n" not in message
    assert data.counters(position)["web"]["damaged_shards"] == 0
    store.fails = itertools.repeat(False)
    again = open_one(store.url)
    again.set_state(through_json(position))
    assert take(again, STEPS - position.step) == expected[position.step :]


@pytest.mark.parametrize("store", ["jsonl"], indirect=True)
def test_a_store_that_is_not_there_at_the_start_is_one_sentence(store: Store) -> None:
    store.fails = itertools.repeat(True)
    with pytest.raises(UserError, match=r"^memory://.*/web: it cannot be read \(reset by peer\)"):
        open_one(store.url)

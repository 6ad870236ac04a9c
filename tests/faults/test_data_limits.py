"""Where a stream stops by itself, and what it does about documents and files of unusual size."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from corpora import config, documents, source, tokenizer, write, write_shards

from openelm_jax import tokenizer as tokenizer_module
from openelm_jax.config import DataConfig, SourceConfig
from openelm_jax.data import source_lane
from openelm_jax.data.columns import Column
from openelm_jax.data.pipeline import DataIterator, Position, make_plan, open_data
from openelm_jax.data.text import TextRules
from openelm_jax.errors import UserError


def open_one(settings: DataConfig, *, row_length: int = 33, batch: int = 1) -> DataIterator:
    return open_data(settings, tokenizer(), row_length=row_length, global_batch_size=batch)


def read_until_refused(data: DataIterator) -> tuple[list, Position, str]:
    """Return the rows and the last position before a UserError, and what that said."""
    rows, position = [], data.get_state()
    with pytest.raises(UserError) as refusal:  # noqa: PT012
        for _ in range(2000):
            row, position = next(data)
            rows.append(row.tolist())
    return rows, position, str(refusal.value)


def through_json(position: Position) -> Position:
    return Position.from_json(json.loads(json.dumps(position.to_json())))


def num_tokens(texts: list[str]) -> int:
    return sum(len(tokenizer().encode(text)) + 2 for text in texts)


# --- Epochs.


def books(most: int | None, **changes) -> SourceConfig:
    return source("books", max_epochs=most, **changes)


def test_a_source_is_not_read_more_often_than_it_may_and_the_run_can_go_on(tmp_path: Path) -> None:
    texts = documents(30, words=(5, 60))
    write_shards(tmp_path / "books", texts, "jsonl", 3)
    endless = open_one(config(tmp_path, books(None)))
    expected = [next(endless)[0].tolist() for _ in range(2000)]
    tokens = num_tokens(texts)
    position, done = None, 0
    for most in (1, 2, 5):
        data = open_one(config(tmp_path, books(most)))
        if position is not None:
            data.set_state(through_json(position))

        rows, position, message = read_until_refused(data)

        assert message == (
            f"data.sources books: lane 0 of 1 has read its part max_epochs ({most}) times and the "
            "next row needs more; raise max_epochs, or end the run here (a lower weight, or fewer "
            "training.steps, would have made it last)."
        )
        # A row has 32 tokens of its own, and one of the row before it.
        assert done + len(rows) == (most * tokens - 1) // 32
        assert rows == expected[done : done + len(rows)]
        done += len(rows)


def test_only_the_draw_that_needs_more_of_it_stops_a_mixture(tmp_path: Path) -> None:
    write_shards(tmp_path / "books", documents(6, seed=1), "jsonl", 1)
    write_shards(tmp_path / "web", documents(30, seed=2), "jsonl", 1)
    sources = (books(1, weight=0.2), source("web", weight=0.8))
    data = open_one(config(tmp_path, *sources))

    _, position, message = read_until_refused(data)

    assert message.startswith("data.sources books: lane 0 of 1 has read its part")
    counters = data.counters(position)
    assert counters["books"]["rows"] == (num_tokens(documents(6, seed=1)) - 1) // 32
    assert counters["web"]["rows"] > 2 * counters["books"]["rows"]


def test_a_limit_below_what_has_been_read_stops_the_next_draw(tmp_path: Path) -> None:
    write_shards(tmp_path / "books", documents(6), "jsonl", 1)
    data = open_one(config(tmp_path, books(None)))
    position = data.get_state()
    while data.counters(position)["books"]["least_epochs"] < 3:
        _, position = next(data)
    limited = open_one(config(tmp_path, books(2)))
    limited.set_state(position)

    rows, _, message = read_until_refused(limited)

    assert rows == []
    assert "max_epochs (2) times" in message


# --- Nothing survives.


def test_a_lane_that_finds_nothing_for_long_is_given_up_with_the_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_lane, "MAX_BARREN_SECONDS", -1.0)
    monkeypatch.setattr(source_lane, "BARREN_RECORDS_TO_BE_SURE", 40)
    write(tmp_path / "web" / "a.jsonl", ["short"] * 60 + ["some words more"] * 60)
    data = open_one(config(tmp_path, source("web"), min_chars=10, min_tokens=200))

    rows, position, message = read_until_refused(data)

    assert rows == []
    assert position.step == 0
    found = re.fullmatch(
        r"data\.sources web: no training text in the last 40 records of lane 0 of 1: of 40 records "
        r"(\d+) have fewer characters than data\.min_chars 10, (\d+) fewer tokens than "
        r"data\.min_tokens 200, 0 are bad; lower the thresholds or data\.lanes, or give other "
        r"files\.",
        message,
    )
    assert found
    assert int(found[1]) + int(found[2]) == 40


def test_time_between_draws_is_not_time_without_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(source_lane, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(source_lane, "BARREN_RECORDS_TO_BE_SURE", 10)
    write(tmp_path / "web" / "a.jsonl", ["short"] * 200 + documents(4))
    data = open_one(config(tmp_path, source("web"), min_chars=10))
    for _ in range(40):
        _, position = next(data)
        clock[0] += 3600.0
    assert data.counters(position)["web"]["char_filter_documents"] >= 200


def test_files_without_a_record_are_passed_over_and_counted(tmp_path: Path) -> None:
    write(tmp_path / "web" / "a.jsonl", documents(5))
    (tmp_path / "web" / "b.jsonl").write_bytes(b"\n \n")
    write(tmp_path / "web" / "c.jsonl", [])  # of no bytes: not even listed
    write(tmp_path / "web" / "d.jsonl.gz", [])
    write(tmp_path / "web" / "e.parquet", [])
    data = open_one(config(tmp_path, source("web")))
    position = data.get_state()
    while data.counters(position)["web"]["least_epochs"] == 0:
        _, position = next(data)
    counters = data.counters(position)["web"]
    in_second_epoch = int(position.table_NSC[0, 0, Column.SHARD])
    assert counters["shards"] - in_second_epoch == 4
    assert counters["damaged_shards"] == 0
    assert counters["records"] == counters["kept_documents"] == 5


@pytest.mark.parametrize(
    ("line", "flaw", "words"),
    [
        (b'{"text": "half a docu', "bad_json", 'not JSON: {"text": "half a docu'),
        (b'{"text": "\xff"}', "bad_utf8", 'not UTF-8: {"text": "\ufffd"}'),
        (b'{"body": "a"}', "bad_key", 'no text under the text_key: {"body": "a"}'),
    ],
)
def test_too_many_flaws_of_a_kind_are_told_with_an_example_and_counted(
    tmp_path: Path, line: bytes, flaw: str, words: str
) -> None:
    write(tmp_path / "web" / "a.jsonl", documents(50))
    path = tmp_path / "web" / "a.jsonl"
    path.write_bytes(path.read_bytes() + line + b"\n")
    data = open_one(config(tmp_path, source("web")))

    _, _, message = read_until_refused(data)

    assert message == (
        f"data.sources web: 1 of 51 records are bad, the last at {path}:51 ({words}); mend the "
        "data, or raise data.max_bad_fraction (0.001)."
    )
    lenient = open_one(config(tmp_path, source("web"), max_bad_fraction=0.1))
    position = lenient.get_state()
    while lenient.counters(position)["web"]["least_epochs"] == 0:
        _, position = next(lenient)
    counters = lenient.counters(position)["web"]
    flaws = {name: counters[name] for name in ("bad_json", "bad_utf8", "bad_key")}
    assert flaws == {"bad_json": 0, "bad_utf8": 0, "bad_key": 0, flaw: 1}
    assert counters["kept_documents"] == 50


# --- Long documents.


def test_of_a_huge_document_only_what_the_rows_need_is_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []
    real = tokenizer_module._chunks

    def counted(text):
        for chunk in real(text):
            encoded.append(len(chunk))
            yield chunk

    monkeypatch.setattr(tokenizer_module, "_chunks", counted)
    text = " ".join(documents(12_000))
    assert len(text) > 3_000_000
    write(tmp_path / "web" / "a.jsonl", [text])
    data = open_one(config(tmp_path, source("web"), min_tokens=256))
    rows = [next(data)[0] for _ in range(3)]
    assert sum(encoded) < 50_000
    tokens = [1, *tokenizer().encode(text[:20_000])]
    for number, row in enumerate(rows):
        assert row[0].tolist() == tokens[32 * number : 32 * number + 33]


def open_cut(root: Path, most: int, **changes) -> DataIterator:
    settings = config(root, source("web"), char_filter="raw", normalize="none", **changes)
    plan = make_plan(settings, tokenizer(), row_length=33, global_batch_size=1)
    rules = dataclasses.replace(plan.rules, max_document_chars=most)
    plan = dataclasses.replace(plan, rules=rules)
    return DataIterator(plan, {"data.lanes": 1}, lanes=range(1), workers=0)


@pytest.mark.parametrize("packing", ["concat", "corenet"])
def test_a_document_beyond_the_longest_is_cut_and_counted_once_also_when_resumed_within(
    tmp_path: Path, packing: str
) -> None:
    long, most = " ".join(documents(60)), 6_000
    short = documents(4, seed=1)
    write(tmp_path / "web" / "a.jsonl", [*short[:2], long, *short[2:]])
    data = open_cut(tmp_path, most, packing=packing)
    assert TextRules.of(config(tmp_path, source("web")), 33).max_document_chars == 50_000_000
    positions, rows = [data.get_state()], []
    while data.counters(positions[-1])["web"]["least_epochs"] < 2:
        row, position = next(data)
        rows.append(row)
        positions.append(position)

    counters = data.counters(positions[-1])["web"]
    assert len(long) > 2 * most
    assert counters["records"] == 2 * 5
    assert counters["cut_chars"] == 2 * (len(long) - most)
    assert counters["chars"] == 2 * sum(map(len, [*short, long]))
    if packing == "concat":
        assert counters["kept_tokens"] == 2 * num_tokens([*short, long[:most]])
    for start in range(0, len(rows), 1 if packing == "corenet" else 7):
        again = open_cut(tmp_path, most, packing=packing)
        again.set_state(through_json(positions[start]))
        for step in range(start, min(start + 2, len(rows))):
            row, position = next(again)
            assert (row == rows[step]).all()
            assert position.to_json() == positions[step + 1].to_json()

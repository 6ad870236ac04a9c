"""Going back to a position gives the same rows and the same counts, bit for bit."""

import json

import numpy as np
import pytest
from corpora import config, documents, source, tokenizer, write, write_shards

from openelm_jax.data import pipeline
from openelm_jax.data.pipeline import Position, open_data
from openelm_jax.errors import UserError

STEPS = 24


def open_mixture(root, *, row_length=129, batch=4, **changes):
    first = source("web", weight=0.7)
    second = source("code", weight=0.3, text_key="body")
    settings = {"min_chars": 60, "min_tokens": 40, "lanes": 2} | changes
    return open_data(
        config(root, first, second, **settings),
        tokenizer(),
        row_length=row_length,
        global_batch_size=batch,
    )


def write_mixture(root, ending):
    write_shards(root / "web", documents(24, seed=1), ending, 3)
    write(root / "code" / f"only.{ending}", documents(6, seed=2), key="body")


def through_json(position):
    return Position.from_json(json.loads(json.dumps(position.to_json())))


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet"])
def test_rows_positions_and_counters_go_on_from_every_step(tmp_path, monkeypatch, ending):
    monkeypatch.setattr(pipeline, "MOST_BLOCK_BYTES", 1500)  # many blocks a shard
    write_mixture(tmp_path, ending)
    data = open_mixture(tmp_path)
    positions, batches = [data.get_state()], []
    for _ in range(STEPS):
        rows, position = next(data)
        batches.append(rows)
        positions.append(position)
    counters = data.counters(positions[-1])
    assert counters["code"]["least_epochs"] >= 2  # the steps crossed ends of epochs
    assert counters["web"]["char_filter_documents"] > 0
    assert counters["web"]["token_filter_documents"] > 0

    other = open_mixture(tmp_path)
    for start in range(STEPS):
        other.set_state(through_json(positions[start]))
        for step in range(start, min(start + 3, STEPS)):
            rows, position = next(other)
            assert (rows == batches[step]).all()
            assert position.to_json() == positions[step + 1].to_json()
            assert other.counters(position) == data.counters(positions[step + 1])


def test_a_run_continued_many_times_is_the_uninterrupted_run(tmp_path):
    write_mixture(tmp_path, "jsonl")
    data = open_mixture(tmp_path)
    expected = [next(data) for _ in range(STEPS)]
    rng = np.random.default_rng(0)
    position, step = open_mixture(tmp_path).get_state(), 0
    while step < STEPS:
        again = open_mixture(tmp_path)
        again.set_state(through_json(position))
        again.set_state(through_json(again.get_state()))  # twice in a row, with nothing read
        for _ in range(min(int(rng.integers(1, 5)), STEPS - step)):
            rows, position = next(again)
            assert (rows == expected[step][0]).all()
            step += 1
        again.close()
    assert position.to_json() == expected[-1][1].to_json()


def test_a_position_does_not_change_while_the_data_goes_on(tmp_path):
    write_mixture(tmp_path, "jsonl")
    data = open_mixture(tmp_path)
    _, position = next(data)
    saved = json.dumps(position.to_json())
    next(data)
    assert json.dumps(position.to_json()) == saved
    data.set_state(position)
    next(data)
    assert json.dumps(position.to_json()) == saved


def test_a_corpus_smaller_than_a_row_resumes_too(tmp_path):
    write_shards(tmp_path / "web", ["a b", "c"], "jsonl", 1)
    args = {"row_length": 65, "global_batch_size": 1}
    data = open_data(config(tmp_path, source("web")), tokenizer(), **args)
    batches = [next(data) for _ in range(5)]
    for start in range(4):
        data.set_state(through_json(batches[start][1]))
        assert (next(data)[0] == batches[start + 1][0]).all()


def test_counters_add_up_and_are_a_closed_form_of_the_corpus(tmp_path):
    """One lane; at the position where the third epoch began, the counts are twice the corpus."""
    texts = documents(30, seed=5)
    write_shards(tmp_path / "web", texts, "jsonl", 3)
    min_chars, min_tokens = 150, 90
    data = open_data(
        config(tmp_path, source("web"), min_chars=min_chars, min_tokens=min_tokens),
        tokenizer(),
        row_length=9,
        global_batch_size=1,
    )
    position = data.get_state()
    while data.counters(position)["web"]["least_epochs"] < 2:
        _, position = next(data)
    counters = data.counters(position)["web"]
    tokens = {text: len(tokenizer().encode(text)) + 2 for text in texts}
    short = [text for text in texts if len(text) < min_chars]
    few = [text for text in texts if text not in short and tokens[text] < min_tokens]
    kept = [text for text in texts if text not in short + few]
    assert min(len(short), len(few), len(kept)) > 0
    # Documents dropped at the beginning of the third epoch have been read already.
    ahead = counters["records"] - 60
    assert 0 <= ahead < 30
    assert counters["kept_documents"] == 2 * len(kept)
    assert counters["kept_tokens"] == 2 * sum(tokens[text] for text in kept)
    dropped = counters["char_filter_documents"] + counters["token_filter_documents"]
    assert dropped == 2 * (len(short) + len(few)) + ahead
    if ahead == 0:
        assert counters["chars"] == 2 * sum(map(len, texts))
        assert counters["bytes"] == 2 * sum(len(text.encode()) for text in texts)
        assert counters["char_filter_chars"] == 2 * sum(map(len, short))
        assert counters["token_filter_tokens"] == 2 * sum(tokens[text] for text in few)
    assert counters["rows"] == position.step


def test_filters_count_characters_raw_and_tokens_with_both_marks(tmp_path):
    text = "the people of the nation"
    tokens = len(tokenizer().encode(text)) + 2
    write_shards(tmp_path / "web", [text], "jsonl", 1)
    exact = config(tmp_path, source("web"), min_chars=len(text), min_tokens=tokens)
    data = open_data(exact, tokenizer(), row_length=5, global_batch_size=1)
    assert next(data)[0].tolist() == [[1, *tokenizer().encode(text)[:4]]]
    for change in ({"min_chars": len(text) + 1}, {"min_tokens": tokens + 1}):
        over = config(tmp_path, source("web"), **change)
        with pytest.raises(UserError, match="no training text"):
            next(open_data(over, tokenizer(), row_length=5, global_batch_size=1))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 1}, r"data\.seed was 0 and is 1"),
        ({"min_tokens": 41}, r"data\.min_tokens was 40 and is 41"),
        ({"lanes": 1}, r"data\.lanes was 2 and is 1"),
        ({"row_length": 17}, r"model\.context_length was 128 and is 16"),
        ({"batch": 8}, r"training\.global_batch_size was 4 and is 8"),
    ],
)
def test_a_position_of_other_data_is_refused_by_the_field_that_differs(tmp_path, changes, field):
    write_mixture(tmp_path, "jsonl")
    _, position = next(open_mixture(tmp_path))
    with pytest.raises(UserError, match=field):
        open_mixture(tmp_path, **changes).set_state(through_json(position))


def test_a_position_is_refused_when_a_file_was_added_and_accepted_when_the_folder_moved(tmp_path):
    write_mixture(tmp_path / "a", "jsonl")
    data = open_mixture(tmp_path / "a")
    _, position = next(data)
    expected, _ = next(data)
    (tmp_path / "a").rename(tmp_path / "b")
    moved = open_mixture(tmp_path / "b")
    moved.set_state(through_json(position))
    assert (next(moved)[0] == expected).all()
    write(tmp_path / "b" / "web" / "more.jsonl", documents(1))
    with pytest.raises(UserError, match="data files was"):
        open_mixture(tmp_path / "b").set_state(position)


def test_a_position_of_an_unknown_version_is_refused(tmp_path):
    write_mixture(tmp_path, "jsonl")
    plain = open_mixture(tmp_path).get_state().to_json()
    with pytest.raises(UserError, match="version 99"):
        Position.from_json(plain | {"version": 99})


def test_documents_edited_behind_a_checkpoint_are_noticed(tmp_path):
    write_shards(tmp_path / "web", ["x" * 400, "y" * 400], "jsonl", 1)
    args = {"row_length": 33, "global_batch_size": 1}
    settings = config(tmp_path, source("web"), min_tokens=100)
    data = open_data(settings, tokenizer(), **args)
    _, position = next(data)
    path = tmp_path / "web" / "00.jsonl"
    path.write_bytes(
        path.read_bytes().replace(b"x" * 400, b"the people" * 40).replace(b"y", b"\xff")
    )
    data = open_data(settings, tokenizer(), **args)
    data.set_state(position)
    with pytest.raises(UserError, match="have changed since the checkpoint"):
        next(data)

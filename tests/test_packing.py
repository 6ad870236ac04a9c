"""Rows are cut so that every token is predicted exactly once, wherever documents end."""

from collections import Counter

import numpy as np
import pytest
from corpora import config, documents, source, tokenizer, write_shards
from hypothesis import given, settings
from hypothesis import strategies as st

from openelm_jax.data import pipeline
from openelm_jax.data.packing import Packer, RowQueue
from openelm_jax.data.validation import cut_document

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@settings(max_examples=300, deadline=None)
@given(lengths=lengths, row_length=st.integers(2, 17), part=st.integers(1, 50))
def test_rows_are_windows_of_the_stream_one_token_overlapping(lengths, row_length, part):
    stream = np.arange(sum(lengths))
    packer, rows, start = Packer(row_length), [], 0
    for index, length in enumerate(lengths):
        packer.begin(index)
        for at in range(start, start + length, part):
            packer.extend(stream[at : min(at + part, start + length)])
            while packer.is_ready():
                rows.append(packer.take_row())
        start += length
    count = (len(stream) - 1) // (row_length - 1)
    assert len(rows) == count
    for n, row in enumerate(rows):
        first = n * (row_length - 1)
        assert row.tolist() == list(range(first, first + row_length))


@settings(max_examples=300, deadline=None)
@given(
    lengths=lengths,
    row_length=st.integers(2, 17),
    part=st.integers(1, 50),
    again_part=st.integers(1, 50),
    data=st.data(),
)
def test_packing_goes_on_from_the_document_that_holds_the_next_token(
    lengths, row_length, part, again_part, data
):
    starts = np.cumsum([0, *lengths])
    stream = np.arange(starts[-1])
    count = (len(stream) - 1) // (row_length - 1)
    stop = data.draw(st.integers(0, count))

    def parts(first, size):
        """Yield (document, its tokens) from document `first` on, in parts of `size`."""
        for index in range(first, len(lengths)):
            for at in range(starts[index], starts[index + 1], size):
                yield index, stream[at : min(at + size, starts[index + 1])]

    def extend(packer, part, document):
        if part[0] != document:
            packer.begin(part[0])
        packer.extend(part[1])
        return part[0]

    packer, coming, document = Packer(row_length), parts(0, part), None
    for _ in range(stop):
        while not packer.is_ready():
            document = extend(packer, next(coming), document)
        packer.take_row()
    origin, skip = packer.first() or (0, 0)
    assert starts[origin] + skip == stop * (row_length - 1)

    again, document = Packer(row_length, skip), None
    for tokens in parts(origin, again_part):
        document = extend(again, tokens, document)
    for n in range(stop, count):
        assert again.take_row()[0] == n * (row_length - 1)
    assert not again.is_ready()


@settings(max_examples=300, deadline=None)
@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=12), data=st.data())
def test_rows_of_pieces_go_on_from_the_document_that_the_next_row_is_of(counts, data):
    """Documents of 0 to 4 rows; a position may fall between rows, documents, or on an open one."""
    rows = [(document, row) for document, count in enumerate(counts) for row in range(count)]
    stop = data.draw(st.integers(0, len(rows)))
    eager = data.draw(st.booleans())  # whether a document is ended before its last row is taken

    def read(queue, document):
        queue.begin(document)
        for row in range(counts[document]):
            queue.extend(np.array([document, row]))

    queue, taken, document = RowQueue(), [], 0
    while len(taken) < stop:
        if queue.is_ready():
            taken.append(tuple(queue.take_row().tolist()))
        else:
            read(queue, document)
            document += 1
            if eager:
                queue.end()
    assert taken == rows[:stop]
    origin, skip = queue.first() or (document, 0)

    again = RowQueue(skip)
    for document in range(origin, len(counts)):
        read(again, document)
        again.end()
        assert not again.is_behind
    left = []
    while again.is_ready():
        left.append(tuple(again.take_row().tolist()))
    assert left == rows[stop:]


@settings(max_examples=300, deadline=None)
@given(length=st.integers(2, 100), row_length=st.integers(2, 17))
def test_a_validation_document_is_predicted_once_but_for_its_first_token(length, row_length):
    tokens = np.arange(1, length + 1, dtype=np.int32)
    rows_NL, mask_NT = cut_document(tokens, row_length)
    assert rows_NL[:, 1:][mask_NT].tolist() == tokens[1:].tolist()
    assert rows_NL[:, :-1][mask_NT].tolist() == tokens[:-1].tolist()
    assert (rows_NL[:, 1:][~mask_NT] == 0).all()
    assert mask_NT.any(axis=1).all()  # no row is only padding


@pytest.mark.parametrize("block_bytes", [1, 2000])
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
@pytest.mark.parametrize(("shards", "lanes"), [(1, 1), (3, 1), (2, 2), (1, 4), (5, 2), (3, 4)])
def test_an_epoch_holds_each_document_once_whole_and_the_next_in_another_order(
    tmp_path, monkeypatch, ending, shards, lanes, block_bytes
):
    monkeypatch.setattr(pipeline, "MOST_BLOCK_BYTES", block_bytes)
    texts = documents(40, seed=3)
    write_shards(tmp_path / "web", texts, ending, shards)
    tok = tokenizer()
    data = pipeline.open_data(
        config(tmp_path, source("web"), lanes=lanes), tok, row_length=33, global_batch_size=lanes
    )
    streams: list[list[int]] = [[] for _ in range(lanes)]
    position = data.get_state()
    while (position.table_NSC[:, 0, 0] < 3).any():  # the third epoch has begun in every lane
        rows_BL, position = next(data)
        for stream, row in zip(streams, rows_BL.tolist(), strict=True):
            stream += row if not stream else row[1:]
            assert len(stream) == 1 or stream[-len(row) :] == row
    first, second, reordered = Counter(), Counter(), False
    for stream in streams:
        ends = [place for place, token in enumerate(stream) if token == tok.eos_id]
        starts = [0, *(end + 1 for end in ends)]
        read = [stream[a : b + 1] for a, b in zip(starts, ends, strict=False)]
        assert all(tokens[0] == tok.bos_id for tokens in read)
        names = [tok.decode(tokens) for tokens in read]
        own = len(set(names))
        first += Counter(names[:own])
        second += Counter(names[own : 2 * own])
        reordered |= names[:own] != names[own : 2 * own]
    assert first == second == Counter(texts)
    # A lane with one shard and one record a block has nothing to shuffle.
    assert reordered or (block_bytes == 1 and shards <= lanes)

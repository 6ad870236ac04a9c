"""Batches come in order with their own positions, whatever the depth, and errors in their place."""

import threading
import time

import numpy as np
import pytest

from openelm_jax.errors import UserError
from openelm_jax.training.feed import feed, to_batch

DEPTHS = [0, 1, 4]


def rows(count):
    """Yield `count` batches of two rows, each with the number of batches so far as position."""
    for index in range(count):
        yield np.full((2, 5), index, np.int32), index + 1


def feed_threads():
    return [thread for thread in threading.enumerate() if thread.name == "feed"]


def wait_until(true):
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("depth", DEPTHS)
def test_batches_and_positions_are_the_source_s(depth):
    with feed(rows(9), depth) as batches:
        fed = [(np.asarray(batch.tokens_BL), position) for batch, position in batches]

    assert [position for _, position in fed] == list(range(1, 10))
    for index, (tokens_BL, _) in enumerate(fed):
        np.testing.assert_array_equal(tokens_BL, np.full((2, 5), index))


def test_every_target_counts_unless_told_otherwise():
    rows_BL = np.arange(10, dtype=np.int32).reshape(2, 5)
    some_BT = np.eye(2, 4, dtype=bool)

    assert to_batch(rows_BL).counted_BT.tolist() == [[True] * 4] * 2
    assert to_batch(rows_BL, some_BT).counted_BT.tolist() == some_BT.tolist()


def test_padding_and_where_documents_are_kept_apart_their_first_token_are_no_targets():
    pad, bos = 9, 1
    rows_BL = np.array([[1, 5, 2, 1, 6], [1, 7, 2, 9, 9]], np.int32)

    def counted(**left_out):
        with feed([(rows_BL, 1)], 0, **left_out) as batches:
            return np.asarray(next(batches)[0].counted_BT).astype(int).tolist()

    assert counted() == [[1, 1, 1, 1], [1, 1, 1, 1]]
    assert counted(pad_id=pad) == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert counted(bos_id=bos) == [[1, 1, 0, 1], [1, 1, 1, 1]]
    assert counted(pad_id=pad, bos_id=bos) == [[1, 1, 0, 1], [1, 1, 0, 0]]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("error", [UserError("a bad shard"), ValueError("our mistake")])
def test_an_error_comes_where_its_batch_would_have(depth, error):
    def failing():
        yield from rows(3)
        raise error

    with feed(failing(), depth) as batches:
        assert [next(batches)[1] for _ in range(3)] == [1, 2, 3]
        with pytest.raises(type(error), match=str(error)):
            next(batches)


@pytest.mark.parametrize("depth", [1, 4])
def test_at_most_depth_batches_wait_and_one_is_in_hand(depth):
    made = []

    def counted():
        for fed in rows(50):
            made.append(fed[1])
            yield fed

    with feed(counted(), depth) as batches:
        next(batches)
        wait_until(lambda: len(made) == depth + 2)  # one taken, `depth` waiting, one in hand
        time.sleep(0.05)
        assert len(made) == depth + 2


def test_depth_zero_makes_a_batch_only_when_asked():
    made = []

    def counted():
        for fed in rows(50):
            made.append(fed[1])
            yield fed

    with feed(counted(), 0) as batches:
        assert made == []
        next(batches)
        assert made == [1]
    assert feed_threads() == []


@pytest.mark.parametrize("taken", [0, 3])
def test_leaving_stops_a_thread_that_waits_before_a_full_queue(taken):
    with feed(rows(10**9), 1) as batches:
        for _ in range(taken):
            next(batches)
        wait_until(lambda: len(feed_threads()) == 1)
        time.sleep(0.05)  # the queue is full by now

    assert feed_threads() == []


def test_an_error_of_the_one_who_takes_passes_through_and_stops_the_thread():
    def take():
        with feed(rows(10**9), 2) as batches:
            next(batches)
            raise KeyError

    with pytest.raises(KeyError):
        take()

    assert feed_threads() == []

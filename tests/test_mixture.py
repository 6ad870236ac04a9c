"""The mixture keeps its weights in every batch, and lanes share the data out completely."""

import copy
from collections import Counter

import numpy as np
import pytest
from corpora import config, documents, source, tokenizer, write_shards

from openelm_jax.data import order
from openelm_jax.data.lanes import LaneGroup
from openelm_jax.data.pipeline import choose_lanes, open_data

# Tokens of the paper's Table 2, in billions.
TABLE_2 = (665, 207, 59, 28, 411, 2, 89, 55, 140, 60, 30, 25, 4)


@pytest.mark.parametrize("weights", [(1.0,), (0.7, 0.3), (1, 1, 1), (0.999, 0.001), TABLE_2])
@pytest.mark.parametrize("batch_size", [1, 8, 48, 2048])
def test_every_batch_is_within_one_row_of_the_weights(weights, batch_size):
    shares = np.array(weights) / sum(weights)
    total = np.zeros(len(weights))
    for step in range(200):
        drawn = order.draw_sources(7, step, np.array(weights), batch_size)
        counts = np.bincount(drawn, minlength=len(weights))
        assert counts.sum() == batch_size
        assert (np.abs(counts - shares * batch_size) < 1 + 1e-9).all()
        total += counts
    assert np.abs(total / total.sum() - shares).max() < 4 / np.sqrt(200) / batch_size


def test_every_row_of_the_batch_sees_every_source():
    drawn = np.array([order.draw_sources(0, step, np.array([1, 1]), 8) for step in range(400)])
    assert (np.abs(drawn.mean(axis=0) - 0.5) < 0.125).all()  # five standard deviations


def test_batches_follow_the_draw(tmp_path):
    for name in ("web", "code"):
        write_shards(tmp_path / name, [f"{name} " * 60] * 20, "jsonl", 4)
    data = open_data(
        config(tmp_path, source("web", weight=3), source("code"), lanes=2),
        tokenizer(),
        row_length=17,
        global_batch_size=8,
    )
    for step in range(10):
        rows, position = next(data)
        texts = [tokenizer().decode(row) for row in rows]
        assert ["code" in text for text in texts] == ["web" not in text for text in texts]
        drawn = order.draw_sources(0, step, np.array([3.0, 1.0]), 8)
        assert ["code" in text for text in texts] == (drawn == 1).tolist()
        assert sum("code" in text for text in texts) == 2
    counters = data.counters(position)
    assert [counters[name]["rows"] for name in ("web", "code")] == [60, 20]


@pytest.mark.parametrize("lanes", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("shards", [1, 2, 3, 7, 8, 100])
def test_lanes_share_every_record_out_exactly_once(lanes, shards):
    records = Counter()
    for lane in range(lanes):
        places, stride, offset = order.shards_of_lane(lane, lanes, shards)
        assert len(places) >= 1
        records.update(
            (place, number) for place in places for number in range(90) if number % stride == offset
        )
    assert records == Counter((place, number) for place in range(shards) for number in range(90))


def test_an_order_is_a_permutation_that_depends_on_all_of_its_key():
    keys = [(0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3), (2, 1, 0)]
    orders = [order.permutation(key, 50).tolist() for key in keys]
    assert all(sorted(permuted) == list(range(50)) for permuted in orders)
    assert len({tuple(permuted) for permuted in orders}) == len(keys)


def test_an_order_never_changes():
    """Runs are continued for months, on other machines: these numbers may not move."""
    words = np.random.PCG64(np.random.SeedSequence([0, 1, 2])).random_raw(5).tolist()
    assert sorted(range(5), key=words.__getitem__) == [3, 4, 1, 2, 0]
    assert order.permutation((0, 1, 2), 5).tolist() == [3, 4, 1, 2, 0]


@pytest.mark.parametrize(
    ("num_bytes", "batch_size", "lanes"),
    [
        *((0, 8, 1), (3_999_999, 8, 1), (4_000_000, 8, 2), (11_000_000, 8, 4)),
        *((10**12, 2048, 256), (10**12, 96, 96), (10**12, 257, 1), (14_000_000, 6, 6)),
    ],
)
def test_lanes_are_chosen_as_the_largest_divisor_with_two_megabytes_each(
    num_bytes, batch_size, lanes
):
    assert choose_lanes(num_bytes, batch_size) == lanes


def test_lanes_can_be_dealt_to_any_number_of_workers(tmp_path):
    """What Grain does in worker w of W: a copy of the data set, sliced in place by w::W."""
    write_shards(tmp_path / "web", documents(60), "jsonl", 5)
    data = open_data(
        config(tmp_path, source("web"), lanes=4), tokenizer(), row_length=17, global_batch_size=8
    )
    group = LaneGroup(data._plan, range(4), 0, data._plan.first_states_NSC())
    whole = iter(copy.copy(group))
    parts = []
    for worker in range(3):
        part = copy.copy(group)
        part.set_slice(slice(worker, None, 3))
        parts.append(iter(part))
    for _ in range(12):
        expected = next(whole)
        elements = [next(part) for part in parts]
        lanes = np.concatenate([element["lanes"] for element in elements])
        assert sorted(lanes) == [0, 1, 2, 3]
        for name in ("rows", "states"):
            joined = np.concatenate([element[name] for element in elements])
            assert (joined == expected[name][lanes]).all()

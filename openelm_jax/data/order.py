"""Every order of the data, as a pure function of integers: shards, records, mixture.

Only the raw words of PCG64 and SeedSequence are used: NumPy promises that these never change,
and does not promise it of `Generator.permutation`, so a run can be continued on a newer NumPy.
B is the global batch.
"""

from __future__ import annotations

import numpy as np

# What a permutation is for: the second number of its key.
SHARDS, EPOCH, RECORDS, MIXTURE = 1, 2, 3, 4


def permutation(key: tuple[int, ...], count: int) -> np.ndarray:
    """Return the permutation of range(count) that belongs to `key`."""
    return np.argsort(_words(key, count), kind="stable")


def draw_sources(seed: int, step: int, weights: np.ndarray, batch_size: int) -> np.ndarray:
    """Return the source of each row of batch `step`, int64 [B].

    One point in each of B equal parts of [0, 1), at a common offset and in random order, picks
    by cumulative weight: every batch holds each source's share to within one row.
    """
    words = _words((seed, MIXTURE, step), batch_size + 1)
    offset = float(words[-1] >> np.uint64(11)) / 2**53
    points_B = (np.argsort(words[:-1], kind="stable") + offset) / batch_size
    edges = np.cumsum(weights) / np.sum(weights)
    return np.searchsorted(edges[:-1], points_B, side="right")


def shards_of_lane(lane: int, lanes: int, num_shards: int) -> tuple[range, int, int]:
    """Return (places, sharers, number): a lane's places in the permuted list of shards, by how
    many lanes each of them is shared, and which of their parts is this lane's.

    With fewer shards than lanes, the lanes of one shard share its records out.
    """
    if num_shards >= lanes:
        return range(lane, num_shards, lanes), 1, 0
    place = lane % num_shards
    return range(place, place + 1), lanes_of_place(place, lanes, num_shards), lane // num_shards


def lanes_of_place(place: int, lanes: int, num_shards: int) -> int:
    """Return how many lanes share the shard at `place` of the permuted list."""
    return max(1, len(range(place, lanes, num_shards)))


def _words(key: tuple[int, ...], count: int) -> np.ndarray:
    return np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)

"""Batches of records that are at hand: every epoch in another order, each record once in each.

What has been read is one integer, the number of batches: batch i is a function of i alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grain

Record = TypeVar("Record")


def epochs(records: Sequence[Any], seed: int) -> grain.MapDataset:
    """Return the records endlessly: record i is of epoch i // len(records), shuffled as a whole.

    Equal seeds give equal orders. `records` may be anything with a length and an index, so that a
    record can be made when it is asked for.
    """
    assert len(records), "there is no record"
    return grain.MapDataset.source(records).seed(seed).shuffle().repeat()


def batches(
    records: Sequence[Record],
    seed: int,
    batch_size: int,
    collate: Callable[[Sequence[Record]], Any],
) -> grain.MapDataset:
    """Return batches of `batch_size` records of `epochs`, each made by `collate`; [i] is batch i.

    A batch may hold the end of one epoch and the beginning of the next.
    """
    return epochs(records, seed).batch(batch_size, batch_fn=collate)


def steps_of(num_records: int, batch_size: int, num_epochs: float) -> int:
    """Return how many batches `num_epochs` epochs are, the last one perhaps in part."""
    return -int(-num_records * num_epochs // batch_size)

"""Batches on the device, made ahead of the step, each with the data position behind it.

A checkpoint needs the position after the batch whose step has finished, not after the batches
that already wait in the queue; so the position travels with its batch, whatever the depth.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from openelm_jax.training.step import Batch

Fed = tuple[Batch, Any]


def to_batch(rows_BL: np.ndarray | jax.Array, counted_BT: np.ndarray | None = None) -> Batch:
    """Return rows as a device batch; every target counts unless told otherwise."""
    if counted_BT is None:
        counted_BT = np.ones((rows_BL.shape[0], rows_BL.shape[1] - 1), bool)
    return Batch(*jax.device_put((rows_BL, counted_BT)))


@contextmanager
def feed(rows: Iterable[tuple[np.ndarray, Any]], depth: int) -> Iterator[Iterator[Fed]]:
    """Give an iterator over (batch, position after it), at most `depth` batches ahead.

    Depth 0 makes each batch when it is asked for; otherwise a thread does, and what it raises is
    raised where the batch would have come. On leaving, the thread has stopped.
    """
    batches = ((to_batch(rows_BL), position) for rows_BL, position in rows)
    if depth == 0:
        yield batches
        return
    waiting: queue.Queue[Fed | Exception | None] = queue.Queue(maxsize=depth)
    leaving = threading.Event()

    def put(item: Fed | Exception | None) -> None:
        while not leaving.is_set():
            try:
                waiting.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def produce() -> None:
        try:
            for fed in batches:
                put(fed)
                if leaving.is_set():
                    return
            put(None)
        except Exception as error:
            put(error)

    thread = threading.Thread(target=produce, name="feed", daemon=True)
    thread.start()
    try:
        yield _taken(waiting)
    finally:
        leaving.set()
        thread.join()


def _taken(waiting: queue.Queue[Fed | Exception | None]) -> Iterator[Fed]:
    while (item := waiting.get()) is not None:
        if isinstance(item, Exception):
            raise item
        yield item

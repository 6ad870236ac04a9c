"""What the data pipeline takes from Grain: the iterator protocol, and worker processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from multiprocessing import parent_process, util
from typing import Any

from absl import flags
from grain import DatasetIterator, IterDataset, MultiprocessingOptions

from openelm_jax.errors import UserError

__all__ = ["DatasetIterator", "IterDataset", "iterate"]

# Elements that wait in each worker, besides the one that it makes.
WAITING = 2


def iterate(dataset: IterDataset, workers: int, contents: str) -> DatasetIterator:
    """Return an iterator over `dataset`, made by so many worker processes or, with 0, by this one.

    Each worker makes a slice; their elements take turns. Raises UserError that names `contents`
    when a worker dies.
    """
    if workers == 0:
        return dataset.__iter__()
    if not flags.FLAGS.is_parsed():  # Grain reads its flags and fails where nobody has parsed any
        flags.FLAGS.mark_as_parsed()
    options = MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=WAITING)
    elements = dataset.mp_prefetch(options, worker_init_fn=_begin_worker).__iter__()
    return _Watched(elements, f"one of the {workers} data workers of {contents}")


class _Watched(DatasetIterator):
    """The elements of worker processes; a dead one is a readable mistake."""

    def __init__(self, elements: DatasetIterator, who: str) -> None:
        super().__init__()
        self._who = who
        self._elements = [elements]
        # Grain's iterators complain when the interpreter finds them open, or at all, at its end,
        # and multiprocessing waits for ever for processes that SIGTERM does not end. They must go
        # before the pool of threads (priority 15) that gives Grain's shared memory back.
        self._end = util.Finalize(self, _close, (self._elements,), exitpriority=100)

    def __next__(self) -> Any:
        try:
            return next(self._elements[0])
        except RuntimeError as error:
            if "terminated unexpectedly" not in str(error):
                raise
            raise UserError(
                f"data.workers: {self._who} died ({str(error).split('. ')[0]}), often for want of "
                "memory; the same command goes on from the last checkpoint, with fewer "
                "data.workers if it happens again."
            ) from error

    def close(self) -> None:
        self._end()
        super().close()

    def get_state(self) -> Any:
        raise NotImplementedError("positions travel in the elements")

    def set_state(self, state: Any) -> None:
        raise NotImplementedError("positions travel in the elements")


def _close(elements: list[DatasetIterator]) -> None:
    elements.pop().close()


def _begin_worker(index: int, count: int) -> None:
    """Keep a worker from the accelerator and from what is said to all processes of a job (a
    terminal's Ctrl-C, a scheduler's SIGTERM), and alive no longer than its parent."""
    del index, count
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # Grain has imported it, and nothing here uses it
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

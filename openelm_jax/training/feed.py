"""Batches on the device, made ahead of the step, each with the data position behind it.

A checkpoint needs the position after the batch whose step has finished, not after the batches
that already wait in the queue; so the position travels with its batch, whatever the depth. Of
several processes each makes its part of the batch and knows the position of its own lanes only.

Legend: B batch, L tokens of a row, T = L - 1 targets, N lanes, S sources, C columns.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from openelm_jax.data.position import Position, join_positions
from openelm_jax.errors import UserError
from openelm_jax.parallel.mesh import row_groups
from openelm_jax.parallel.sharding import row_sharding
from openelm_jax.training.step import Batch

Fed = tuple[Batch, Any]


def to_batch(
    rows_BL: np.ndarray | jax.Array,
    counted_BT: np.ndarray | None = None,
    mesh: Mesh | None = None,
) -> Batch:
    """Return rows as a batch on the devices of `mesh`, or else on the first; all targets count
    unless told otherwise.

    Of several processes each gives the rows of its own devices (`parallel.mesh.reader_of`).
    """
    if counted_BT is None:
        counted_BT = np.ones((rows_BL.shape[0], rows_BL.shape[1] - 1), bool)
    if mesh is None:
        return Batch(*jax.device_put((rows_BL, counted_BT)))
    if jax.process_count() == 1:
        return Batch(*jax.device_put((rows_BL, counted_BT), row_sharding(mesh)))
    return Batch(*(_from_own_rows(np.asarray(own), mesh) for own in (rows_BL, counted_BT)))


def _from_own_rows(own: np.ndarray, mesh: Mesh) -> jax.Array:
    """Return the global array whose shards on this process's devices hold the rows `own`."""
    sharding = row_sharding(mesh)
    shards = mesh.shape["replica"] * mesh.shape["fsdp"]
    mine = row_groups(mesh)[jax.process_index()]
    size = len(own) // len(mine)
    shape = (size * shards, *own.shape[1:])
    place = {number * size: index * size for index, number in enumerate(mine)}
    arrays = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        start = place[index[0].start or 0]
        arrays.append(jax.device_put(own[start : start + size], device))
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def counted_targets(
    rows_BL: np.ndarray, pad_id: int | None = None, bos_id: int | None = None
) -> np.ndarray:
    """Return bool [B, T], false where a row's next token is `pad_id` or `bos_id`."""
    counted_BT = np.ones((rows_BL.shape[0], rows_BL.shape[1] - 1), bool)
    for left_out in (pad_id, bos_id):
        if left_out is not None:
            counted_BT &= rows_BL[:, 1:] != left_out
    return counted_BT


def whole_position(position: Position) -> Position:
    """Return the position of all lanes, each process giving that of its own.

    All processes must call it at the same step; some may have the same lanes. Raises UserError when
    their data differ.
    """
    if jax.process_count() == 1:
        return position
    fingerprint = json.dumps(position.fingerprint, sort_keys=True).encode()
    digest = np.frombuffer(hashlib.sha256(fingerprint).digest(), np.uint8)
    lanes = np.array([position.lanes.start, position.lanes.stop], np.int32)
    # Without its 64-bit mode jax would cut the table's integers in half.
    table = np.ascontiguousarray(position.table_NSC).view(np.int32)
    digests, steps, lanes, tables = multihost_utils.process_allgather(
        (digest, np.int32(position.step), lanes, table)
    )
    for process, other in enumerate(digests):
        if not np.array_equal(other, digests[0]):
            raise UserError(
                f"data: process {process} has other data or settings than process 0; give all "
                "of them the same experiment, tokenizer and files."
            )
    by_lanes = {
        tuple(map(int, bounds)): Position(
            step=int(step),
            fingerprint=position.fingerprint,
            lanes=range(*map(int, bounds)),
            table_NSC=np.ascontiguousarray(table).view(np.int64),
        )
        for step, bounds, table in zip(steps, lanes, tables, strict=True)
    }
    return join_positions(list(by_lanes.values()))


@contextmanager
def feed(
    rows: Iterable[tuple[np.ndarray, Any]],
    depth: int,
    *,
    mesh: Mesh | None = None,
    pad_id: int | None = None,
    bos_id: int | None = None,
) -> Iterator[Iterator[Fed]]:
    """Give an iterator over (batch, position after it), at most `depth` batches ahead.

    Targets that are `pad_id` do not count, nor, where documents are kept apart, `bos_id`. Depth 0
    makes each batch when it is asked for; otherwise a thread does, and what it raises is raised
    where the batch would have come. On leaving, the thread has stopped.
    """
    batches = (
        (to_batch(rows_BL, counted_targets(rows_BL, pad_id, bos_id), mesh), position)
        for rows_BL, position in rows
    )
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

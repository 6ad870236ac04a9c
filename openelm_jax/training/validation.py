"""The loss on held-out text.

Legend: N rows, B rows of a batch, L tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from openelm_jax.data.validation import ValidationSet
from openelm_jax.model.decoder import Params
from openelm_jax.parallel.mesh import reader_of
from openelm_jax.training.feed import to_batch
from openelm_jax.training.step import Batch


class ValidationLoss(NamedTuple):
    """Nats a predicted token, `</s>` included; and the summed nats as bits a byte of the text."""

    nats_per_token: float
    bits_per_byte: float


def validate(
    validation_step: Callable[[Params, Batch], jax.Array],
    params: Params,
    held_out: ValidationSet,
    batch_size: int,
    should_stop: Callable[[], bool] = lambda: False,
    mesh: Mesh | None = None,
) -> ValidationLoss | None:
    """Return the loss of all held-out tokens, or None if told to stop before the last batch.

    The last batch is filled with rows that are not counted. Of several processes each puts its own
    rows of a batch on the devices of `mesh`.
    """
    reader, readers = (0, 1) if mesh is None else reader_of(mesh, jax.process_index())
    share = batch_size // readers
    own = slice(reader * share, (reader + 1) * share)
    sums = []
    for start in range(0, len(held_out.rows_NL), batch_size):
        if should_stop():
            return None
        rows_BL = held_out.rows_NL[start : start + batch_size]
        counted_BT = held_out.loss_mask_NT[start : start + batch_size]
        missing = ((0, batch_size - len(rows_BL)), (0, 0))
        batch = to_batch(np.pad(rows_BL, missing)[own], np.pad(counted_BT, missing)[own], mesh)
        sums.append(validation_step(params, batch))
    nats = math.fsum(float(batch_sum) for batch_sum in sums)
    return ValidationLoss(
        nats_per_token=nats / int(held_out.loss_mask_NT.sum()),
        bits_per_byte=nats / math.log(2) / held_out.num_bytes,
    )

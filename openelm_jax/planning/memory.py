"""What a device of a mesh holds: `model/memory.py`, for the layers and shards that are its own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from openelm_jax.config import Experiment, ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.model.memory import (
    Remat,
    StepBytes,
    choose_remat,
    kept_by_layer,
    loss_chunk_size,
    recomputed_by_layer,
    step_bytes,
)
from openelm_jax.model.scaling import LayerShape
from openelm_jax.parallel.sharding import Layout
from openelm_jax.planning.topologies import GIB

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
SHARE_FOR_BUDGET = 0.9
"""Of a device's memory, what `training.remat=budget` fills unless memory_gib says otherwise."""
ATTEMPTS = 8


class Recomputed(NamedTuple):
    """What a layer computes again: FLOPs a token, and the share of its activations in bytes.

    Every kernel's gradient of attention computes the scores again, whatever is kept.
    """

    flops: int
    of_forward: float


def device_bytes(experiment: Experiment, layout: Layout, remats: Sequence[Remat]) -> StepBytes:
    """Return what one device holds at the worst moment of a step, by parts."""
    training, model, mesh = experiment.training, experiment.model, layout.mesh
    tokens = tokens_of_part(experiment, layout)
    chunk = training.loss_chunk or loss_chunk_size(model, -(-tokens // mesh.tensor))
    return step_bytes(
        model,
        remats,
        tokens=tokens,
        dtype_bytes=DTYPE_BYTES[training.dtype],
        loss_chunk=min(chunk, tokens),
        shards=mesh.fsdp * mesh.context,
        accumulation=training.accumulation,
        first_moment_bytes=DTYPE_BYTES[experiment.optimizer.first_moment_dtype],
        shapes=layout.layers,
        context=mesh.context,
    )


def tokens_of_part(experiment: Experiment, layout: Layout) -> int:
    """Return the tokens that a device computes at a time."""
    training, mesh = experiment.training, layout.mesh
    rows = training.global_batch_size // (mesh.row_shards * training.accumulation)
    return rows * experiment.model.context_length // mesh.context


def stored_parameters(layout: Layout) -> int:
    """Return the parameters whose value and moments a device holds."""
    sizes = layout.mesh._asdict()
    return sum(
        math.prod(placement.shape) // math.prod(sizes[axis] for axis in placement.axes)
        for placement in layout.placements.values()
    )


def remats_of(experiment: Experiment, layout: Layout, memory: float) -> tuple[Remat, ...]:
    """Return what each layer keeps on devices of so many bytes.

    Raises UserError where `training.remat` is budget and no choice fits it.
    """
    training = experiment.training
    if training.remat != "budget":
        same: tuple[Remat, ...] = (training.remat,) * len(layout.layers)
        return same
    limit = training.memory_gib * GIB if training.memory_gib else SHARE_FOR_BUDGET * memory
    blocks: tuple[Remat, ...] = ("block",) * len(layout.layers)
    held = device_bytes(experiment, layout, blocks)
    budget = int(limit - (held.total - held.activations))
    for _ in range(ATTEMPTS):
        if budget <= 0:
            raise UserError(
                f"training.remat=budget: {limit / GIB:.2f} GiB of a device are less than the "
                f"{held.total / GIB:.2f} GiB that a step needs with every layer computed again: "
                "raise training.accumulation, training.memory_gib or the number of devices."
            )
        remats = choose_remat(
            experiment.model,
            tokens=tokens_of_part(experiment, layout),
            budget_bytes=budget,
            dtype_bytes=DTYPE_BYTES[training.dtype],
            shapes=layout.layers,
            context=layout.mesh.context,
        )
        # The worst moment may be another one than with `block`, with more besides activations.
        excess = device_bytes(experiment, layout, remats).total - limit
        if excess <= 0:
            break
        budget -= math.ceil(excess)
    return remats


def recomputed(
    config: ModelConfig, shapes: Sequence[LayerShape], remats: Sequence[Remat]
) -> list[Recomputed]:
    """Return what each layer's backward pass computes again."""
    layers = []
    for shape, remat in zip(shapes, remats, strict=True):
        flops = recomputed_by_layer(config, shape, remat)
        scores = shape.query_dim * (config.context_length + 1)
        kept, everything = (
            kept_by_layer(config, shape, each, dtype_bytes=2) for each in (remat, "none")
        )
        layers.append(Recomputed(flops + scores, 1 - kept / everything))
    return layers


def parts_of(held: StepBytes) -> dict[str, int]:
    """Return the parts by their names in reports, those of no bytes left out."""
    names = dataclasses.asdict(held)
    moment = names.pop("moment")
    return {
        name.replace("_", " ") + (f" (in the {moment})" if name == "activations" else ""): size
        for name, size in names.items()
        if size
    }

"""What of `parallel/memory.py` and `model/memory.py` an estimate shows, and what it adds up."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from openelm_jax.config import ModelConfig
from openelm_jax.model.memory import Remat, StepBytes, kept_by_layer, recomputed_by_layer
from openelm_jax.model.scaling import LayerShape
from openelm_jax.parallel.sharding import Layout


class Recomputed(NamedTuple):
    """What a layer computes again: FLOPs a token, and the share of its activations in bytes.

    Every kernel's gradient of attention computes the scores again, whatever is kept.
    """

    flops: int
    of_forward: float


def stored_parameters(layout: Layout) -> int:
    """Return the parameters whose value and moments a device holds."""
    sizes = layout.mesh._asdict()
    return sum(
        math.prod(placement.shape) // math.prod(sizes[axis] for axis in placement.axes)
        for placement in layout.placements.values()
    )


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

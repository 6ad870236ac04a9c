"""What a mesh makes of a model, in lines: where parameters lie, and what could not be divided."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from openelm_jax.config import ModelConfig
from openelm_jax.model.scaling import layer_shapes
from openelm_jax.parallel.sharding import ATTENTION, Layout, Placement

FLOAT32 = 4
MIB, GIB = 2**20, 2**30


def sharding_lines(
    config: ModelConfig, layout: Layout, state_bytes_per_parameter: int
) -> list[str]:
    """Return the mesh with the bytes of a device, each parameter's spec, and every fallback.

    `state_bytes_per_parameter` are those of a parameter and its moments. Parameters with the same
    spec share a line.
    """
    held = sum(held_elements(placement, layout) for placement in layout.placements.values())
    whole = sum(math.prod(placement.shape) for placement in layout.placements.values())
    lines = [
        f"mesh {layout.mesh}: a device holds {held:,} of {whole:,} parameters, "
        f"{held * state_bytes_per_parameter / GIB:.2f} GiB with their moments"
    ]
    by_spec: dict[str, dict[str, list[int]]] = {}
    for path, placement in layout.placements.items():
        number = re.match(r"layers_(\d+)/", path)
        name = path if number is None else path[number.end() :]
        layers = by_spec.setdefault(_spec(placement), {}).setdefault(name, [])
        if number is not None:
            layers.append(int(number[1]))
    for spec, names in by_spec.items():
        lines.append(f"{spec}: {', '.join(_of_layers(config, *item) for item in names.items())}")
    return lines + list(fallback_lines(config, layout))


def fallback_lines(config: ModelConfig, layout: Layout) -> Iterator[str]:
    """Yield what could not be divided, what was done instead, and what that costs in bytes."""
    mesh, tensor = layout.mesh, layout.mesh.tensor
    shapes = layer_shapes(config)
    for kind, what in ATTENTION.items():
        layers = [number for number, found in enumerate(layout.attention) if found == kind]
        if tensor == 1 or kind == "heads" or not layers:
            continue
        heads = "query heads" if kind == "whole" else "key/value heads"
        more = 0
        for number in layers:
            shape = shapes[number]
            dim = 2 * shape.query_dim + 2 * shape.kv_dim if kind == "whole" else 2 * shape.kv_dim
            more += dim * config.model_dim * (tensor - 1) // tensor * 2
        yield (
            f"fallback: mesh.tensor {tensor} does not divide the {heads} of layers "
            f"{ranges(layers)}: {what}; "
            f"{more / MIB:,.0f} MiB of bfloat16 weights more a device than if it did"
        )
    uneven = [number for number, shape in enumerate(shapes) if shape.ffn_dim % tensor]
    if uneven:
        yield (
            f"fallback: mesh.tensor {tensor} does not divide the FFN columns of layers "
            f"{ranges(uneven)}: the last device computes some zeros"
        )
    undivided: dict[tuple[str, ...], int] = {}
    for placement in layout.placements.values():
        missing = tuple(
            axis
            for axis in ("fsdp", "context", "tensor")
            if placement.dim is not None and getattr(mesh, axis) > 1 and axis not in placement.axes
        )
        if missing:
            there = held_elements(placement, layout)
            less = there // math.prod(getattr(mesh, axis) for axis in missing)
            undivided[missing] = undivided.get(missing, 0) + (there - less) * FLOAT32 * 3
    for missing, more in undivided.items():
        sizes = " x ".join(f"mesh.{axis} {getattr(mesh, axis)}" for axis in missing)
        yield (
            f"fallback: {sizes} does not divide model.model_dim {config.model_dim} any further: "
            f"those devices hold copies, {more / GIB:.2f} GiB of state more on each"
        )


def held_elements(placement: Placement, layout: Layout) -> int:
    """Return how many elements of a parameter a device holds."""
    return math.prod(placement.shape) // math.prod(
        getattr(layout.mesh, axis) for axis in placement.axes
    )


def ranges(numbers: Sequence[int]) -> str:
    """Return "0-3, 7" for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _of_layers(config: ModelConfig, name: str, layers: list[int]) -> str:
    some = layers and len(layers) < config.num_layers
    return f"{name} of layers {ranges(layers)}" if some else name


def _spec(placement: Placement) -> str:
    if placement.dim is None:
        return "copies on every device"
    size = placement.shape[placement.dim]
    if not placement.axes:
        return f"model_dim {size} not divided, copies on every device"
    return f"model_dim {size} over {', '.join(placement.axes)}"

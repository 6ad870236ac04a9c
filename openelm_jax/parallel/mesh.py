"""The mesh: axes replica, fsdp, tensor and context, and which devices stand where.

replica holds copies of the whole state; fsdp shares one copy and divides the rows; tensor divides
the heads and columns of a layer; context divides the tokens of a row. Between slices of TPUs and
nodes of GPUs the network is slower than inside, so the outer axes are laid across them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from openelm_jax.config import MeshConfig
from openelm_jax.errors import UserError


class MeshShape(NamedTuple):
    """The sizes of the axes, outermost first; the fields' names are the axes'."""

    replica: int = 1
    fsdp: int = 1
    tensor: int = 1
    context: int = 1

    @property
    def devices(self) -> int:
        return math.prod(self)

    @property
    def row_shards(self) -> int:
        """Parts into which the rows of a batch are divided."""
        return self.replica * self.fsdp

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self._asdict().items())


AXES = MeshShape._fields
ROW_AXES = ("replica", "fsdp")
"""The axes that divide the rows of a batch."""


def resolve_mesh(config: MeshConfig, devices: int, granules: int = 1) -> MeshShape:
    """Return the sizes of all axes on `devices` devices in `granules` slices or nodes.

    Raises UserError, with a shape that fits, unless they multiply out.
    """
    inner = config.tensor * config.context
    outer = devices // inner
    replica, fsdp = config.replica, config.fsdp
    if replica is None and fsdp is None:
        replica = granules if outer % granules == 0 else 1
    if replica is None:
        replica = max(outer // (fsdp or 1), 1)
    if fsdp is None:
        fsdp = max(outer // replica, 1)
    shape = MeshShape(replica, fsdp, config.tensor, config.context)
    if shape.devices != devices:
        raise UserError(
            f"mesh {shape} makes {shape.devices} devices, and there are {devices}: "
            f"{_proposal(config, devices, granules)} would fit."
        )
    return shape


def check_rows(shape: MeshShape, global_batch_size: int, accumulation: int) -> None:
    """Raise UserError unless the rows of each part of a batch can be shared out."""
    parts = shape.row_shards * accumulation
    if global_batch_size % parts:
        nearest = max(round(global_batch_size / parts), 1) * parts
        raise UserError(
            f"training.global_batch_size {global_batch_size} cannot be divided among mesh.replica "
            f"{shape.replica} x mesh.fsdp {shape.fsdp} devices in training.accumulation "
            f"{accumulation} parts: make it a multiple of {parts} ({nearest}, say)."
        )


def check_context(shape: MeshShape, context_length: int) -> None:
    """Raise UserError unless the tokens of a row can be shared out."""
    if context_length % shape.context:
        fitting = [d for d in range(1, shape.context) if context_length % d == 0]
        raise UserError(
            f"mesh.context {shape.context} does not divide model.context_length "
            f"{context_length}: use {fitting[-1]}, or a length that it divides."
        )


def check_adapters(shape: MeshShape) -> None:
    """Raise UserError where the columns of a layer are divided: adapters lie whole everywhere."""
    if shape.tensor > 1:
        raise UserError(
            f"mesh.tensor is {shape.tensor}: adapters are trained beside whole columns only; set "
            "mesh.tensor to 1, and let mesh.fsdp share the weights."
        )


def granules_of(devices: Sequence[Any]) -> int:
    """Return in how many slices (TPU) or nodes (GPU) the devices are."""
    return len(set(map(_granule, devices)))


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """Return the mesh of all `devices` (of those of all processes if left out).

    Devices may be those of a topology that is not here. Where there are several slices or nodes,
    replica goes across them as far as it can, then fsdp.
    """
    devices = jax.devices() if devices is None else devices
    axis_types = (jax.sharding.AxisType.Auto,) * len(AXES)
    return Mesh(arranged(shape, devices), AXES, axis_types=axis_types)


def rings_of(mesh: Mesh) -> tuple[int, ...]:
    """Return the lengths of the rings of TPUs that the fsdp axis is made of, outermost first.

    One where the devices have no places, or do not follow one another ring by ring.
    """
    line = mesh.devices[0, :, 0, 0]
    if line[0].platform != "tpu":
        return (len(line),)
    rings = rings_along([place_of(device) for device in line])
    return tuple(length for _, length in rings) if rings else (len(line),)


def rings_along(line: Sequence[tuple[int, ...]]) -> tuple[tuple[int, int], ...]:
    """Return (dimension, length) of the rings that places follow one by one, outermost first.

    Empty where they do not, or are one.
    """
    places = np.array(line)
    strides = {}
    for dim in range(places.shape[1]):
        moved = np.flatnonzero(places[:, dim] != places[0, dim])
        if len(moved):
            strides[int(moved[0])] = dim
    rings, inner = [], 1
    for stride, dim in sorted(strides.items()):
        length = len(np.unique(places[:, dim]))
        cycle = np.repeat(places[: stride * length : stride, dim], stride)
        if stride != inner or not np.array_equal(places[:, dim], np.resize(cycle, len(places))):
            return ()
        rings.append((dim, length))
        inner *= length
    return tuple(reversed(rings)) if inner == len(places) else ()


def row_groups(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Return for each process the numbers of the row shards that its devices hold.

    Processes of the same numbers, whose devices divide columns or tokens among each other, read the
    same rows.
    """
    held: dict[int, set[int]] = {}
    shards = mesh.devices.reshape(mesh.shape["replica"] * mesh.shape["fsdp"], -1)
    for number, devices in enumerate(shards):
        for device in devices:
            held.setdefault(device.process_index, set()).add(number)
    return tuple(tuple(sorted(held[process])) for process in sorted(held))


def reader_of(mesh: Mesh, process: int) -> tuple[int, int]:
    """Return which of how many readers of rows a process is.

    Raises UserError where the devices of processes overlap in part, or have unequal shares.
    """
    groups = row_groups(mesh)
    distinct = sorted(set(groups))
    shards = mesh.shape["replica"] * mesh.shape["fsdp"]
    if sum(map(len, distinct)) != shards or len(set(map(len, distinct))) > 1:
        raise UserError(
            f"mesh {MeshShape(**mesh.shape)}: mesh.tensor x mesh.context neither divides the "
            "devices of each process nor is a multiple of them, or processes have unequal numbers "
            "of devices: use sizes that do, and as many devices in each."
        )
    return distinct.index(groups[process]), len(distinct)


def arranged(shape: MeshShape, devices: Sequence[Any]) -> np.ndarray:
    """Return the devices as an array of the mesh's axes."""
    devices = list(devices)
    platform = devices[0].platform
    granules = granules_of(devices)
    if platform == "cpu":
        # Not in the order of jax.devices(), which may go back and forth between the processes.
        devices.sort(key=lambda device: (device.process_index, device.id))
        return np.array(devices).reshape(shape)
    if platform == "tpu" and shape.fsdp % (len(devices) // granules) == 0:
        # Whole slices, ring by ring; jax would lay one long ring through some, and XLA use no ring
        # of theirs.
        devices.sort(key=place_of)
        return np.array(devices).reshape(shape)
    if granules == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    across, left = [], granules
    for size in shape:
        across.append(math.gcd(size, left))
        left //= across[-1]
    if left > 1:
        raise UserError(
            f"mesh {shape} cannot be laid across {granules} slices or nodes: make mesh.replica a "
            f"multiple of {granules}."
        )
    inside = [size // outer for size, outer in zip(shape, across, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(
        inside,
        across,
        devices,
        process_is_granule=len({getattr(d, "slice_index", 0) for d in devices}) != granules,
        allow_split_physical_axes=True,
    )


def place_of(device: Any) -> tuple[int, ...]:
    """Return where a TPU stands: its slice, the chip's coordinates, its core of the chip."""
    return (_granule(device), *device.coords, getattr(device, "core_on_chip", 0))


def _granule(device: Any) -> int:
    if device.platform == "cpu":
        return 0
    if device.platform != "tpu" and "CompileOnly" in type(device.client).__name__:
        return device.process_index  # a GPU that is not here knows no more
    return getattr(device, "slice_index", None) or 0


def _proposal(config: MeshConfig, devices: int, granules: int) -> MeshShape:
    tensor = _nearest_divisor(config.tensor, devices)
    context = _nearest_divisor(config.context, devices // tensor)
    outer = devices // (tensor * context)
    replica = _nearest_divisor(config.replica or granules, outer)
    return MeshShape(replica, outer // replica, tensor, context)


def _nearest_divisor(wanted: int, number: int) -> int:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda divisor: (abs(divisor - wanted), divisor))

"""Which machines a run could have: what their devices compute, hold and move in a second.

A device is what JAX calls one: a TPU chip, one of the two cores of a TPU7x chip, or a GPU.
Devices that share a fast network form a granule: a slice of TPUs, or a node of GPUs.

Where the devices of a mesh's axis stand in a slice is what `parallel/mesh.py` says of stand-ins.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from types import SimpleNamespace
from typing import Literal, NamedTuple

from openelm_jax.errors import UserError
from openelm_jax.parallel.devices import memory_bytes, peak_flops
from openelm_jax.parallel.mesh import MeshShape, arranged, place_of, rings_along

GIB = 2**30
FLAT_SLICES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SOLID_SLICES = (
    "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16",
    "16x16x16",
)  # fmt: skip
NODES = ("1", "2", "4", "8")


def _nine_tenths(device_kind: str) -> float:
    """Return what of a GPU's memory is left for a program: what JAX takes for itself at start."""
    return 0.9 * (memory_bytes(device_kind) or 0)


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """What one device of a kind has at best.

    `memory` is what a program may use, in bytes, `advertised_gib` what the maker says there is.
    Rates are bytes a second in one direction: `link` of one link to a neighbour in the torus (TPU)
    or of all links into the node's switch (GPU), `core_link` between the devices of a chip,
    `network` between granules.
    """

    name: str
    platform: Literal["tpu", "gpu"]
    device_kind: str
    advertised_gib: int
    memory: float
    memory_rate: float
    link: float
    network: float
    slices: tuple[str, ...]
    devices_per_chip: int = 1
    core_link: float = 0.0

    def peak_flops(self, dtype: str = "bfloat16") -> float:
        """Return the dense FLOP/s of products in `dtype`."""
        peak = peak_flops(self.device_kind, dtype)
        assert peak is not None
        return peak


# TPU rates are those of Google's pages docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x} (read
# 2026-11): HBM; a link is the bidirectional interconnect bandwidth of a chip / 2 / its links (six
# in a 3D torus, four in a 2D one), v4's from arXiv 2304.01433; the network is the DCN bandwidth of
# a chip, v5e's that of a pod / 256 and v4's that of the "How to scale your model" book (as v5p's).
# TPU7x: the two devices of a chip share its links; between them is what its page calls D2D, six
# times as fast as a link of a chip (100 GB/s).
# What a program may use of a TPU is the limit that its compiler states.
# GPU rates are those of NVIDIA's data sheets: NVLink, and one network card a GPU as in DGX systems
# (A100: 200 Gb/s, later: 400 Gb/s); memory is what nvidia-smi lists less a tenth, the default that
# xla_flags leaves to the driver and NCCL.
ACCELERATORS = {
    accelerator.name: accelerator
    for accelerator in (
        Accelerator(
            name="v4", platform="tpu", device_kind="TPU v4", advertised_gib=32,
            memory=30.75 * GIB, memory_rate=1200e9, link=50e9, network=6.25e9,
            slices=SOLID_SLICES,
        ),
        Accelerator(
            name="v5e", platform="tpu", device_kind="TPU v5 lite", advertised_gib=16,
            memory=15.75 * GIB, memory_rate=819e9, link=50e9, network=3.125e9,
            slices=FLAT_SLICES,
        ),
        Accelerator(
            name="v5p", platform="tpu", device_kind="TPU v5", advertised_gib=95,
            memory=95.74 * GIB, memory_rate=2765e9, link=100e9, network=6.25e9,
            slices=SOLID_SLICES,
        ),
        Accelerator(
            name="v6e", platform="tpu", device_kind="TPU v6 lite", advertised_gib=32,
            memory=31.25 * GIB, memory_rate=1638e9, link=100e9, network=12.5e9,
            slices=FLAT_SLICES,
        ),
        Accelerator(
            name="tpu7x", platform="tpu", device_kind="TPU7x", advertised_gib=96,
            memory=94.75 * GIB, memory_rate=3690e9, link=50e9, network=6.25e9,
            slices=SOLID_SLICES, devices_per_chip=2, core_link=600e9,
        ),
        Accelerator(
            name="a100", platform="gpu", device_kind="NVIDIA A100", advertised_gib=80,
            memory=_nine_tenths("NVIDIA A100"), memory_rate=2039e9, link=300e9, network=25e9,
            slices=NODES,
        ),
        Accelerator(
            name="h100", platform="gpu", device_kind="NVIDIA H100", advertised_gib=80,
            memory=_nine_tenths("NVIDIA H100"), memory_rate=3350e9, link=450e9, network=50e9,
            slices=NODES,
        ),
        Accelerator(
            name="h200", platform="gpu", device_kind="NVIDIA H200", advertised_gib=141,
            memory=_nine_tenths("NVIDIA H200"), memory_rate=4800e9, link=450e9, network=50e9,
            slices=NODES,
        ),
        Accelerator(
            name="b200", platform="gpu", device_kind="NVIDIA B200", advertised_gib=180,
            memory=_nine_tenths("NVIDIA B200"), memory_rate=8000e9, link=900e9, network=50e9,
            slices=NODES,
        ),
    )
}  # fmt: skip


class Direction(NamedTuple):
    """Devices in a row: how many, a link's bytes a second, and whether the last has the first."""

    extent: int
    link: float
    closed: bool


class Ring(NamedTuple):
    """Devices in a row, and the bytes that one of them receives along it in a second."""

    extent: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Devices and how they are joined: `bounds` of a slice in chips, or (GPUs of a node,)."""

    accelerator: Accelerator
    bounds: tuple[int, ...]
    granules: int

    @property
    def granule_devices(self) -> int:
        return math.prod(self.bounds) * self.accelerator.devices_per_chip

    @property
    def devices(self) -> int:
        return self.granule_devices * self.granules

    @property
    def slice_name(self) -> str:
        """The name of one granule, as XLA spells that of a slice."""
        return f"{self.accelerator.name}:{'x'.join(map(str, self.bounds))}"

    @property
    def name(self) -> str:
        spelled, slices = self.spelling
        return spelled if slices == 1 else f"{slices} of {spelled}"

    @property
    def spelling(self) -> tuple[str, int]:
        """What `parse_topology` makes this of."""
        if self.accelerator.platform == "tpu":
            return self.slice_name, self.granules
        return self.slice_name + (f"x{self.granules}" if self.granules > 1 else ""), 1

    @cached_property
    def directions(self) -> tuple[Direction, ...]:
        """Those of the torus, and that from one device of a chip to the other.

        A direction is closed where Google's pages say so: in slices of whole 4x4x4 cubes, and in a
        flat slice's direction of 16.
        """
        accelerator = self.accelerator
        solid = len(self.bounds) == 3
        cubes = solid and all(extent % 4 == 0 for extent in self.bounds)
        torus = [
            Direction(extent, accelerator.link, cubes or (not solid and extent == 16))
            for extent in self.bounds
        ]
        flat = [Direction(1, accelerator.link, False)] * (3 - len(torus))
        cores = Direction(accelerator.devices_per_chip, accelerator.core_link, False)
        return (*torus, *flat, cores)

    @cached_property
    def stand_ins(self) -> tuple[SimpleNamespace, ...]:
        """What says of each device of one slice of TPUs no more than where it stands."""
        *bounds, cores = (range(direction.extent) for direction in self.directions)
        return tuple(
            SimpleNamespace(
                platform="tpu",
                device_kind=self.accelerator.device_kind,
                slice_index=0,
                coords=chip,
                core_on_chip=core,
            )
            for *chip, core in product(*bounds, cores)
        )


def parse_topology(name: str, slices: int = 1) -> Topology:
    """Return the topology `v5p:4x4x4`, `h100:8`, or `h100:8x4` (4 nodes of 8), `slices` times.

    Raises UserError for one that is not known, with those that are.
    """
    kind, colon, shape = name.strip().lower().partition(":")
    if kind not in ACCELERATORS or not colon:
        known = ", ".join(f"{a.name}:{a.slices[-1]}" for a in ACCELERATORS.values())
        raise UserError(f"no topology {name!r}: known are {known} and smaller ones.")
    accelerator = ACCELERATORS[kind]
    if slices < 1:
        raise UserError(f"--slices is {slices}: it must be a whole number, at least 1.")
    if accelerator.platform == "gpu":
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", shape)
        if match is None or match[1] not in NODES or match[2] == "0":
            raise UserError(
                f"no topology {name!r}: give {kind}:N or {kind}:NxM for M nodes of N GPUs, N being "
                f"one of {', '.join(NODES)}."
            )
        if slices != 1:
            raise UserError(f"--slices is for TPUs: write {kind}:{match[1]}x{slices} for nodes.")
        return Topology(
            accelerator=accelerator, bounds=(int(match[1]),), granules=int(match[2] or 1)
        )
    if shape not in accelerator.slices:
        known = ", ".join(f"{kind}:{shape}" for shape in accelerator.slices)
        raise UserError(f"no topology {name!r}: known are {known}; --slices joins several.")
    return Topology(
        accelerator=accelerator,
        bounds=tuple(int(extent) for extent in shape.split("x")),
        granules=slices,
    )


@dataclass(frozen=True, kw_only=True)
class AxisRings:
    """The rings within a granule that an axis' transfers pass, the last of a gathering first.

    `assumed` says by what they are bounded, where the axis is not made of whole directions.
    """

    rings: tuple[Ring, ...]
    assumed: str | None = None


def axis_rings(topology: Topology, sizes: dict[str, int]) -> dict[str, AxisRings]:
    """Return for each mesh axis, of so many devices of a granule, what its transfers pass.

    Of a direction of the torus that several axes share each has a part: neighbours, who have one
    link, or devices some steps apart, who share the links between them with those that stand there.
    A GPU has its switch for every axis.
    """
    return dict(_axis_rings(topology, MeshShape(**sizes)))


@lru_cache(maxsize=1024)
def _axis_rings(topology: Topology, sizes: MeshShape) -> dict[str, AxisRings]:
    link = topology.accelerator.link
    if topology.accelerator.platform == "gpu" or sizes.devices != topology.granule_devices:
        return {
            axis: AxisRings(rings=(Ring(size, link),)) for axis, size in sizes._asdict().items()
        }
    devices = arranged(sizes, topology.stand_ins)
    found = {}
    for dim, (axis, size) in enumerate(sizes._asdict().items()):
        at_first = tuple(slice(None) if other == dim else 0 for other in range(len(sizes)))
        places = [place_of(device) for device in devices[at_first]]
        found[axis] = _rings_of_places(topology, places) if size > 1 else AxisRings(rings=())
    return found


def _rings_of_places(topology: Topology, places: Sequence[tuple[int, ...]]) -> AxisRings:
    along = rings_along(places)
    if not along:
        return AxisRings(
            rings=(Ring(len(places), topology.accelerator.link),),
            assumed="follows no directions of the torus, and is bounded as a line of neighbours",
        )
    rings, shared = [], False
    for dim, length in along:
        extent, link, closed = topology.directions[dim - 1]  # after the slice's number
        steps = sorted({place[dim] for place in places})
        stride = steps[1] - steps[0]
        around = closed and length * stride == extent
        rings.append(Ring(length, link * (2 if around else 1) / stride))
        shared |= length != extent
    return AxisRings(
        rings=tuple(rings),
        assumed="shares directions of the torus, and is bounded by its share of their links"
        if shared
        else None,
    )

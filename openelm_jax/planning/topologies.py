"""Which machines a run could have: what their devices compute, hold and move in a second.

A device is what JAX calls one: a TPU chip, one of the two cores of a TPU7x chip, or a GPU.
Devices that share a fast network form a granule: a slice of TPUs, or a node of GPUs.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Literal, NamedTuple

from openelm_jax.errors import UserError
from openelm_jax.parallel.devices import memory_bytes, peak_flops

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
    or of all links into the node's switch (GPU), `network` between granules.
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

    def peak_flops(self, dtype: str = "bfloat16") -> float:
        """Return the dense FLOP/s of products in `dtype`."""
        peak = peak_flops(self.device_kind, dtype)
        assert peak is not None
        return peak


# TPU rates are those of Google's pages docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x} (read
# 2026-11): HBM; a link is the bidirectional interconnect bandwidth of a chip / 2 / its links (six
# in a 3D torus, four in a 2D one), v4's from arXiv 2304.01433; the network is the DCN bandwidth of
# a chip, v5e's that of a pod / 256 and v4's that of the "How to scale your model" book (as v5p's).
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
            slices=SOLID_SLICES, devices_per_chip=2,
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
    def rings(self) -> tuple[Ring, ...]:
        """The directions of the torus.

        A closed ring brings data from both sides. A direction is closed where Google's pages say
        so: in slices of whole 4x4x4 cubes, and in a flat slice's direction of 16.
        """
        accelerator = self.accelerator
        solid = len(self.bounds) == 3
        cubes = solid and all(extent % 4 == 0 for extent in self.bounds)
        rings = []
        for extent in self.bounds:
            closed = cubes or (not solid and extent == 16)
            rings.append(Ring(extent, accelerator.link * (2 if closed else 1)))
        if accelerator.devices_per_chip > 1:
            rings.append(Ring(accelerator.devices_per_chip, accelerator.link))
        return tuple(ring for ring in rings if ring.extent > 1)


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


def axis_rings(topology: Topology, sizes: dict[str, int]) -> dict[str, tuple[Ring, ...]]:
    """Return for each mesh axis the rings within a granule that its transfers pass, one by one.

    Axes take whole directions of the torus, the first axis first, as many as their size covers;
    an axis that fits none has a line of its own. A GPU has its switch for every axis.
    """
    left = list(topology.rings) if topology.accelerator.platform == "tpu" else []
    rings: dict[str, tuple[Ring, ...]] = {}
    for axis, size in sizes.items():
        taken = _covering(left, size)
        for ring in taken:
            left.remove(ring)
        rings[axis] = taken or (Ring(size, topology.accelerator.link),)
    return rings


def _covering(rings: list[Ring], size: int) -> tuple[Ring, ...]:
    for count in range(len(rings), 0, -1):
        for chosen in combinations(rings, count):
            if math.prod(ring.extent for ring in chosen) == size:
                return chosen
    return ()

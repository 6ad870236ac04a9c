"""How long a step takes at best: what each resource has to do, over what it does in a second.

All four work at the same time in the best case, so the slowest of them decides; what it does not
know is latency, and how far kernels stay below the peaks.

Letters: B rows, T tokens, D model, N query heads, K kv heads, H head dim, F ffn, V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from openelm_jax.config import ModelConfig
from openelm_jax.model.scaling import LayerShape
from openelm_jax.planning.collectives import Collective
from openelm_jax.planning.topologies import AxisRings, Topology, axis_rings

SECONDS_A_DAY = 86_400
RESOURCES = ("compute", "HBM", "interconnect", "network")


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The least seconds of a step, by resource, and what follows from the largest.

    `interconnect` joins the devices of a slice or node, `network` slices or nodes. `mfu` is of the
    FLOPs that the model needs, recomputed ones left out, over the peak in bfloat16 whatever the
    compute type is, as in `speed/mfu` of a run. `exposed_seconds` is a step during whose
    transfers between devices nothing is computed: good programs lie between it and `step_seconds`.
    """

    compute_seconds: float
    memory_seconds: float
    interconnect_seconds: float
    network_seconds: float
    binds: str
    step_seconds: float
    exposed_seconds: float
    mfu: float
    tokens_per_second: float
    days: float


def roofline(
    topology: Topology,
    mesh: dict[str, int],
    *,
    model_flops: float,
    computed_flops: float,
    memory_bytes: float,
    collectives: Sequence[Collective],
    tokens: int,
    steps: int,
    dtype: str = "bfloat16",
) -> Roofline:
    """Return the bound of a step of `tokens` tokens, FLOPs and bytes being those of one device.

    Of the FLOPs that it computes those of the model are its share; the rest it does again, or as
    other devices of the tensor axis do.
    """
    accelerator = topology.accelerator
    interconnect, network = transfer_seconds(topology, mesh, collectives)
    seconds = (
        computed_flops / accelerator.peak_flops(dtype),
        memory_bytes / accelerator.memory_rate,
        interconnect,
        network,
    )
    longest = max(seconds)
    return Roofline(
        compute_seconds=seconds[0],
        memory_seconds=seconds[1],
        interconnect_seconds=seconds[2],
        network_seconds=seconds[3],
        binds=RESOURCES[seconds.index(longest)],
        step_seconds=longest,
        exposed_seconds=max(seconds[:2]) + interconnect + network,
        mfu=model_flops / (longest * accelerator.peak_flops()),
        tokens_per_second=tokens / longest,
        days=longest * steps / SECONDS_A_DAY,
    )


def transfer_seconds(
    topology: Topology, mesh: dict[str, int], collectives: Sequence[Collective]
) -> tuple[float, float]:
    """Return the seconds that transfers take within granules and between them.

    An array is gathered or scattered ring by ring, as `parallel/collectives.py` does it: of what a
    ring of n devices has together, each receives (n - 1) / n. A sum is a scattering and a
    gathering. An axis that spans g granules receives (g - 1) / g of the array from the others, once
    for all of a granule's devices in the axis, and does the rest within.
    """
    granules = granules_by_axis(topology, mesh)
    rings = rings_within(topology, mesh)

    interconnect = network = 0.0
    for each in collectives:
        times = 2 if each.kind == "all-reduce" else 1
        whole, across = float(each.bytes), 1
        for axis in each.axes.split("+"):
            across *= granules[axis]
            for extent, rate in rings[axis].rings:
                interconnect += times * whole * (extent - 1) / extent / rate
                whole /= extent
        network += times * whole * (across - 1) / across / topology.accelerator.network
    return interconnect, network


def granules_by_axis(topology: Topology, mesh: dict[str, int]) -> dict[str, int]:
    """Return how many granules each axis spans: the outermost do, replica first, then fsdp."""
    granules = dict.fromkeys(mesh, 1)
    left = topology.granules
    for axis in ("replica", "fsdp"):
        shared = math.gcd(left, mesh.get(axis, 1))
        granules[axis], left = shared, left // shared
    return granules


def rings_within(topology: Topology, mesh: dict[str, int]) -> dict[str, AxisRings]:
    """Return what each axis' transfers pass within a granule."""
    granules = granules_by_axis(topology, mesh)
    return axis_rings(topology, {axis: size // granules[axis] for axis, size in mesh.items()})


def product_flops(
    config: ModelConfig,
    shapes: Sequence[LayerShape],
    tokens: float,
    length: int,
    tensor: int = 1,
) -> float:
    """Return the FLOPs of a training step's products over `tokens` tokens of rows of `length`.

    `shapes` are the layers as one device computes them. Forward, and twice that backward; head and
    loss likewise, for one of `tensor` parts of the tokens.
    """
    flops = 2.0 * config.model_dim * config.vocab_size / tensor
    for shape in shapes:
        flops += 2 * matrix_elements(config, shape) + 2 * shape.query_dim * (length + 1)
    return 3 * flops * tokens


def matrix_elements(config: ModelConfig, shape: LayerShape) -> int:
    """Return the elements of a layer's matrices, as one device computes with them."""
    ffn = (3 if config.ffn_with_glu else 2) * shape.model_dim * shape.ffn_dim
    return 2 * shape.model_dim * (shape.query_dim + shape.kv_dim) + ffn


def memory_bytes(
    config: ModelConfig,
    shapes: Sequence[LayerShape],
    *,
    tokens: float,
    parts: int,
    stored: int,
    first_moment_bytes: int,
    recomputed: Sequence[float],
    tensor: int = 1,
    dtype_bytes: int = 2,
) -> float:
    """Return the bytes that a device's memory reads and writes in a step, by the shapes.

    `tokens` are the device's in a step, cut into `parts`; `stored` the parameters whose state it
    holds; `recomputed` the share of each layer's forward pass that the backward pass does again.
    Every product reads its inputs and writes its output, and what stands between two products is
    fused into one reading and one writing; a backward pass moves twice what a forward pass does.
    """
    adam = stored * (4 * 5 + 2 * first_moment_bytes)
    accumulation = stored * 8 * (parts if parts > 1 else 0)
    gate = 2 if config.ffn_with_glu else 1
    moved = 0.0
    for shape, share in zip(shapes, recomputed, strict=True):
        # Cast or gathered (written) and read by a product, forward and again backward, where the
        # other product reads activations only; and the float32 gradient written and read.
        weights = matrix_elements(config, shape) * ((4 + share) * dtype_bytes + 8) * parts
        d, q, k, f = shape.model_dim, shape.query_dim, shape.kv_dim, shape.ffn_dim
        attention = 5 * d + 6 * q + 6 * k
        ffn = 5 * d + 2 * gate * f + 2 * f
        moved += weights + dtype_bytes * (attention + ffn) * (3 + share) * tokens
    # Logits: float32 written, read for the partition and for the probabilities; their gradient
    # written in the compute type and read by two products. The table: cast or gathered for the
    # look-up, and for the loss, where two products read it; two float32 gradients written, and
    # one read to add them.
    loss = (
        tokens / tensor * config.vocab_size * (12 + 3 * dtype_bytes)
        + config.vocab_size * config.model_dim * (4 * dtype_bytes + 12) * parts
    )
    return adam + accumulation + moved + loss

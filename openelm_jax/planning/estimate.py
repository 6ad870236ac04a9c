"""An experiment on a topology, from the shapes: does it fit, what binds it, how long it takes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from openelm_jax.config import Experiment, MeshConfig
from openelm_jax.errors import UserError
from openelm_jax.model.memory import Remat, StepBytes, recomputed_flops
from openelm_jax.model.scaling import flops_per_token
from openelm_jax.parallel.memory import DTYPE_BYTES, device_bytes, remats_of, uniform_remats_of
from openelm_jax.parallel.mesh import MeshShape, check_context, check_rows, resolve_mesh
from openelm_jax.parallel.sharding import Layout, make_layout
from openelm_jax.planning.collectives import Collective
from openelm_jax.planning.compiled import CompiledStep
from openelm_jax.planning.memory import parts_of, recomputed, stored_parameters
from openelm_jax.planning.roofline import (
    Roofline,
    memory_bytes,
    product_flops,
    rings_within,
    roofline,
)
from openelm_jax.planning.topologies import GIB, Topology
from openelm_jax.planning.traffic import planned_collectives

REMATS: tuple[Literal["none", "budget", "dots", "save_attention", "block"], ...] = (
    "none",
    "budget",
    "dots",
    "save_attention",
    "block",
)
INNER_SIZES = (1, 2, 4, 8)
SLOWEST = 2


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A step on a topology; bytes and FLOPs are those of one device, `rows` of one part."""

    experiment: str
    topology: str
    devices: int
    mesh: dict[str, int]
    rows: int
    accumulation: int
    remat: str
    layers_by_remat: dict[str, int]
    memory: dict[str, int]
    estimated_bytes: int
    usable_bytes: int
    advertised_gib: int
    fits: bool
    advice: str | None
    notes: tuple[str, ...]
    model_flops: float
    recomputed_flops: float
    collectives: tuple[Collective, ...]
    bound: Roofline
    block_alone: tuple[int, float | None] | None = None
    """With remat=budget: on how many layers `block` alone would have to be to fit, and how many
    times the FLOPs of products and attention it would compute again (None: this does none). A
    search, where it would be most of the work, leaves it out."""
    compiled: CompiledStep | None = None


class Held(NamedTuple):
    """A model on a mesh, what its layers compute again, and the memory of one device."""

    layout: Layout
    remats: tuple[Remat, ...]
    bytes: StepBytes


def estimate(experiment: Experiment, topology: Topology) -> Estimate:
    """Return what one step of `experiment` takes on `topology`.

    Raises UserError for a mesh that does not multiply out or a batch that cannot be divided. One
    that does not fit names the nearest setting that does.
    """
    holding = _held(experiment, topology)
    found = dataclasses.replace(
        _estimate(experiment, topology, holding),
        block_alone=_block_alone(experiment, topology, holding),
    )
    if found.fits:
        return found
    return dataclasses.replace(found, advice=_advice(experiment, topology))


def _held(experiment: Experiment, topology: Topology) -> Held:
    training, model = experiment.training, experiment.model
    mesh = resolve_mesh(experiment.mesh, topology.devices, topology.granules)
    check_rows(mesh, training.global_batch_size, training.accumulation)
    check_context(mesh, model.context_length)
    layout = make_layout(model, mesh)
    device_kind = topology.accelerator.device_kind
    remats = remats_of(experiment, layout, device_kind)
    return Held(layout, remats, device_bytes(experiment, layout, remats, device_kind))


def _estimate(experiment: Experiment, topology: Topology, holding: Held) -> Estimate:
    training, model = experiment.training, experiment.model
    layout, remats, held = holding
    mesh, usable = layout.mesh, int(topology.accelerator.memory)
    rows = training.global_batch_size // (mesh.row_shards * training.accumulation)
    step_tokens = training.global_batch_size * model.context_length
    tokens = step_tokens / (mesh.row_shards * mesh.context)
    again = recomputed(model, layout.layers, remats)
    again_flops = sum(layer.flops for layer in again) * tokens
    computed = product_flops(model, layout.layers, tokens, model.context_length, mesh.tensor)
    flops = 3 * flops_per_token(model) * step_tokens / topology.devices
    collectives = planned_collectives(experiment, layout, remats)
    bound = roofline(
        topology,
        mesh._asdict(),
        model_flops=flops,
        computed_flops=computed + again_flops,
        memory_bytes=memory_bytes(
            model,
            layout.layers,
            tokens=tokens,
            parts=training.accumulation,
            stored=stored_parameters(layout),
            first_moment_bytes=DTYPE_BYTES[experiment.optimizer.first_moment_dtype],
            recomputed=[layer.of_forward for layer in again],
            tensor=mesh.tensor,
            dtype_bytes=DTYPE_BYTES[training.dtype],
        ),
        collectives=collectives,
        tokens=step_tokens,
        steps=training.steps,
        dtype=training.dtype,
    )
    return Estimate(
        experiment=experiment.name,
        topology=topology.name,
        devices=topology.devices,
        mesh=mesh._asdict(),
        rows=rows,
        accumulation=training.accumulation,
        remat=training.remat,
        layers_by_remat={remat: remats.count(remat) for remat in dict.fromkeys(remats)},
        memory=parts_of(held),
        estimated_bytes=held.total,
        usable_bytes=usable,
        advertised_gib=topology.accelerator.advertised_gib,
        fits=held.total <= usable,
        advice=None,
        notes=tuple(_notes(experiment, topology, layout)),
        model_flops=flops,
        recomputed_flops=again_flops,
        collectives=collectives,
        bound=bound,
    )


def _block_alone(
    experiment: Experiment, topology: Topology, holding: Held
) -> tuple[int, float | None] | None:
    if experiment.training.remat != "budget":
        return None
    model, shapes = experiment.model, holding.layout.layers
    alone = uniform_remats_of(experiment, holding.layout, topology.accelerator.device_kind)
    ours, theirs = (
        recomputed_flops(model, remats, shapes=shapes) for remats in (holding.remats, alone)
    )
    return alone.count("block"), theirs / ours if ours else None


def search(experiment: Experiment, topology: Topology) -> list[Estimate]:
    """Return the settings that fit and that no other beats in memory and time, fastest first.

    Tried are the ways to cut the batch, to recompute, and to lay out the mesh; the global batch,
    and with it what is computed, stays. Nothing SLOWEST times as slow as the fastest is returned.
    """
    meshes = list(_meshes(experiment, topology))
    if not meshes:
        mesh = resolve_mesh(MeshConfig(), topology.devices, topology.granules)
        check_rows(mesh, experiment.training.global_batch_size, 1)
    best = pareto(list(_fitting(experiment, topology, meshes)))
    return [found for found in best if middle_seconds(found) <= SLOWEST * middle_seconds(best[0])]


def pareto(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Return those that no other equals or beats in memory, and in time both at best and exposed.

    Fastest first, by the middle of both times.
    """
    best: list[Estimate] = []
    for each in sorted(estimates, key=lambda e: (middle_seconds(e), e.estimated_bytes)):
        if not any(_beats(other, each) for other in best):
            best.append(each)
    return best


def middle_seconds(found: Estimate) -> float:
    """Return what to compare by: half of the transfers between devices hidden, say."""
    return (found.bound.step_seconds + found.bound.exposed_seconds) / 2


def _beats(a: Estimate, b: Estimate) -> bool:
    return (
        a.estimated_bytes <= b.estimated_bytes
        and a.bound.step_seconds <= b.bound.step_seconds
        and a.bound.exposed_seconds <= b.bound.exposed_seconds
    )


def settings(experiment: Experiment, topology: Topology, found: Estimate) -> str:
    """Return the flags by which `experiment` becomes what `found` estimates, "" if it is."""
    flags = {
        "--training.accumulation": (experiment.training.accumulation, found.accumulation),
        "--training.remat": (experiment.training.remat, found.remat),
        "--mesh.tensor": (experiment.mesh.tensor, found.mesh["tensor"]),
        "--mesh.context": (experiment.mesh.context, found.mesh["context"]),
    }
    if experiment.mesh.fsdp is not None:
        flags["--mesh.fsdp"] = (experiment.mesh.fsdp, found.mesh["fsdp"])
    mesh = MeshConfig(
        replica=experiment.mesh.replica,
        fsdp=None if experiment.mesh.fsdp is None else found.mesh["fsdp"],
        tensor=found.mesh["tensor"],
        context=found.mesh["context"],
    )
    try:
        replica = resolve_mesh(mesh, topology.devices, topology.granules).replica
    except UserError:  # the one that is given does not go with the rest
        replica = 0
    flags["--mesh.replica"] = (replica, found.mesh["replica"])
    return " ".join(f"{flag} {there}" for flag, (here, there) in flags.items() if here != there)


def _advice(experiment: Experiment, topology: Topology) -> str:
    """Say what fits: other parts and recomputation first, then another mesh."""
    for mesh in itertools.chain([experiment.mesh], _meshes(experiment, topology)):
        fitting = list(_fitting(experiment, topology, [mesh]))
        if fitting:
            best = min(fitting, key=middle_seconds)
            return (
                f"try {settings(experiment, topology, best)} ({best.estimated_bytes / GIB:.1f} GiB)"
            )
    return "no accumulation, remat or mesh of these devices fits: take more of them"


def _fitting(
    experiment: Experiment, topology: Topology, meshes: Iterable[MeshConfig]
) -> Iterator[Estimate]:
    batch = experiment.training.global_batch_size
    for mesh in meshes:
        shape = resolve_mesh(mesh, topology.devices, topology.granules)
        rows = batch // shape.row_shards
        if batch % shape.row_shards:
            continue
        for parts in _divisors(rows):
            seen: set[tuple[Remat, ...]] = set()
            for remat in REMATS:
                if remat == "budget" and seen:
                    continue  # everything fits, and it would choose that
                training = dataclasses.replace(experiment.training, accumulation=parts, remat=remat)
                changed = dataclasses.replace(experiment, mesh=mesh, training=training)
                try:
                    holding = _held(changed, topology)
                except UserError:  # no choice of layers fits the budget
                    continue
                fits = holding.bytes.total <= topology.accelerator.memory
                if fits and holding.remats not in seen:
                    seen.add(holding.remats)
                    yield _estimate(changed, topology, holding)


def _meshes(experiment: Experiment, topology: Topology) -> Iterator[MeshConfig]:
    for tensor, context in itertools.product(INNER_SIZES, INNER_SIZES):
        if topology.devices % (tensor * context) or experiment.model.context_length % context:
            continue
        if tensor * context > topology.granule_devices:
            continue
        if context > 1 and topology.accelerator.platform == "gpu":
            continue  # no kernel there: see _notes
        outer = topology.devices // (tensor * context)
        for replica in _divisors(outer):
            spans = topology.granules == 1 or replica % topology.granules == 0 or replica == 1
            if spans and experiment.training.global_batch_size % outer == 0:
                yield MeshConfig(
                    replica=replica, fsdp=outer // replica, tensor=tensor, context=context
                )


def _notes(experiment: Experiment, topology: Topology, layout: Layout) -> Iterator[str]:
    mesh: MeshShape = layout.mesh
    if mesh.context > 1 and topology.accelerator.platform == "gpu":
        yield "no kernel of GPUs knows a context axis: portable attention holds scores"
    for axis, passed in rings_within(topology, mesh._asdict()).items():
        if passed.assumed:
            yield f"{axis} {passed.assumed}"
    whole = [i for i, kind in enumerate(layout.attention) if kind == "whole"]
    queries = [i for i, kind in enumerate(layout.attention) if kind == "queries"]
    if mesh.tensor > 1 and whole:
        yield f"attention of layers {_ranges(whole)} is computed by all {mesh.tensor} devices"
    if queries:
        yield f"layers {_ranges(queries)} divide query heads and hold all key/value heads"
    undivided = [
        path
        for path, placement in layout.placements.items()
        if len(placement.shape) > 1
        and any(
            size > 1 and axis != "replica" and axis not in placement.axes
            for axis, size in mesh._asdict().items()
        )
    ]
    if undivided:
        yield (
            f"{len(undivided)} matrices are not divided over all axes, because model_dim "
            f"{layout.layers[0].model_dim} is not"
        )


def _ranges(numbers: Sequence[int]) -> str:
    """Return 0-3, 7 for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def does_not_fit(found: Estimate) -> str:
    """Return by how much it does not, and what would."""
    held = found.estimated_bytes if found.compiled is None else found.compiled.memory
    usable = f"{found.advertised_gib} GiB"
    if held < found.advertised_gib * GIB:
        usable += f", of which a program gets {found.usable_bytes / GIB:.1f}"
    advice = found.advice or "raise training.accumulation"
    return f"does not fit: {held / GIB:.1f} of {usable}; {advice}"

"""Compile a training step for devices that are not here: `python -m` this, request on stdin.

Run by `compiled.py` in a process of its own; answers with one line of JSON.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from openelm_jax.config import Experiment
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import from_json
from openelm_jax.model.decoder import Decoder, init_params
from openelm_jax.parallel.attention import Kernel, choose_kernel
from openelm_jax.parallel.collectives import make_attend, make_collectives
from openelm_jax.parallel.mesh import make_mesh, resolve_mesh
from openelm_jax.parallel.sharding import Layout, make_layout, row_sharding, state_shardings
from openelm_jax.planning.collectives import collectives_in
from openelm_jax.planning.memory import remats_of
from openelm_jax.planning.topologies import Topology, parse_topology
from openelm_jax.training.optimizer import make_optimizer
from openelm_jax.training.state import new_state
from openelm_jax.training.step import Batch, make_train_step

EXHAUSTED = re.compile(r"Used ([\d.]+)([KMG]) of ")
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
BOS_ID = 1
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    # Of the compiler's time five sixths, and of a step's memory two hundredths, in a trial.
    "quick": {"exec_time_optimization_effort": -1.0},
}


def main() -> None:
    """Answer the request on stdin: an experiment, a slice or node, how many, and the effort."""
    request = json.load(sys.stdin)
    experiment = from_json(request["experiment"])
    topology = parse_topology(request["topology"], request["granules"])
    shape = resolve_mesh(experiment.mesh, topology.devices, topology.granules)
    mesh = make_mesh(shape, devices_of(topology))
    layout = make_layout(experiment.model, shape)
    kernel = kernel_of(experiment, topology, shape.context)

    begin = time.perf_counter()
    lowered = lowered_step(experiment, topology, mesh, layout, kernel)
    lowered_at = time.perf_counter()
    answer: dict[str, Any] = {"mesh": shape._asdict(), "kernel": kernel.name}
    try:
        compiled = lowered.compile(compiler_options=OPTIONS[request["effort"]])
    except jax.errors.JaxRuntimeError as fault:
        needed = EXHAUSTED.search(str(fault))
        if needed is None:
            raise
        answer |= memory_of(None) | {"collectives": []}
        answer["needed_bytes"] = int(float(needed[1]) * UNITS[needed[2]])
    else:
        answer |= memory_of(compiled.memory_analysis())
        counted = collectives_in(compiled.as_text())
        answer["collectives"] = [dataclasses.asdict(each) for each in counted]
    answer["lowering_seconds"] = lowered_at - begin
    answer["compilation_seconds"] = time.perf_counter() - lowered_at
    print(json.dumps(answer))


def kernel_of(experiment: Experiment, topology: Topology, context: int) -> Kernel:
    """Return the kernel of attention that a run would have on the devices."""
    training, accelerator = experiment.training, topology.accelerator
    return choose_kernel(
        training.attention,
        platform=accelerator.platform,
        device_kind=accelerator.device_kind,
        dtype=jnp.dtype(training.dtype),
        head_dim=experiment.model.head_dim,
        context_length=experiment.model.context_length,
        isolating=experiment.data.isolate_documents,
        context=context,
        probe=False,
    )


def lowered_step(
    experiment: Experiment, topology: Topology, mesh: Mesh, layout: Layout, kernel: Kernel
) -> Any:
    """Return the training step of a run, lowered for arrays that need not exist."""
    training, model = experiment.training, experiment.model
    optimizer = make_optimizer(experiment.optimizer)
    decoder = Decoder(
        model,
        dtype=jnp.dtype(training.dtype),
        remat=remats_of(experiment, layout, topology.accelerator.memory),
        attend=make_attend(model, layout, kernel.attend),
        collectives=make_collectives(layout),
        shapes=layout.layers,
    )
    step = make_train_step(
        decoder,
        optimizer,
        training,
        experiment.optimizer.clip_norm,
        BOS_ID if experiment.data.isolate_documents else None,
        mesh,
    )
    rate = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    state = abstract_state(experiment, layout, mesh)
    return jax.jit(step, donate_argnums=0).lower(state, abstract_batch(experiment, mesh), rate)


def abstract_state(experiment: Experiment, layout: Layout, mesh: Mesh) -> Any:
    """Return the state as shapes on the mesh."""
    optimizer = make_optimizer(experiment.optimizer)
    state = jax.eval_shape(lambda: new_state(init_params(experiment.model, 0), optimizer))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        state_shardings(layout, mesh, state),
    )


def abstract_batch(experiment: Experiment, mesh: Mesh) -> Any:
    """Return a global batch as shapes on the mesh."""
    rows, length = experiment.training.global_batch_size, experiment.model.context_length
    sharding = row_sharding(mesh)
    return Batch(
        jax.ShapeDtypeStruct((rows, length + 1), jnp.int32, sharding=sharding),
        jax.ShapeDtypeStruct((rows, length), jnp.bool_, sharding=sharding),
    )


def devices_of(topology: Topology) -> list[Any]:
    """Return the devices of a topology, which compile and hold nothing."""
    options: dict[str, Any] = {}
    if topology.granules > 1:
        options["num_slices"] = topology.granules
    if topology.bounds == (1, 1):
        options["chips_per_host_bounds"] = [1, 1, 1]
    if topology.accelerator.name == "v4":
        options["chip_config_name"] = "megacore"  # a chip is one device, as on the machine
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=topology.slice_name, **options
    )
    assert len(described.devices) == topology.devices
    return list(described.devices)


def memory_of(analysis: Any) -> dict[str, int]:
    """Return XLA's figures of a program's memory by our names, all 0 if there are none."""
    names = {
        "argument_bytes": "argument_size_in_bytes",
        "output_bytes": "output_size_in_bytes",
        "temporary_bytes": "temp_size_in_bytes",
        "alias_bytes": "alias_size_in_bytes",
        "peak_bytes": "peak_memory_in_bytes",
    }
    figures = {ours: int(getattr(analysis, theirs, 0)) for ours, theirs in names.items()}
    return {**figures, "needed_bytes": 0}


if __name__ == "__main__":
    try:
        main()
    except UserError as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        sys.exit(1)

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
from jax.experimental import topologies

from openelm_jax.errors import UserError
from openelm_jax.experiment_file import from_json
from openelm_jax.parallel.mesh import make_mesh, resolve_mesh
from openelm_jax.planning.collectives import collectives_in
from openelm_jax.planning.cuda_targets import cuda_target
from openelm_jax.planning.topologies import Topology, parse_topology
from openelm_jax.training.program import make_program
from openelm_jax.xla_flags import compiler_options

# "Ran out of memory on HBM, the total memory required for HLO temporaries (26.96G) exceeds ..." or
# "Ran out of memory in memory space hbm. Used 18.20G of 15.75G hbm ..."
EXHAUSTED = re.compile(r"(?:temporaries \(|Used )([\d.]+)([KMG])")
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
    topology = parse_topology(request["topology"], request["slices"])
    shape = resolve_mesh(experiment.mesh, topology.devices, topology.granules)
    mesh = make_mesh(shape, devices_of(topology))
    bos_id = BOS_ID if experiment.data.isolate_documents else None
    program = make_program(experiment, mesh, bos_id=bos_id, probe=False)
    if program.kernel.name == "cudnn":
        raise UserError(
            "--compile: cuDNN's attention is compiled on a GPU only; --training.attention portable "
            "compiles here, and holds more memory."
        )

    begin = time.perf_counter()
    lowered = program.train_step.lower(
        program.state_like(), program.batch_like(), program.rate_like()
    )
    lowered_at = time.perf_counter()
    answer: dict[str, Any] = {"mesh": shape._asdict(), "kernel": program.kernel.name}
    try:
        options = compiler_options(topology.accelerator.device_kind, topology.granules)
        compiled = lowered.compile(compiler_options={**options, **OPTIONS[request["effort"]]})
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


def devices_of(topology: Topology) -> list[Any]:
    """Return the devices of a topology, which compile and hold nothing."""
    if topology.accelerator.platform == "gpu":
        described = topologies.get_topology_desc(
            platform="cuda",
            target_config=cuda_target(topology.accelerator),
            topology=f"1x{topology.granules}x{topology.granule_devices}",
        )
        return list(described.devices)
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

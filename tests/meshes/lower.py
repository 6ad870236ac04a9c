"""Write down what devices send each other in a bfloat16 step on each of several meshes, as JSON.

python lower.py REPLICA,FSDP,TENSOR,CONTEXT,REMAT ...

The first one is compiled as well.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys

from run import BOS, EXPERIMENT

from openelm_jax.parallel.mesh import MeshShape, make_mesh
from openelm_jax.planning.collectives import collectives_in
from openelm_jax.training.program import make_program

LOWERED = re.compile(
    r'"stablehlo\.(all_gather|all_reduce|reduce_scatter|all_to_all|collective_permute)"'
    r".*?: \(tensor<([^>]*)>.*?\) -> ",
    re.DOTALL,
)


def sent(shape: MeshShape, remat: str, compile_it: bool) -> dict:
    """Return the collectives of the lowered program (kind, "2x8xbf16"), and of the compiled one."""
    training = dataclasses.replace(
        EXPERIMENT.training,
        dtype="bfloat16",
        global_batch_size=48,  # no part of it has as many tokens as a matrix has rows
        accumulation=2,
        remat=remat,
    )
    experiment = dataclasses.replace(EXPERIMENT, training=training)
    program = make_program(experiment, make_mesh(shape), bos_id=BOS)
    lowered = program.train_step.lower(
        program.state_like(), program.batch_like(), program.rate_like()
    )
    compiled = collectives_in(lowered.compile().as_text()) if compile_it else ()
    return {
        "lowered": LOWERED.findall(lowered.as_text()),
        "compiled": [each.kind for each in compiled],
    }


if __name__ == "__main__":
    results = {}
    for argument in sys.argv[1:]:
        *sizes, remat = argument.split(",")
        results[argument] = sent(MeshShape(*map(int, sizes)), remat, compile_it=not results)
    print(json.dumps(results))

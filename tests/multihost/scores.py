"""One of two processes that score the same requests, each on two devices of its own.

python scores.py COORDINATOR PROCESS FOLDER
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from test_scoring import CONFIG, KNOWN, random_params, some_requests

from openelm_jax.generation import scoring
from openelm_jax.generation.forward import decoding_params
from openelm_jax.generation.placement import decoding_mesh, divided

coordinator, process, folder = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, 2, int(process))

params = random_params(CONFIG)
params["embedding"][KNOWN:] *= 30
mesh = decoding_mesh(replica=2, tensor=1)
params = jax.tree_util.tree_map_with_path(
    lambda path, weight: divided(tuple(key.key for key in path), weight, mesh),
    decoding_params(params, "float32"),
    is_leaf=lambda leaf: hasattr(leaf, "weight_OI"),
)
rows = scoring._rows(some_requests())
batches = scoring._batches(rows, 128, 2)
computed = []
compute = scoring._predict
scoring._predict = lambda *arguments: computed.append(np.asarray(0)) or compute(*arguments)
found = scoring.score(
    CONFIG, params, "float32", some_requests(), vocab_size=KNOWN, batch_tokens=128
)
said = {"scores": found, "computed": len(computed), "batches": len(batches)}
Path(folder, f"{process}.json").write_text(json.dumps(said))

"""One of several hosts: read its own lanes, feed them, and write down what all hosts saw.

python host.py COORDINATOR HOST HOSTS FOLDER BATCHES
"""

import json
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from small_runs import small_experiment

from openelm_jax.data.pipeline import open_data
from openelm_jax.errors import UserError
from openelm_jax.parallel.mesh import MeshShape, make_mesh, reader_of
from openelm_jax.tokenizer import load_tokenizer
from openelm_jax.training.feed import feed, whole_position

coordinator, host, hosts, folder, batches = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, int(hosts), int(host))

experiment = small_experiment(Path(folder))
tokenizer = load_tokenizer(experiment.tokenizer.path)
mesh = make_mesh(MeshShape(fsdp=jax.device_count()))
reader, readers = reader_of(mesh, jax.process_index())
data = open_data(
    experiment.data,
    tokenizer,
    row_length=experiment.model.context_length + 1,
    global_batch_size=experiment.training.global_batch_size,
    host=reader,
    hosts=readers,
)
rows, counted, positions = [], [], []
with closing(data), feed(data, 2, mesh=mesh, bos_id=tokenizer.bos_id) as fed:
    for _ in range(int(batches)):
        batch, position = next(fed)
        # Every device holds its share of the batch and no other.
        (share,) = {shard.data.shape for shard in batch.tokens_BL.addressable_shards}
        assert share[0] * jax.device_count() == batch.tokens_BL.shape[0], share
        rows.append(multihost_utils.process_allgather(batch.tokens_BL, tiled=True))
        counted.append(multihost_utils.process_allgather(batch.counted_BT, tiled=True))
        positions.append(whole_position(position).to_json())

other = replace(position, fingerprint=position.fingerprint | {"data.seed": jax.process_index()})
try:
    refusal = str(whole_position(other))
except UserError as error:
    refusal = str(error)

output = Path(folder, f"host-{host}")
np.savez(output.with_suffix(".npz"), rows=rows, counted=counted)
output.with_suffix(".json").write_text(json.dumps({"positions": positions, "refusal": refusal}))

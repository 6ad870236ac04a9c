"""Train a small model for some steps on each of several meshes, and write down what came of it.

python run.py FOLDER STEPS COORDINATOR PROCESS PROCESSES RUN ...

A RUN is NAME=REPLICA,FSDP,TENSOR,CONTEXT,ACCUMULATION, with `:2,4` behind it to pass things on by
rings of these lengths; NAME=0 trains without any mesh. With `-` for the coordinator one process
trains on its first devices. NAME.npz keeps `losses`, first moments
`gradient:PATH` after one step, and parameters `param:PATH`.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from small_models import random_params

from openelm_jax.config import Experiment, ModelConfig, OptimizerConfig, TrainingConfig
from openelm_jax.model.decoder import Decoder
from openelm_jax.parallel import sharding
from openelm_jax.parallel.mesh import MeshShape, make_mesh, reader_of
from openelm_jax.parallel.sharding import path_of_leaf
from openelm_jax.training.feed import to_batch
from openelm_jax.training.optimizer import learning_rate, make_optimizer
from openelm_jax.training.program import make_program
from openelm_jax.training.state import new_state
from openelm_jax.training.step import make_train_step

BOS = 1
MODEL = ModelConfig(
    num_layers=2,
    model_dim=64,
    head_dim=16,
    vocab_size=96,
    num_gqa_groups=4,
    qkv_multipliers=(1.0, 2.0),  # 4 and 8 query heads, 1 and 2 key/value heads
    ffn_multipliers=(1.0, 2.0),
    ffn_dim_divisor=24,  # 72 and 120 columns
    context_length=32,
)
EXPERIMENT = Experiment(
    name="mesh",
    model=MODEL,
    optimizer=OptimizerConfig(peak_lr=2e-3, warmup_steps=5),
    training=TrainingConfig(steps=20, global_batch_size=32, dtype="float32", loss_chunk=100),
)


def rows_BL(step: int) -> np.ndarray:
    """Return a batch of texts whose next token is often the double of the last one."""
    rng = np.random.default_rng(step)
    rows = rng.integers(2, MODEL.vocab_size, (32, MODEL.context_length + 1))
    for place in range(1, rows.shape[1]):
        double = 2 + rows[:, place - 1] * 2 % (MODEL.vocab_size - 2)
        rows[:, place] = np.where(rng.random(32) < 0.7, double, rows[:, place])
    rows[rng.random(rows.shape) < 0.05] = BOS
    return rows.astype(np.int32)


def counted_BT(rows: np.ndarray) -> np.ndarray:
    return rows[:, 1:] != BOS


def train(shape: MeshShape | None, accumulation: int, steps: int) -> dict[str, np.ndarray]:
    """Return the losses, the first moments after one step and the last parameters, by path."""
    training = dataclasses.replace(EXPERIMENT.training, accumulation=accumulation)
    experiment = dataclasses.replace(EXPERIMENT, training=training)
    params = random_params(MODEL, std=0.1)
    if shape is None:
        optimizer = make_optimizer(experiment.optimizer)
        state = new_state(params, optimizer)
        step = make_train_step(
            Decoder(MODEL), optimizer, training, experiment.optimizer.clip_norm, BOS
        )
        train_step, place_rate, mesh, own = jax.jit(step), np.float32, None, slice(None)
    else:
        mesh = make_mesh(shape, jax.devices()[: shape.devices])
        program = make_program(experiment, mesh, bos_id=BOS)
        state, train_step = program.new_state(params), program.train_step
        place_rate = program.place_rate
        reader, readers = reader_of(mesh, jax.process_index())
        share = training.global_batch_size // readers
        own = slice(reader * share, (reader + 1) * share)
    results: dict[str, np.ndarray] = {}
    losses = []
    for number in range(steps):
        rate = learning_rate(experiment.optimizer, 20, number)
        rows = rows_BL(number)[own]
        state, metrics = train_step(state, to_batch(rows, counted_BT(rows), mesh), place_rate(rate))
        losses.append(float(metrics.loss))
        if number == 0:
            results |= by_path("gradient", state.moments[0].mu)
    return results | by_path("param", state.params) | {"losses": np.array(losses)}


def by_path(prefix: str, tree) -> dict[str, np.ndarray]:
    if jax.process_count() > 1:
        tree = multihost_utils.process_allgather(tree, tiled=True)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{prefix}:{path_of_leaf(path)}": np.asarray(leaf) for path, leaf in leaves}


if __name__ == "__main__":
    folder, steps, coordinator, process, processes, *runs = sys.argv[1:]
    if coordinator != "-":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, int(processes), int(process))
    for run in runs:
        name, _, sizes = run.partition("=")
        sizes, _, rings = sizes.partition(":")
        own_rings = tuple(map(int, rings.split(","))) if rings else ()
        sharding.rings_of = lambda mesh, own_rings=own_rings: own_rings
        *axes, accumulation = map(int, sizes.split(",")) if sizes != "0" else (1,)
        results = train(MeshShape(*axes) if axes else None, accumulation, int(steps))
        if jax.process_index() == 0:
            np.savez(Path(folder, f"{name}.npz"), **results)

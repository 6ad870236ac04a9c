"""Adapters' gradients on four devices of this process, beside one device's; printed as JSON.

Run by test_adapters_on_meshes.py, in a process whose XLA_FLAGS make the devices.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from openelm_jax.model.adapters import Adapters, AdapterShape, frozen
from openelm_jax.model.decoder import Decoder, Params, init_adapters
from openelm_jax.parallel.collectives import make_collectives
from openelm_jax.parallel.mesh import ROW_AXES, MeshShape, make_mesh
from openelm_jax.parallel.sharding import layout_on, state_specs
from openelm_jax.weights.adapters import choose_adapters
from tests.small_models import random_params, tiny

CONFIG = tiny(num_layers=1)
PARAMS = random_params(CONFIG, std=0.125)
TOKENS_BT = np.random.default_rng(1).integers(0, 40, (4, 16)).astype(np.int32)
MESH = MeshShape(replica=2, fsdp=2)
DORA = AdapterShape(rank=2, alpha=4, dora=True)
CHOICES = {
    "DoRA": ("all-linear", DORA, None),
    "DoRA beside 8 bits": ("all-linear", DORA, 8),
    "LoRA, and of the embedding": (
        ["token_embeddings", "qkv_proj", "proj_2"],
        AdapterShape(rank=2, alpha=4),
        None,
    ),
}


def loss(decoder: Decoder, params: Params, tree: Params, tokens_BT: jax.Array) -> jax.Array:
    hidden_BTD, _ = decoder.apply({"params": params, "adapters": tree}, tokens_BT, method="hidden")
    return jnp.sin(hidden_BTD).sum() / TOKENS_BT.size


def on_one(adapters: Adapters, params: Params, tree: Params) -> Params:
    decoder = Decoder(CONFIG, adapters=adapters)
    return jax.jit(jax.grad(lambda tree: loss(decoder, params, tree, TOKENS_BT)))(tree)


def on_four(adapters: Adapters, params: Params, tree: Params) -> Params:
    mesh = make_mesh(MESH, jax.devices())
    layout = layout_on(CONFIG, mesh)
    decoder = Decoder(
        CONFIG,
        collectives=make_collectives(layout),
        shapes=layout.layers,
        adapters=adapters,
    )

    def gradient(params, tree, tokens_BT):
        gradient = jax.grad(lambda tree: loss(decoder, params, tree, tokens_BT))(tree)
        return jax.lax.psum(gradient, ROW_AXES)

    sharded = jax.shard_map(
        gradient,
        mesh=mesh,
        in_specs=(state_specs(layout, params), state_specs(layout, tree), PartitionSpec(ROW_AXES)),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jax.jit(sharded)(params, tree, TOKENS_BT)


def drawn(adapters: Adapters) -> Params:
    rng = np.random.default_rng(0)
    tree = init_adapters(CONFIG, adapters, PARAMS, seed=0)
    return jax.tree.map(lambda x: x + rng.normal(0, 0.1, x.shape).astype("f4"), tree)


def apart(one: jax.Array, four: jax.Array) -> float:
    """Return the largest difference, as a share of the largest gradient of the array."""
    return float(jnp.abs(one - four).max() / jnp.abs(one).max())


if __name__ == "__main__":
    found = {}
    for name, (targets, shape, bits) in CHOICES.items():
        adapters = choose_adapters(CONFIG, targets, shape)
        tree = drawn(adapters)
        params = jax.tree_util.tree_map_with_path(
            lambda path, x, bits=bits: frozen(tuple(key.key for key in path), x, "float32", bits),
            PARAMS,
        )
        one, four = on_one(adapters, params, tree), on_four(adapters, params, tree)
        pair = jax.tree.map(apart, one, four)
        found[name] = max(jax.tree.leaves(pair))
    print(json.dumps({"devices": jax.device_count()} | found))

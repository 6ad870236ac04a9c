"""Decoding on several devices: rows divided over the axis replica, matrices over tensor.

Every matrix is divided along model_dim, whatever the heads of its layer: the products over
model_dim are sums of the devices' shares, and the others give each device its columns of the
residual stream. XLA puts the exchanges in.

Legend: B batch, O outputs, I inputs.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from openelm_jax.errors import UserError
from openelm_jax.model.decoder import Params
from openelm_jax.model.matrix import Matrix
from openelm_jax.parallel.mesh import MeshShape, make_mesh

MADE_OF_MODEL_DIM = ("out", "down")
"""Matrices whose outputs are the residual stream; of the others the inputs are."""


def decoding_mesh(replica: int, tensor: int) -> Mesh | None:
    """Return the mesh of the first replica x tensor devices, None for one device.

    Raises UserError if there are fewer.
    """
    if replica == tensor == 1:
        return None
    devices = jax.local_devices()
    if min(replica, tensor) < 1 or replica * tensor > len(devices):
        raise UserError(
            f"mesh replica {replica} x tensor {tensor} makes {replica * tensor} devices, and there "
            f"are {len(devices)}: their product must be between 1 and that."
        )
    shape = MeshShape(replica=replica, tensor=tensor)
    return make_mesh(shape, devices[: shape.devices])


def divided(path: tuple[str, ...], weight: jax.Array | Matrix, mesh: Mesh) -> jax.Array | Matrix:
    """Return one of the parameters that `placed` made, divided over the mesh.

    What tensor does not divide, norms and the scales of whole rows among them, lies everywhere.
    """
    axis = 0 if path[-1] in MADE_OF_MODEL_DIM else 1

    def put(array: jax.Array) -> jax.Array:
        axes: list[str | None] = [None] * array.ndim
        if array.ndim > 1 and array.shape[axis] % mesh.shape["tensor"] == 0:
            axes[axis] = "tensor"
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    return jax.tree.map(put, weight)


def mesh_of(params: Params) -> Mesh | None:
    """Return the mesh that the parameters lie on, if they do."""
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh


def whole_rows(count: int, mesh: Mesh | None) -> int:
    """Return how many rows a batch of `count` is filled up to, so that the devices divide them."""
    replica = 1 if mesh is None else mesh.shape["replica"]
    return -(-count // replica) * replica


def divide_rows(tree: Any, mesh: Mesh | None) -> Any:
    """Return arrays [B, ...] with their rows divided over the mesh; numbers stay as they are."""
    if mesh is None:
        return tree
    rows = NamedSharding(mesh, PartitionSpec("replica"))

    def put(leaf: Any) -> Any:
        if np.ndim(leaf) == 0:
            return leaf
        if isinstance(leaf, jax.core.Tracer):
            return jax.lax.with_sharding_constraint(leaf, rows)
        return jax.device_put(leaf, rows)

    return jax.tree.map(put, tree)

"""The sum over an axis of the mesh of which each device keeps a part."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def reduce_scatter(
    x: jax.Array, axis: str, dim: int = 0, groups: list[list[int]] | None = None
) -> jax.Array:
    """Return this device's part of dimension `dim` of the sum of all `x` over a mesh axis.

    `groups` are the positions on the axis that sum among themselves; all together if None.
    """
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        return _sum_of_parts(x, axis, dim, groups)
    return jax.lax.psum_scatter(
        x, axis, scatter_dimension=dim, axis_index_groups=groups, tiled=True
    )


def _sum_of_parts(x: jax.Array, axis: str, dim: int, groups: list[list[int]] | None) -> jax.Array:
    """Exchange the parts and add them up.

    CPU processes send by gloo, whose reduce-scatter does not wait until a part is sent before it
    writes its own result there (gloo/reduce_scatter.h): rarely, on a busy machine, a device got a
    wrong part.
    """
    size = len(groups[0]) if groups else jax.lax.psum(1, axis)
    parts = jnp.stack(jnp.split(x, size, axis=dim))
    parts = jax.lax.all_to_all(parts, axis, 0, 0, axis_index_groups=groups)
    return parts.sum(axis=0)

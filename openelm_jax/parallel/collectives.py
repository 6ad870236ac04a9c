"""What devices send each other, all of it written out: nothing is left to the partitioner.

Everything here runs inside a `jax.shard_map`. A weight is gathered in the compute dtype where it is
used; its gradient goes back as a sum of float32 shards. (Left to itself XLA sums whole weight
gradients in bfloat16, and turns products with sharded matrices into hundreds of permutations.)

Legend: B batch, T time of this device, S time of all, N tokens, D model, V vocab, K kv heads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from openelm_jax.config import ModelConfig
from openelm_jax.model.attention import Attend, CausalAttend
from openelm_jax.model.decoder import Collectives, add_rows
from openelm_jax.model.matrix import FORMS
from openelm_jax.parallel.attention import over_context
from openelm_jax.parallel.mesh import MeshShape
from openelm_jax.parallel.reduce_scatter import reduce_scatter
from openelm_jax.parallel.sharding import Columns, Layout, Placement, path_of_leaf

Array = jax.Array


def make_collectives(layout: Layout) -> Collectives:
    """Return what the decoder calls on the mesh of a layout."""
    placements, mesh = layout.placements, layout.mesh
    divided = {
        f"layers_{number}/{half}"
        for number, kind in enumerate(layout.attention)
        for half in (("attention", "ffn") if kind != "whole" else ("ffn",))
        if mesh.tensor > 1
    }

    def gather(weight: Array, path: str, dtype: Any) -> Array:
        if isinstance(weight, FORMS):  # of few bits, beside adapters: whole on every device
            return weight
        return gather_weight(weight, placements[path], mesh, dtype)

    def embed(table: Array, tokens_BT: Array, dtype: Any) -> Array:
        return _embed(table, tokens_BT, placements["embedding"], mesh, dtype)

    def enter(x: Array, path: str) -> Array:
        return enter_columns(x) if path in divided else x

    def leave(x: Array, path: str) -> Array:
        return leave_columns(x) if path in divided else x

    return Collectives(gather, embed, enter, leave)


def make_attend(config: ModelConfig, layout: Layout, kernel: CausalAttend) -> Attend:
    """Return the decoder's attention: over the context axis, for the heads of this device."""
    attend = over_context(kernel, "context", layout.mesh.context)

    def attend_own_heads(query_BTNH, key_BTKH, value_BTKH, segments_BT):
        num_query_heads = query_BTNH.shape[2]
        if num_query_heads != key_BTKH.shape[2] * config.num_gqa_groups:
            # The key/value heads of all queries: take those of the queries that are here.
            first = jax.lax.axis_index("tensor") * num_query_heads
            of_query_N = (first + jnp.arange(num_query_heads)) // config.num_gqa_groups
            key_BTKH, value_BTKH = (_heads(x, of_query_N) for x in (key_BTKH, value_BTKH))
        return attend(query_BTNH, key_BTKH, value_BTKH, segments_BT)

    return attend_own_heads


@jax.custom_vjp
def _heads(x_BTKH: Array, numbers_N: Array) -> Array:
    """Return the heads of these numbers [B, T, N, H]; gradients of a head are summed in float32."""
    return jnp.take(x_BTKH, numbers_N, axis=2)


def _heads_forward(x_BTKH, numbers_N):
    return jnp.take(x_BTKH, numbers_N, axis=2), (x_BTKH.shape, numbers_N)


def _heads_backward(residuals, d_BTNH):
    shape, numbers_N = residuals
    sums = jnp.zeros(shape, jnp.float32).at[:, :, numbers_N].add(d_BTNH.astype(jnp.float32))
    return sums.astype(d_BTNH.dtype), None


_heads.defvjp(_heads_forward, _heads_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_weight(shard: Array, placement: Placement, mesh: MeshShape, dtype: Any) -> Array:
    """Return the part of a matrix that this device computes with, from every device's shard."""
    return _gathered(shard, placement, mesh, dtype)


def _gathered(shard: Array, placement: Placement, mesh: MeshShape, dtype: Any) -> Array:
    weight = shard.astype(dtype)
    dim, columns = placement.dim, placement.columns
    assert dim is not None, "norms are not gathered"
    if columns is not None:
        weight = _take(weight, columns, 1 - dim, placement, mesh)
    elif "tensor" in placement.axes:
        weight = jax.lax.all_gather(weight, "tensor", axis=dim, tiled=True)
    for axis in reversed(_data_axes(placement)):
        weight = _gather_over(axis, weight, dim, placement, mesh)
    return weight


def _gather_forward(shard, placement, mesh, dtype):
    # Not by `gather_weight`: remat takes what that returns for a thing to be kept.
    return _gathered(shard, placement, mesh, dtype), None


def _gather_backward(placement, mesh, dtype, _, d_weight):
    return (scatter_gradient(d_weight, placement, mesh),)


gather_weight.defvjp(_gather_forward, _gather_backward)


def scatter_gradient(d_weight: Array, placement: Placement, mesh: MeshShape) -> Array:
    """Return this device's shard of a matrix's gradient, summed in float32 over who gathered it.

    The axes of `placement.summed_at_last` are left to the end of the step.
    """
    gradient = d_weight.astype(jnp.float32)
    dim, columns = placement.dim, placement.columns
    assert dim is not None, "norms are not gathered"
    for axis in _data_axes(placement):
        gradient = _scatter_over(axis, gradient, dim, placement, mesh)
    if columns is not None:
        return _put_back(gradient, columns, 1 - dim, placement, mesh)
    if "tensor" not in placement.axes:
        return gradient
    if placement.partial:
        return reduce_scatter(gradient, "tensor", dim)
    size = gradient.shape[dim] // mesh.tensor
    return jax.lax.dynamic_slice_in_dim(gradient, jax.lax.axis_index("tensor") * size, size, dim)


def _gather_over(axis: str, weight: Array, dim: int, placement: Placement, mesh: MeshShape):
    for groups in reversed(_ring_groups(axis, placement, mesh)):
        rows = weight if dim == 0 else weight.T
        rows = jax.lax.all_gather(rows, axis, axis_index_groups=groups, tiled=True)
        weight = rows if dim == 0 else rows.T
    return weight


def _scatter_over(axis: str, gradient: Array, dim: int, placement: Placement, mesh: MeshShape):
    for groups in _ring_groups(axis, placement, mesh):
        rows = gradient if dim == 0 else gradient.T
        rows = reduce_scatter(rows, axis, groups=groups)
        gradient = rows if dim == 0 else rows.T
    return gradient


def _ring_groups(axis: str, placement: Placement, mesh: MeshShape) -> list[list[list[int]] | None]:
    """Return who takes part in each of the transfers, ring after ring, that do one over an axis.

    Done at once over several rings of TPUs, XLA makes of a reduce-scatter a sum of the whole on
    every device, of which each then takes its part, and of a gather a sum as well. Rows, that is
    dimension 0, are what it divides best.
    """
    rings = placement.rings if axis == "fsdp" else ()
    if len(rings) < 2:
        return [None]
    numbers = np.arange(mesh.fsdp).reshape(rings)
    return [
        np.moveaxis(numbers, ring, -1).reshape(-1, rings[ring]).tolist()
        for ring in range(len(rings))
    ]


def _data_axes(placement: Placement) -> tuple[str, ...]:
    return tuple(axis for axis in placement.axes if axis != "tensor")


def _take(weight: Array, columns: Columns, dim: int, placement: Placement, mesh: MeshShape):
    """Return this device's columns (dimension `dim`) of all rows that its tensor axis holds."""
    pieces = []
    for piece in columns.pieces:
        taken = jax.lax.slice_in_dim(weight, piece.start, piece.stop, axis=dim)
        filling = [(0, 0), (0, 0)]
        filling[dim] = (0, piece.width - taken.shape[dim])
        pieces.append(jnp.pad(taken, filling))
    of_all = jnp.concatenate(pieces, axis=dim)
    if "tensor" in placement.axes:
        return jax.lax.all_to_all(of_all, "tensor", dim, 1 - dim, tiled=True)
    width = of_all.shape[dim] // mesh.tensor
    first = jax.lax.axis_index("tensor") * width
    return jax.lax.dynamic_slice_in_dim(of_all, first, width, dim)


def _put_back(gradient: Array, columns: Columns, dim: int, placement: Placement, mesh: MeshShape):
    """Return the transpose of `_take`: of all columns, what this device's shard of rows has."""
    if "tensor" in placement.axes:
        of_all = jax.lax.all_to_all(gradient, "tensor", 1 - dim, dim, tiled=True)
    else:
        shape, width = list(gradient.shape), gradient.shape[dim]
        shape[dim] = width * mesh.tensor
        of_all = jax.lax.dynamic_update_slice_in_dim(
            jnp.zeros(shape, gradient.dtype),
            gradient,
            jax.lax.axis_index("tensor") * width,
            dim,
        )
    shape = list(of_all.shape)
    shape[dim] = columns.size
    whole, place = jnp.zeros(shape, gradient.dtype), 0
    for piece in columns.pieces:
        taken = jax.lax.slice_in_dim(of_all, place, place + piece.stop - piece.start, axis=dim)
        where = (slice(None),) * dim + (slice(piece.start, piece.stop),)
        whole = whole.at[where].add(taken)
        place += piece.width
    return whole


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _embed(
    shard: Array, tokens_BT: Array, placement: Placement, mesh: MeshShape, dtype: Any
) -> Array:
    return gather_weight(shard, placement, mesh, dtype)[tokens_BT]


def _embed_forward(shard, tokens_BT, placement, mesh, dtype):
    return _embed(shard, tokens_BT, placement, mesh, dtype), tokens_BT


def _embed_backward(placement, mesh, dtype, tokens_BT, d_x_BTD):
    """Each device of the tensor axis adds up its own part of the tokens, as the loss does."""
    if mesh.tensor > 1:
        own_N = own_tokens(tokens_BT.size, mesh)
        d_x_BTD = jnp.where(own_N.reshape(*tokens_BT.shape, 1), d_x_BTD, 0)
    gradient_VD = add_rows(placement.shape, tokens_BT, d_x_BTD)
    return scatter_gradient(gradient_VD, placement, mesh), None


_embed.defvjp(_embed_forward, _embed_backward)


def own_tokens(num_tokens: int, mesh: MeshShape) -> Array:
    """Return bool [N], which tokens this device of the tensor axis counts, if it computes all."""
    share = -(-num_tokens // mesh.tensor)
    return jnp.arange(num_tokens) // share == jax.lax.axis_index("tensor")


def own_part(x: Array, mesh: MeshShape) -> Array:
    """Return the part of [N, ...] whose tokens this device counts, filled up with zeros."""
    share = -(-x.shape[0] // mesh.tensor)
    filled = jnp.pad(x, ((0, share * mesh.tensor - x.shape[0]), *[(0, 0)] * (x.ndim - 1)))
    return jax.lax.dynamic_slice_in_dim(filled, jax.lax.axis_index("tensor") * share, share)


@jax.custom_vjp
def enter_columns(x: Array) -> Array:
    """Return `x` on its way to the columns of several devices; its gradients are summed."""
    return x


def _psum_tensor(x: Array) -> Array:
    return jax.lax.psum(x, "tensor")


enter_columns.defvjp(lambda x: (x, None), lambda _, d_x: (_psum_tensor(d_x),))


@jax.custom_vjp
def leave_columns(x: Array) -> Array:
    """Return the sum of what the columns of several devices make; gradients pass as they are."""
    return _psum_tensor(x)


leave_columns.defvjp(lambda x: (_psum_tensor(x), None), lambda _, d_x: (d_x,))


def sum_gradients(gradients: Any, layout: Layout) -> Any:
    """Return the gradients summed over the axes that are left, when the whole batch is done."""

    def finish(path: Any, gradient: Array) -> Array:
        axes = layout.placements[path_of_leaf(path)].summed_at_last
        axes = tuple(axis for axis in axes if getattr(layout.mesh, axis) > 1)
        return jax.lax.psum(gradient, axes) if axes else gradient

    return jax.tree_util.tree_map_with_path(finish, gradients)


def squared_norm(gradients: Any, layout: Layout) -> Array:
    """Return the squared global norm of gradients whose shards lie on the devices."""
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    squares = [jnp.sum(jnp.square(gradient)) for _, gradient in leaves]
    by_axes: dict[tuple[str, ...], list[int]] = {}
    for index, (path, _) in enumerate(leaves):
        by_axes.setdefault(layout.placements[path_of_leaf(path)].axes, []).append(index)
    for axes, indices in by_axes.items():
        if axes:
            summed = jax.lax.psum(jnp.stack([squares[index] for index in indices]), axes)
            for index, square in zip(indices, summed, strict=True):
                squares[index] = square
    return sum(squares, jnp.zeros((), jnp.float32))

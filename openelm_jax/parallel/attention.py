"""Attention over the context axis of the mesh.

Legend: B batch, T time (of one device), S keys' length (of all devices), N query heads, K kv
heads, H head dim.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from openelm_jax.model.attention import Attend, CausalAttend


def over_context(kernel: CausalAttend, axis: str = "context", size: int = 1) -> Attend:
    """Return what a model in a `shard_map` calls, each device holding T of its rows' T * `size`.

    Keys, values and segments are gathered over `axis`, so that every query meets the keys that it
    meets on one device; their gradients are summed in float32.
    """

    def attend(query_BTNH, key_BTKH, value_BTKH, positions_BT=None, segments_BT=None):
        assert positions_BT is None, "slots of a cache are not sharded"
        if size == 1:
            segments = None if segments_BT is None else (segments_BT, segments_BT)
            return kernel(query_BTNH, key_BTKH, value_BTKH, segments, 0)
        key_BSKH, value_BSKH = _all(axis, key_BTKH), _all(axis, value_BTKH)
        segments = None
        if segments_BT is not None:
            segments = segments_BT, jax.lax.all_gather(segments_BT, axis, axis=1, tiled=True)
        first = jax.lax.axis_index(axis) * query_BTNH.shape[1]
        return kernel(query_BTNH, key_BSKH, value_BSKH, segments, first)

    return attend


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all(axis: str, x_BTKH: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x_BTKH, axis, axis=1, tiled=True)


def _all_forward(axis, x_BTKH):
    return _all(axis, x_BTKH), None


def _all_backward(axis, _, d_x_BSKH):
    d_x_BTKH = jax.lax.psum_scatter(
        d_x_BSKH.astype(jnp.float32), axis, scatter_dimension=1, tiled=True
    )
    return (d_x_BTKH.astype(d_x_BSKH.dtype),)


_all.defvjp(_all_forward, _all_backward)

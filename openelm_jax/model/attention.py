"""Causal grouped-query attention and the rotary embedding.

Legend: B batch, T time, S keys' length, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]


def attend(
    query_BTNH: jax.Array,
    key_BSKH: jax.Array,
    value_BSKH: jax.Array,
    positions_BT: jax.Array | None = None,
) -> jax.Array:
    """Return softmax(q k^T / sqrt(H)) v [B, T, N, H]; query head j reads kv head j * K // N.

    Without `positions_BT` the queries and keys are the same T tokens. With it, keys stand in
    slots 0..S-1 and a query at position p sees the slots up to p. The softmax is float32.
    """
    if positions_BT is None:
        return jax.nn.dot_product_attention(query_BTNH, key_BSKH, value_BSKH, is_causal=True)
    visible_BTS = jnp.arange(key_BSKH.shape[1]) <= positions_BT[:, :, None]
    return jax.nn.dot_product_attention(
        query_BTNH, key_BSKH, value_BSKH, mask=visible_BTS[:, None]
    )


def rotate(x_BTNH: jax.Array, positions_BT: jax.Array, base: float) -> jax.Array:
    """Return `x` turned by its positions, in float32, cast back (RoPE, rotate-half pairing).

    Dimension i and i + H/2 form a pair with frequency base^(-2i/H). Any position works: there is
    no table. (`rotary_embeddings.py` of CoreNet.)
    """
    half = x_BTNH.shape[-1] // 2
    frequency_h = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BTh = positions_BT[..., None].astype(jnp.float32) * frequency_h
    cos_BT1h, sin_BT1h = jnp.cos(angle_BTh)[:, :, None], jnp.sin(angle_BTh)[:, :, None]
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate(
        [first * cos_BT1h - second * sin_BT1h, second * cos_BT1h + first * sin_BT1h], axis=-1
    )
    return turned.astype(x_BTNH.dtype)

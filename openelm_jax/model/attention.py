"""Causal grouped-query attention and the rotary embedding.

Legend: B batch, T time, S keys' length, N query heads, K kv heads, R queries of a kv head
(N / K times T), H head dim, h half of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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

    Without `positions_BT` the queries and keys are the same T tokens, and the gradient keeps no
    [T, T] matrix. With it, keys stand in slots 0..S-1 and a query at position p sees the slots up
    to p. The softmax is float32.
    """
    if positions_BT is None:
        return _causal(query_BTNH, key_BSKH, value_BSKH)
    visible_BTS = jnp.arange(key_BSKH.shape[1]) <= positions_BT[:, :, None]
    return jax.nn.dot_product_attention(query_BTNH, key_BSKH, value_BSKH, mask=visible_BTS[:, None])


@jax.custom_vjp
def _causal(query_BTNH: jax.Array, key_BTKH: jax.Array, value_BTKH: jax.Array) -> jax.Array:
    return _causal_forward(query_BTNH, key_BTKH, value_BTKH)[0]


def _causal_forward(query_BTNH, key_BTKH, value_BTKH):
    num_tokens, num_kv_heads, head_dim = key_BTKH.shape[1:]
    query_BKRH = _fold(query_BTNH, num_kv_heads)
    key_BKTH, value_BKTH = key_BTKH.transpose(0, 2, 1, 3), value_BTKH.transpose(0, 2, 1, 3)
    scores_BKRT = _product("BKRH,BKTH->BKRT", query_BKRH, key_BKTH) * head_dim**-0.5
    visible_RT = _visible(query_BKRH.shape[2], num_tokens)
    scores_BKRT = jnp.where(visible_RT, scores_BKRT, -jnp.inf)
    highest_BKR1 = scores_BKRT.max(axis=-1, keepdims=True)
    weights_BKRT = jnp.exp(scores_BKRT - highest_BKR1)
    sum_BKR1 = weights_BKRT.sum(axis=-1, keepdims=True)
    mixed_BKRH = _product("BKRT,BKTH->BKRH", weights_BKRT.astype(value_BTKH.dtype), value_BKTH)
    mixed_BKRH = (mixed_BKRH / sum_BKR1).astype(query_BTNH.dtype)
    log_partition_BKR = (highest_BKR1 + jnp.log(sum_BKR1))[..., 0]
    residuals = (query_BKRH, key_BKTH, value_BKTH, mixed_BKRH, log_partition_BKR)
    return _unfold(mixed_BKRH, num_tokens), residuals


def _causal_backward(residuals, d_mixed_BTNH):
    """Make the weights again, transposed: every product is then one that CPUs do fast.

    (The recomputation is FlashAttention's, arXiv 2205.14135, without its tiles.)
    """
    query_BKRH, key_BKTH, value_BKTH, mixed_BKRH, log_partition_BKR = residuals
    num_kv_heads, num_tokens, head_dim = key_BKTH.shape[1:]
    scale = head_dim**-0.5
    d_mixed_BKRH = _fold(d_mixed_BTNH, num_kv_heads)
    scores_BKTR = _product("BKTH,BKRH->BKTR", key_BKTH, query_BKRH) * scale
    visible_TR = _visible(query_BKRH.shape[2], num_tokens).T
    weights_BKTR = jnp.exp(scores_BKTR - log_partition_BKR[:, :, None])
    weights_BKTR = jnp.where(visible_TR, weights_BKTR, 0.0)
    d_weights_BKTR = _product("BKTH,BKRH->BKTR", value_BKTH, d_mixed_BKRH)
    delta_BKR = (d_mixed_BKRH.astype(jnp.float32) * mixed_BKRH.astype(jnp.float32)).sum(axis=-1)
    d_scores_BKTR = (weights_BKTR * (d_weights_BKTR - delta_BKR[:, :, None]) * scale).astype(
        query_BKRH.dtype
    )
    weights_BKTR = weights_BKTR.astype(value_BKTH.dtype)
    d_value_BKTH = jnp.einsum("BKTR,BKRH->BKTH", weights_BKTR, d_mixed_BKRH)
    d_key_BKTH = jnp.einsum("BKTR,BKRH->BKTH", d_scores_BKTR, query_BKRH)
    d_query_BKHR = jnp.einsum("BKHT,BKTR->BKHR", key_BKTH.transpose(0, 1, 3, 2), d_scores_BKTR)
    return (
        _unfold(d_query_BKHR.transpose(0, 1, 3, 2), num_tokens),
        d_key_BKTH.transpose(0, 2, 1, 3),
        d_value_BKTH.transpose(0, 2, 1, 3),
    )


_causal.defvjp(_causal_forward, _causal_backward)


def _product(axes: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(axes, left, right, preferred_element_type=jnp.float32)


def _fold(x_BTNH: jax.Array, num_kv_heads: int) -> jax.Array:
    """Return [B, K, R, H], R the queries of a kv head: its query heads one after the other."""
    batch, num_tokens, num_heads, head_dim = x_BTNH.shape
    group = num_heads // num_kv_heads
    x_BTKGH = x_BTNH.reshape(batch, num_tokens, num_kv_heads, group, head_dim)
    return x_BTKGH.transpose(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, -1, head_dim)


def _unfold(x_BKRH: jax.Array, num_tokens: int) -> jax.Array:
    """Return [B, T, N, H] from what `_fold` made."""
    batch, num_kv_heads, _, head_dim = x_BKRH.shape
    x_BKGTH = x_BKRH.reshape(batch, num_kv_heads, -1, num_tokens, head_dim)
    return x_BKGTH.transpose(0, 3, 1, 2, 4).reshape(batch, num_tokens, -1, head_dim)


def _visible(num_queries: int, num_tokens: int) -> jax.Array:
    """Return bool [R, T]: may folded query r see token t."""
    return jnp.arange(num_tokens) <= (jnp.arange(num_queries) % num_tokens)[:, None]


class Turns(NamedTuple):
    """Cosine and sine of every pair's angle at every position, float32 [B or 1, T, 1, h]."""

    cos: jax.Array
    sin: jax.Array


def turns(positions_BT: jax.Array, head_dim: int, base: float) -> Turns:
    """Return the rotary embedding's turns at `positions_BT`, whatever they are: there is no table.

    Dimension i of a head and i + H/2 form a pair, of frequency base^(-2i/H).
    """
    half = head_dim // 2
    frequency_h = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BT1h = positions_BT[..., None, None].astype(jnp.float32) * frequency_h
    return Turns(jnp.cos(angle_BT1h), jnp.sin(angle_BT1h))


def rotate(x_BTNH: jax.Array, turns: Turns) -> jax.Array:
    """Return `x` turned in float32 and cast back (rotate-half; CoreNet's rotary_embeddings.py)."""
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = [first * turns.cos - second * turns.sin, second * turns.cos + first * turns.sin]
    return jnp.concatenate(turned, axis=-1).astype(x_BTNH.dtype)

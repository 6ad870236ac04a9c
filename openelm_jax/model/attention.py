"""Causal grouped-query attention and the rotary embedding.

Legend: B batch, T time, S keys' length, N query heads, K kv heads, R queries of a kv head
(N / K times T), H head dim, h half of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None], jax.Array]


def attend(
    query_BTNH: jax.Array,
    key_BSKH: jax.Array,
    value_BSKH: jax.Array,
    positions_BT: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """Return softmax(q k^T / sqrt(H)) v [B, T, N, H]; query head j reads kv head j * K // N.

    Without `positions_BT` the queries and keys are the same T tokens, and the gradient keeps no
    [T, T] matrix; a query sees no token of another number in `segments_BT`, where that is given.
    With positions, keys stand in slots 0..S-1 and a query at position p sees the slots up to p.
    The softmax is float32.
    """
    if positions_BT is None:
        return _causal(query_BTNH, key_BSKH, value_BSKH, segments_BT)
    assert segments_BT is None, "slots have no segments"
    visible_BTS = jnp.arange(key_BSKH.shape[1]) <= positions_BT[:, :, None]
    return jax.nn.dot_product_attention(query_BTNH, key_BSKH, value_BSKH, mask=visible_BTS[:, None])


@jax.custom_vjp
def _causal(
    query_BTNH: jax.Array,
    key_BTKH: jax.Array,
    value_BTKH: jax.Array,
    segments_BT: jax.Array | None,
) -> jax.Array:
    return _causal_forward(query_BTNH, key_BTKH, value_BTKH, segments_BT)[0]


def _causal_forward(query_BTNH, key_BTKH, value_BTKH, segments_BT):
    num_tokens, num_kv_heads, head_dim = key_BTKH.shape[1:]
    query_BKRH = _fold(query_BTNH, num_kv_heads)
    key_BKTH, value_BKTH = key_BTKH.transpose(0, 2, 1, 3), value_BTKH.transpose(0, 2, 1, 3)
    scores_BKRT = _product("BKRH,BKTH->BKRT", query_BKRH, key_BKTH) * head_dim**-0.5
    visible = _visible(query_BKRH.shape[2], num_tokens, segments_BT)
    scores_BKRT = jnp.where(visible, scores_BKRT, -jnp.inf)
    highest_BKR1 = scores_BKRT.max(axis=-1, keepdims=True)
    weights_BKRT = jnp.exp(scores_BKRT - highest_BKR1)
    sum_BKR1 = weights_BKRT.sum(axis=-1, keepdims=True)
    mixed_BKRH = _product("BKRT,BKTH->BKRH", weights_BKRT.astype(value_BTKH.dtype), value_BKTH)
    mixed_BKRH = (mixed_BKRH / sum_BKR1).astype(query_BTNH.dtype)
    log_partition_BKR = (highest_BKR1 + jnp.log(sum_BKR1))[..., 0]
    residuals = (query_BKRH, key_BKTH, value_BKTH, segments_BT, mixed_BKRH, log_partition_BKR)
    return _unfold(mixed_BKRH, num_tokens), residuals


def _causal_backward(residuals, d_mixed_BTNH):
    """Make the weights again, transposed: every product is then one that CPUs do fast.

    (The recomputation is FlashAttention's, arXiv 2205.14135, without its tiles.)
    """
    query_BKRH, key_BKTH, value_BKTH, segments_BT, mixed_BKRH, log_partition_BKR = residuals
    num_kv_heads, num_tokens, head_dim = key_BKTH.shape[1:]
    scale = head_dim**-0.5
    d_mixed_BKRH = _fold(d_mixed_BTNH, num_kv_heads)
    scores_BKTR = _product("BKTH,BKRH->BKTR", key_BKTH, query_BKRH) * scale
    visible = _visible(query_BKRH.shape[2], num_tokens, segments_BT).swapaxes(-2, -1)
    weights_BKTR = jnp.exp(scores_BKTR - log_partition_BKR[:, :, None])
    weights_BKTR = jnp.where(visible, weights_BKTR, 0.0)
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
        None,
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


def _visible(num_queries: int, num_tokens: int, segments_BT: jax.Array | None) -> jax.Array:
    """Return bool [R, T], with segments [B, 1, R, T]: may folded query r see token t."""
    visible_RT = jnp.arange(num_tokens) <= (jnp.arange(num_queries) % num_tokens)[:, None]
    if segments_BT is None:
        return visible_RT
    segments_BR = jnp.tile(segments_BT, (1, num_queries // num_tokens))
    return visible_RT & (segments_BR[:, None, :, None] == segments_BT[:, None, None, :])


def segments_of(tokens_BT: jax.Array, bos_id: int) -> jax.Array:
    """Return the number of each token's document in its row, int32 [B, T]; `bos_id` begins one.

    What stands before the first is the end of a document and has number 0.
    """
    return jnp.cumsum(tokens_BT == bos_id, axis=1, dtype=jnp.int32)


def positions_in(segments_BT: jax.Array) -> jax.Array:
    """Return int32 [B, T], the tokens of its own segment that stand before each token."""
    index_T = jnp.arange(segments_BT.shape[1])
    begins_BT = jnp.diff(segments_BT, axis=1, prepend=segments_BT[:, :1]) != 0
    return index_T - jax.lax.cummax(jnp.where(begins_BT, index_T, 0), axis=1)


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

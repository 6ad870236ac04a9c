"""Causal grouped-query attention and the rotary embedding.

Legend: B batch, T time, S keys' length, N query heads, K kv heads, R queries of a kv head
(N / K times T), M kv heads of all rows (B times K), H head dim, h half of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]
"""What a decoder attends with; `attend` says what it computes."""
Segments = tuple[jax.Array, jax.Array]
"""Number of each query's document [B, T], and of each key's [B, S]."""
CausalAttend = Callable[
    [jax.Array, jax.Array, jax.Array, Segments | None, jax.Array | int], jax.Array
]
"""What a kernel is; `causal_attend` says what it computes."""

OUT = "attention_out"
LOG_PARTITION = "attention_log_partition"
"""Names of what a kernel's gradient needs besides query, key and value (`checkpoint_name`): a
remat policy that keeps both computes no attention again."""


def attend(
    query_BTNH: jax.Array,
    key_BTKH: jax.Array,
    value_BTKH: jax.Array,
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """Return softmax(q k^T / sqrt(H)) v [B, T, N, H] of T tokens that see those up to themselves.

    Query head j reads kv head j * K // N. A query sees no token of another number in `segments_BT`,
    where that is given. The softmax is float32, and the gradient keeps no [T, T] matrix.
    """
    segments = None if segments_BT is None else (segments_BT, segments_BT)
    return causal_attend(query_BTNH, key_BTKH, value_BTKH, segments)


def attend_slots(
    query_BTNH: jax.Array, key_MSH: jax.Array, value_MSH: jax.Array, positions_BT: jax.Array
) -> jax.Array:
    """Return what `attend` does of keys in slots: a query at position p sees slots 0 to p."""
    batch_size, num_tokens, num_heads, head_dim = query_BTNH.shape
    num_kv_heads = len(key_MSH) // batch_size
    query_BKRH = _fold(query_BTNH, num_kv_heads)
    query_MRH = query_BKRH.reshape(len(key_MSH), -1, head_dim)
    scores_MRS = _product("MRH,MSH->MRS", query_MRH, key_MSH) * head_dim**-0.5
    positions_BR = jnp.tile(positions_BT, (1, num_heads // num_kv_heads))
    visible_BRS = jnp.arange(key_MSH.shape[1]) <= positions_BR[:, :, None]
    visible_MRS = jnp.repeat(visible_BRS, num_kv_heads, axis=0)
    scores_MRS = jnp.where(visible_MRS, scores_MRS, -jnp.inf)
    weights_MRS = jnp.exp(scores_MRS - scores_MRS.max(axis=-1, keepdims=True))
    mixed_MRH = _product("MRS,MSH->MRH", weights_MRS.astype(value_MSH.dtype), value_MSH)
    mixed_MRH = (mixed_MRH / weights_MRS.sum(axis=-1, keepdims=True)).astype(query_BTNH.dtype)
    return _unfold(mixed_MRH.reshape(query_BKRH.shape), num_tokens)


def causal_attend(
    query_BTNH: jax.Array,
    key_BSKH: jax.Array,
    value_BSKH: jax.Array,
    segments: Segments | None = None,
    first: jax.Array | int = 0,
) -> jax.Array:
    """Return softmax(q k^T / sqrt(H)) v [B, T, N, H] of queries that are T of the S tokens.

    Query t is token `first` + t and sees the tokens up to itself, of its own segment where
    `segments` are given. The gradient keeps no [T, S] matrix. Runs on every platform.
    """
    return _causal(query_BTNH, key_BSKH, value_BSKH, segments, first)


@jax.custom_vjp
def _causal(query_BTNH, key_BSKH, value_BSKH, segments, first):
    return _causal_forward(query_BTNH, key_BSKH, value_BSKH, segments, first)[0]


def _causal_forward(query_BTNH, key_BSKH, value_BSKH, segments, first):
    num_queries = query_BTNH.shape[1]
    num_keys, num_kv_heads, head_dim = key_BSKH.shape[1:]
    query_BKRH = _fold(query_BTNH, num_kv_heads)
    key_BKSH, value_BKSH = key_BSKH.transpose(0, 2, 1, 3), value_BSKH.transpose(0, 2, 1, 3)
    scores_BKRS = _product("BKRH,BKSH->BKRS", query_BKRH, key_BKSH) * head_dim**-0.5
    group = query_BTNH.shape[2] // num_kv_heads
    visible = _visible(group, num_queries, num_keys, segments, first)
    scores_BKRS = jnp.where(visible, scores_BKRS, -jnp.inf)
    highest_BKR1 = scores_BKRS.max(axis=-1, keepdims=True)
    weights_BKRS = jnp.exp(scores_BKRS - highest_BKR1)
    sum_BKR1 = weights_BKRS.sum(axis=-1, keepdims=True)
    mixed_BKRH = _product("BKRS,BKSH->BKRH", weights_BKRS.astype(value_BSKH.dtype), value_BKSH)
    mixed_BKRH = checkpoint_name((mixed_BKRH / sum_BKR1).astype(query_BTNH.dtype), OUT)
    log_partition_BKR = checkpoint_name((highest_BKR1 + jnp.log(sum_BKR1))[..., 0], LOG_PARTITION)
    residuals = (
        *(query_BKRH, key_BKSH, value_BKSH, segments, first),
        *(mixed_BKRH, log_partition_BKR),
    )
    return _unfold(mixed_BKRH, num_queries), residuals


def _causal_backward(residuals, d_mixed_BTNH):
    """Make the weights again, transposed: every product is then one that CPUs do fast.

    (The recomputation is FlashAttention's, arXiv 2205.14135, without its tiles.)
    """
    query_BKRH, key_BKSH, value_BKSH, segments, first, mixed_BKRH, log_partition_BKR = residuals
    num_queries, num_heads = d_mixed_BTNH.shape[1:3]
    num_kv_heads, num_keys, head_dim = key_BKSH.shape[1:]
    scale = head_dim**-0.5
    d_mixed_BKRH = _fold(d_mixed_BTNH, num_kv_heads)
    scores_BKSR = _product("BKSH,BKRH->BKSR", key_BKSH, query_BKRH) * scale
    visible = _visible(num_heads // num_kv_heads, num_queries, num_keys, segments, first)
    weights_BKSR = jnp.exp(scores_BKSR - log_partition_BKR[:, :, None])
    weights_BKSR = jnp.where(visible.swapaxes(-2, -1), weights_BKSR, 0.0)
    d_weights_BKSR = _product("BKSH,BKRH->BKSR", value_BKSH, d_mixed_BKRH)
    delta_BKR = (d_mixed_BKRH.astype(jnp.float32) * mixed_BKRH.astype(jnp.float32)).sum(axis=-1)
    d_scores_BKSR = (weights_BKSR * (d_weights_BKSR - delta_BKR[:, :, None]) * scale).astype(
        query_BKRH.dtype
    )
    weights_BKSR = weights_BKSR.astype(value_BKSH.dtype)
    d_value_BKSH = jnp.einsum("BKSR,BKRH->BKSH", weights_BKSR, d_mixed_BKRH)
    d_key_BKSH = jnp.einsum("BKSR,BKRH->BKSH", d_scores_BKSR, query_BKRH)
    d_query_BKHR = jnp.einsum("BKHS,BKSR->BKHR", key_BKSH.transpose(0, 1, 3, 2), d_scores_BKSR)
    return (
        _unfold(d_query_BKHR.transpose(0, 1, 3, 2), num_queries),
        d_key_BKSH.transpose(0, 2, 1, 3),
        d_value_BKSH.transpose(0, 2, 1, 3),
        None,
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


def _visible(
    group: int, num_queries: int, num_keys: int, segments: Segments | None, first: jax.Array | int
) -> jax.Array:
    """Return bool [R, S], with segments [B, 1, R, S]: may folded query r see token s."""
    index_R = jnp.arange(group * num_queries) % num_queries
    visible_RS = jnp.arange(num_keys) <= (first + index_R)[:, None]
    if segments is None:
        return visible_RS
    query_BR = jnp.tile(segments[0], (1, group))
    return visible_RS & (query_BR[:, None, :, None] == segments[1][:, None, None, :])


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

"""The kernels that compute attention on accelerators, each with the manners of `causal_attend`.

Legend: B batch, T time (queries), S keys' length, N query heads, K kv heads, G query heads of a kv
head, H head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from openelm_jax.model.attention import LOG_PARTITION, OUT, Segments

LANES = 128
"""Columns of a TPU's vector register: blocks of splash are multiples."""


def splash_attend(
    largest: tuple[int, int],
    interpret: bool,
    query_BTNH: jax.Array,
    key_BSKH: jax.Array,
    value_BSKH: jax.Array,
    segments: Segments | None = None,
    first: jax.Array | int = 0,
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    num_queries, num_heads, head_dim = query_BTNH.shape[1:]
    num_keys = key_BSKH.shape[1]
    kernel = _splash_kernel(num_heads, num_queries, num_keys, largest, interpret)
    if num_keys != num_queries:
        kernel = _rows_of(kernel, first // num_queries, num_keys // num_queries)
    query_BTNH = (query_BTNH * head_dim**-0.5).astype(query_BTNH.dtype)
    heads_first = [x.transpose(0, 2, 1, 3) for x in (query_BTNH, key_BSKH, value_BSKH)]
    ids = None if segments is None else SegmentIds(*segments)
    return _named(_splash_rows, (kernel, ids), *heads_first).transpose(0, 2, 1, 3)


def _splash_rows(query_BNTH, key_BKSH, value_BKSH, kernel, ids):
    rows = jax.vmap(kernel, in_axes=(0, 0, 0, None if ids is None else 0))
    return rows(query_BNTH, key_BKSH, value_BKSH, ids)


@functools.lru_cache(maxsize=256)
def _splash_kernel(
    num_heads: int, num_queries: int, num_keys: int, largest: tuple[int, int], interpret: bool
) -> Any:
    """Return the kernel of all S queries, made to be cut into S / T devices' parts."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        BlockSizes,
        CausalMask,
        MultiHeadMask,
        make_splash_mha,
    )

    block_q, block_kv = block_of(num_queries, largest[0]), block_of(num_keys, largest[1])
    compute = block_of(block_kv, 512)
    # The fused kernel reads queries and keys once, but writes a gradient of the queries for each
    # block of keys, in the compute type: more than two cost memory and precision.
    fused = num_keys <= 2 * block_kv
    blocks = BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=compute,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=compute,
        block_q_dq=None if fused else block_q,
        block_kv_dq=None if fused else compute,
        use_fused_bwd_kernel=fused,
    )
    # The tables of blocks must be arrays, not tracers of the step that asked first.
    with jax.ensure_compile_time_eval():
        kernel = make_splash_mha(
            MultiHeadMask([CausalMask((num_keys, num_keys))] * num_heads),
            block_sizes=blocks,
            head_shards=1,
            q_seq_shards=num_keys // num_queries,
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, kernel)


def _rows_of(kernel: Any, part: jax.Array | int, parts: int) -> Any:
    """Return the kernel of one part of the queries, as `manual_sharding_spec` would shard it.

    Its tables of blocks are [1, blocks of queries, blocks of keys], its positions [queries].
    """

    def cut(table):
        axis = 1 if table.ndim == 3 else 0
        size = table.shape[axis] // parts
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(table), part * size, size, axis)

    return jax.tree.map(cut, kernel)


def block_of(length: int, largest: int) -> int:
    """Return the largest block up to `largest` that divides `length`."""
    block = largest
    while length % block:
        block //= 2
    assert block >= LANES, f"no block of {LANES} or more divides {length}"
    return block


def cudnn_attend(query_BTNH, key_BSKH, value_BSKH, segments=None, first=0):
    assert segments is None
    assert query_BTNH.shape[1] == key_BSKH.shape[1], "cuDNN knows no first query but 0"
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    return _named(attend, (), query_BTNH, key_BSKH, value_BSKH)


def triton_attend(interpret, query_BTNH, key_BSKH, value_BSKH, segments=None, first=0):
    from jax.experimental.pallas.ops.gpu import attention as pallas

    num_queries, num_heads, head_dim = query_BTNH.shape[1:]
    assert num_queries == key_BSKH.shape[1], "Pallas knows no first query but 0"
    rows = 64 * 64 // head_dim  # as many registers for a block's gradients at either head_dim
    blocks = pallas.BlockSizes(
        *(128, 64), block_q_dkv=rows, block_kv_dkv=rows, block_q_dq=rows, block_kv_dq=rows
    )

    def attend(query_BTNH, key_BSNH, value_BSNH, segments_BT):
        return pallas.mha(
            *(query_BTNH, key_BSNH, value_BSNH, segments_BT),
            sm_scale=head_dim**-0.5,
            causal=True,
            block_sizes=blocks,
            interpret=interpret,
        )

    group = num_heads // key_BSKH.shape[2]
    key_BSNH, value_BSNH = _repeat(group, key_BSKH), _repeat(group, value_BSKH)
    segments_BT = None if segments is None else segments[0]
    return _named(attend, (segments_BT,), query_BTNH, key_BSNH, value_BSNH)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _named(
    attend: Callable[..., jax.Array], constants: tuple[Any, ...], *qkv: jax.Array
) -> jax.Array:
    """Return attend(*qkv, *constants), naming what its gradient keeps besides query, key, value.

    (Splash can name it itself, but inside a `jit` where remat finds it too late to spare the
    kernel.)
    """
    return attend(*qkv, *constants)


def _named_forward(attend, constants, *qkv):
    mixed, pull_back = jax.vjp(lambda *qkv: attend(*qkv, *constants), *qkv)
    named = checkpoint_name(mixed, OUT)

    def name(kept):
        if kept is mixed:
            return named
        if any(kept is x for x in qkv) or not jnp.issubdtype(kept.dtype, jnp.floating):
            return kept
        return checkpoint_name(kept, LOG_PARTITION)

    return named, jax.tree.map(name, pull_back)


def _named_backward(attend, pull_back, d_mixed):
    return None, *pull_back(d_mixed)


_named.defvjp(_named_forward, _named_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _repeat(group: int, x_BSKH: jax.Array) -> jax.Array:
    """Return [B, S, N, H], each kv head `group` times; the gradients are summed in float32."""
    return jnp.repeat(x_BSKH, group, axis=2)


def _repeat_forward(group, x_BSKH):
    return _repeat(group, x_BSKH), None


def _repeat_backward(group, _, d_x_BSNH):
    batch, num_keys, num_heads, head_dim = d_x_BSNH.shape
    d_x_BSKGH = d_x_BSNH.reshape(batch, num_keys, num_heads // group, group, head_dim)
    return (d_x_BSKGH.sum(axis=3, dtype=jnp.float32).astype(d_x_BSNH.dtype),)


_repeat.defvjp(_repeat_forward, _repeat_backward)

"""Cross-entropy and z-loss by chunks of tokens, so that the full logits never exist.

Legend: N tokens (batch times time), C tokens of a chunk, D model, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class LossSums(NamedTuple):
    """Weighted sums over tokens: cross-entropy in nats, and squared log-partition."""

    cross_entropy: jax.Array
    squared_log_partition: jax.Array


class HeadSharding(NamedTuple):
    """How the head's shards become the matrix, and its gradient [V, D] their gradients."""

    gather: Callable[[jax.Array, Any], jax.Array] = lambda head_VD, dtype: head_VD.astype(dtype)
    scatter: Callable[[jax.Array], jax.Array] = lambda d_head_VD: d_head_VD


WHOLE = HeadSharding()


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def chunked_loss(
    hidden_ND: jax.Array,
    head_VD: jax.Array,
    targets_N: jax.Array,
    weights_N: jax.Array,
    z_loss: float,
    chunk: int,
    sharding: HeadSharding = WHOLE,
) -> tuple[jax.Array, LossSums]:
    """Return (cross-entropy + z_loss * squared log-partition, its two parts), summed with weights.

    `weights_N` is float32: 1 / (number of counted tokens) gives the mean, 0 leaves a token out of
    both parts. Only the first value may be differentiated. All arithmetic on logits is float32.

    The gradient is made chunk by chunk on the way forward, when the logits are at hand: three
    products with the head instead of the four that recomputing would take. (The losses are those
    of CoreNet's `cross_entropy.py`, except that there padding adds a constant to the z-loss.)
    `head_VD` may be a shard of it; its gradient is then that of the shard, summed in float32.
    """
    sums, _, _ = _scan_chunks(
        hidden_ND, head_VD, targets_N, weights_N, z_loss, chunk, sharding, False
    )
    return sums.cross_entropy + z_loss * sums.squared_log_partition, sums


def _forward(hidden_ND, head_VD, targets_N, weights_N, z_loss, chunk, sharding):
    sums, d_hidden_ND, d_head_VD = _scan_chunks(
        hidden_ND, head_VD, targets_N, weights_N, z_loss, chunk, sharding, True
    )
    total = sums.cross_entropy + z_loss * sums.squared_log_partition
    return (total, sums), (d_hidden_ND, d_head_VD)


def _backward(z_loss, chunk, sharding, gradients, cotangents):
    d_hidden_ND, d_head_VD = gradients
    d_total, _ = cotangents
    return (
        (d_hidden_ND * d_total).astype(d_hidden_ND.dtype),
        (d_head_VD * d_total).astype(d_head_VD.dtype),
        None,
        None,
    )


chunked_loss.defvjp(_forward, _backward)


def _scan_chunks(hidden_ND, head_VD, targets_N, weights_N, z_loss, chunk, sharding, with_gradient):
    """Return the sums and, if asked for, the gradients of the total by hidden and head."""
    num_tokens, model_dim = hidden_ND.shape
    chunk = min(chunk, num_tokens)
    padding = -num_tokens % chunk
    if padding:
        hidden_ND = jnp.pad(hidden_ND, ((0, padding), (0, 0)))
        targets_N = jnp.pad(targets_N, (0, padding))
        weights_N = jnp.pad(weights_N, (0, padding))
    compute_VD = sharding.gather(head_VD, hidden_ND.dtype)

    def one_chunk(carry, inputs):
        sums, d_head_VD = carry
        hidden_CD, target_C, weight_C = inputs
        logits_CV = jnp.einsum(
            "CD,VD->CV", hidden_CD, compute_VD, preferred_element_type=jnp.float32
        )
        log_partition_C = jax.nn.logsumexp(logits_CV, axis=-1)
        target_logit_C = jnp.take_along_axis(logits_CV, target_C[:, None], axis=-1)[:, 0]
        sums = LossSums(
            sums.cross_entropy + jnp.sum(weight_C * (log_partition_C - target_logit_C)),
            sums.squared_log_partition + jnp.sum(weight_C * jnp.square(log_partition_C)),
        )
        if not with_gradient:
            return (sums, d_head_VD), None
        probability_CV = jnp.exp(logits_CV - log_partition_C[:, None])
        is_target_CV = target_C[:, None] == jnp.arange(logits_CV.shape[1])
        scale_C1 = (weight_C * (1 + 2 * z_loss * log_partition_C))[:, None]
        d_logits_CV = scale_C1 * probability_CV - jnp.where(is_target_CV, weight_C[:, None], 0.0)
        d_logits_CV = d_logits_CV.astype(hidden_CD.dtype)
        d_hidden_CD = jnp.einsum("CV,VD->CD", d_logits_CV, compute_VD)
        d_head_VD += jnp.einsum(
            "CV,CD->VD", d_logits_CV, hidden_CD, preferred_element_type=jnp.float32
        )
        return (sums, d_head_VD), d_hidden_CD

    zero = jnp.zeros((), jnp.float32)
    d_head_VD = jnp.zeros(compute_VD.shape, jnp.float32) if with_gradient else None
    (sums, d_head_VD), d_hidden = jax.lax.scan(
        one_chunk,
        (LossSums(zero, zero), d_head_VD),
        (
            hidden_ND.reshape(-1, chunk, model_dim),
            targets_N.reshape(-1, chunk),
            weights_N.reshape(-1, chunk),
        ),
    )
    if not with_gradient:
        return sums, None, None
    assert d_head_VD is not None
    d_hidden_ND = d_hidden.reshape(-1, model_dim)[:num_tokens]
    return sums, d_hidden_ND, sharding.scatter(d_head_VD).astype(head_VD.dtype)

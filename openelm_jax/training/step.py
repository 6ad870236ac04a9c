"""One update, and one validation batch: pure functions of state and batch.

Legend: A accumulation parts, B batch, T time, L = T + 1 tokens of a row, N = B times T, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from openelm_jax.config import OptimizerConfig, TrainingConfig
from openelm_jax.model.attention import segments_of
from openelm_jax.model.decoder import Decoder, Params, head_of
from openelm_jax.training.loss import LossSums, chunked_loss
from openelm_jax.training.state import TrainState


class Batch(NamedTuple):
    """Rows of tokens, int32 [B, L]; which of the L - 1 targets count, bool [B, T]."""

    tokens_BL: jax.Array
    counted_BT: jax.Array


class StepMetrics(NamedTuple):
    """Float32 scalars of one update, all before it: losses are means over the counted tokens."""

    loss: jax.Array
    z_loss: jax.Array
    grad_norm: jax.Array
    tokens: jax.Array


TrainStep = Callable[[TrainState, Batch, jax.Array], tuple[TrainState, StepMetrics]]


def make_train_step(
    decoder: Decoder,
    optimizer: optax.GradientTransformation,
    training: TrainingConfig,
    clip_norm: float = OptimizerConfig.clip_norm,
    bos_id: int | None = None,
) -> TrainStep:
    """Return the update (state, batch, learning rate) -> (state, metrics), to be jitted.

    The loss is the mean over all counted tokens of the global batch, also when it is cut into
    `training.accumulation` parts; gradients are clipped to a global norm of `clip_norm`. With
    `bos_id` the documents of a row, each begun by that token, are kept apart; leave the targets
    that are `bos_id` uncounted then.
    """

    def mean_loss(params: Params, batch: Batch, num_counted: jax.Array):
        weights_BT = batch.counted_BT.astype(jnp.float32) / num_counted
        return _loss(decoder, params, batch.tokens_BL, weights_BT, training, bos_id)

    def train_step(state: TrainState, batch: Batch, learning_rate: jax.Array):
        num_counted = jnp.maximum(batch.counted_BT.sum(dtype=jnp.float32), 1)
        gradient = jax.value_and_grad(mean_loss, has_aux=True)

        def add_part(carry, part: Batch):
            (_, sums), gradients = gradient(state.params, part, num_counted)
            return jax.tree.map(jnp.add, carry, (sums, gradients)), None

        if training.accumulation == 1:
            (_, sums), gradients = gradient(state.params, batch, num_counted)
        else:
            parts = jax.tree.map(
                lambda x: x.reshape(training.accumulation, -1, *x.shape[1:]), batch
            )
            zero = jnp.zeros((), jnp.float32)
            start = (LossSums(zero, zero), jax.tree.map(jnp.zeros_like, state.params))
            (sums, gradients), _ = jax.lax.scan(add_part, start, parts)

        grad_norm = optax.global_norm(gradients)
        shrink = jnp.minimum(1.0, clip_norm / jnp.maximum(grad_norm, 1e-30))
        gradients = jax.tree.map(lambda g: g * shrink, gradients)
        updates, moments = optimizer.update(gradients, state.moments, state.params)
        params = jax.tree.map(lambda p, u: p - learning_rate * u, state.params, updates)
        metrics = StepMetrics(
            loss=sums.cross_entropy,
            z_loss=training.z_loss * sums.squared_log_partition,
            grad_norm=grad_norm,
            tokens=num_counted,
        )
        return TrainState(state.step + 1, params, moments), metrics

    return train_step


def make_validation_step(
    decoder: Decoder, training: TrainingConfig
) -> Callable[[Params, Batch], jax.Array]:
    """Return (params, batch) -> summed cross-entropy in nats of the counted tokens, float32."""

    def validation_step(params: Params, batch: Batch) -> jax.Array:
        weights_BT = batch.counted_BT.astype(jnp.float32)
        _, sums = _loss(decoder, params, batch.tokens_BL, weights_BT, training)
        return sums.cross_entropy

    return validation_step


def _loss(
    decoder: Decoder,
    params: Params,
    tokens_BL: jax.Array,
    weights_BT: jax.Array,
    training: TrainingConfig,
    bos_id: int | None = None,
) -> tuple[jax.Array, LossSums]:
    tokens_BT = tokens_BL[:, :-1]
    segments_BT = None if bos_id is None else segments_of(tokens_BT, bos_id)
    hidden_BTD, _ = decoder.apply(
        {"params": params}, tokens_BT, segments_BT=segments_BT, method="hidden"
    )
    head_VD = head_of(decoder.config, params)
    return chunked_loss(
        hidden_BTD.reshape(-1, hidden_BTD.shape[-1]),
        head_VD,
        tokens_BL[:, 1:].reshape(-1),
        weights_BT.reshape(-1),
        training.z_loss,
        training.loss_chunk or 1024,
    )

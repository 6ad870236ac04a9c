"""One update, and one validation batch: pure functions of state and batch.

On a mesh the whole of it runs inside one `jax.shard_map`: each device computes with its own rows,
tokens, heads and columns, and every exchange between devices is one that `parallel` writes out.

Legend: A accumulation parts, B batch, T time, L = T + 1 tokens of a row, N = B times T, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from openelm_jax.config import OptimizerConfig, TrainingConfig
from openelm_jax.model.attention import positions_in, segments_of
from openelm_jax.model.decoder import Decoder, Params, head_of
from openelm_jax.model.memory import loss_chunk_size
from openelm_jax.parallel.collectives import (
    enter_columns,
    gather_weight,
    own_part,
    scatter_gradient,
    squared_norm,
    sum_gradients,
)
from openelm_jax.parallel.mesh import ROW_AXES, MeshShape
from openelm_jax.parallel.sharding import Layout, layout_on, make_layout, state_specs
from openelm_jax.training.loss import WHOLE, HeadSharding, LossSums, chunked_loss
from openelm_jax.training.state import TrainState

COUNTED_OVER = ("replica", "fsdp", "context", "tensor")
"""The axes whose devices each have a part of the loss."""


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
    mesh: Mesh | None = None,
    loss_chunk: int | None = None,
) -> TrainStep:
    """Return the update (state, batch, learning rate) -> (state, metrics), to be jitted.

    The loss is the mean over all counted tokens of the global batch, also when it is cut into
    `training.accumulation` parts; gradients are clipped to a global norm of `clip_norm`. With
    `bos_id` the documents of a row, each begun by that token, are kept apart; leave the targets
    that are `bos_id` uncounted then. With a `mesh` the decoder is one that was made for it, state
    and batch are global arrays, and each device cuts its own rows into parts. Logits exist for
    `loss_chunk` tokens of a device at a time, or `training.loss_chunk`.
    """
    layout = _layout(decoder, mesh)
    chunk = loss_chunk or training.loss_chunk

    def mean_loss(params: Params, batch: Batch, num_counted: jax.Array):
        weights_BT = batch.counted_BT.astype(jnp.float32) / num_counted
        return _loss(
            decoder, params, batch.tokens_BL, weights_BT, training.z_loss, layout, chunk, bos_id
        )

    def train_step(state: TrainState, batch: Batch, learning_rate: jax.Array):
        num_counted = _sum(batch.counted_BT.sum(dtype=jnp.float32), ROW_AXES, layout)
        num_counted = jnp.maximum(num_counted, 1)
        gradient = jax.value_and_grad(mean_loss, has_aux=True)

        def add_part(carry, part: Batch):
            (_, sums), gradients = gradient(state.params, part, num_counted)
            if mesh is not None:
                # Else XLA adds up whole gradients and scatters their sum, which must fit then.
                gradients = jax.lax.optimization_barrier(gradients)
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
        sums = jax.tree.map(lambda part: _sum(part, COUNTED_OVER, layout), sums)
        gradients = sum_gradients(gradients, layout)

        grad_norm = jnp.sqrt(squared_norm(gradients, layout))
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

    if mesh is None:
        return train_step

    def on_mesh(state: TrainState, batch: Batch, learning_rate: jax.Array):
        specs = state_specs(layout, state)
        rows, whole = PartitionSpec(ROW_AXES), PartitionSpec()
        return jax.shard_map(
            train_step,
            mesh=mesh,
            in_specs=(specs, rows, whole),
            out_specs=(specs, whole),
            check_vma=False,
        )(state, batch, learning_rate)

    return on_mesh


def make_validation_step(
    decoder: Decoder,
    training: TrainingConfig,
    mesh: Mesh | None = None,
    loss_chunk: int | None = None,
) -> Callable[[Params, Batch], jax.Array]:
    """Return (params, batch) -> summed cross-entropy in nats of the counted tokens, float32."""
    layout = _layout(decoder, mesh)
    chunk = loss_chunk or training.loss_chunk

    def validation_step(params: Params, batch: Batch) -> jax.Array:
        weights_BT = batch.counted_BT.astype(jnp.float32)
        _, sums = _loss(
            decoder, params, batch.tokens_BL, weights_BT, training.z_loss, layout, chunk
        )
        return _sum(sums.cross_entropy, COUNTED_OVER, layout)

    if mesh is None:
        return validation_step

    def on_mesh(params: Params, batch: Batch) -> jax.Array:
        rows = PartitionSpec(ROW_AXES)
        return jax.shard_map(
            validation_step,
            mesh=mesh,
            in_specs=(state_specs(layout, params), rows),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(params, batch)

    return on_mesh


def _layout(decoder: Decoder, mesh: Mesh | None) -> Layout:
    if mesh is None:
        return make_layout(decoder.config, MeshShape())
    return layout_on(decoder.config, mesh)


def _sum(x: jax.Array, axes: tuple[str, ...], layout: Layout) -> jax.Array:
    axes = tuple(axis for axis in axes if getattr(layout.mesh, axis) > 1)
    return jax.lax.psum(x, axes) if axes else x


def _loss(
    decoder: Decoder,
    params: Params,
    tokens_BL: jax.Array,
    weights_BT: jax.Array,
    z_loss: float,
    layout: Layout,
    chunk: int | None,
    bos_id: int | None = None,
) -> tuple[jax.Array, LossSums]:
    """Return the loss of this device's share of the tokens, and its two parts."""
    tokens_BT, targets_BT = tokens_BL[:, :-1], tokens_BL[:, 1:]
    segments_BT = None if bos_id is None else segments_of(tokens_BT, bos_id)
    positions_BT = None
    if layout.mesh.context > 1:
        length = tokens_BT.shape[1] // layout.mesh.context
        first = jax.lax.axis_index("context") * length
        own = partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=length, axis=1)
        index_1T = jnp.arange(tokens_BT.shape[1])[None]
        positions_BT = own(index_1T if segments_BT is None else positions_in(segments_BT))
        segments_BT = None if segments_BT is None else own(segments_BT)
        tokens_BT, targets_BT, weights_BT = map(own, (tokens_BT, targets_BT, weights_BT))
    hidden_BTD, _ = decoder.apply(
        {"params": params},
        tokens_BT,
        positions_BT=positions_BT,
        segments_BT=segments_BT,
        method="hidden",
    )
    hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    targets_N, weights_N = targets_BT.reshape(-1), weights_BT.reshape(-1)
    if layout.mesh.tensor > 1:  # all of them have all tokens: each takes a part
        hidden_ND = own_part(enter_columns(hidden_ND), layout.mesh)
        targets_N, weights_N = (own_part(x, layout.mesh) for x in (targets_N, weights_N))
    return chunked_loss(
        hidden_ND,
        head_of(decoder.config, params),
        targets_N,
        weights_N,
        z_loss,
        chunk or loss_chunk_size(decoder.config, targets_N.size),
        _head_sharding(layout),
    )


def _head_sharding(layout: Layout) -> HeadSharding:
    placement = layout.placements["embedding"]
    if not placement.axes:
        return WHOLE
    return HeadSharding(
        gather=lambda head, dtype: gather_weight(head, placement, layout.mesh, dtype),
        scatter=lambda d_head: scatter_gradient(d_head, placement, layout.mesh),
    )

"""What an experiment computes on a mesh: the step and all that it is made of.

`train` runs it, `plan` compiles it for devices that are not here, `benchmark` measures it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from openelm_jax.config import Experiment
from openelm_jax.model.decoder import Decoder, Params, init_params
from openelm_jax.model.memory import Remat
from openelm_jax.parallel.attention import Kernel, choose_kernel
from openelm_jax.parallel.collectives import make_attend, make_collectives
from openelm_jax.parallel.memory import loss_chunk_of, remats_of
from openelm_jax.parallel.mesh import MeshShape, check_context, check_rows
from openelm_jax.parallel.sharding import Layout, layout_on, row_sharding, state_shardings
from openelm_jax.training.optimizer import make_optimizer
from openelm_jax.training.state import Moments, TrainState, new_state, state_after
from openelm_jax.training.step import Batch, make_train_step, make_validation_step


@dataclass(frozen=True, kw_only=True)
class Program:
    """An experiment's step on a mesh. Both steps are jitted and not yet compiled."""

    experiment: Experiment
    mesh: Mesh
    layout: Layout
    kernel: Kernel
    remats: tuple[Remat, ...]
    loss_chunk: int
    decoder: Decoder
    optimizer: optax.GradientTransformation
    train_step: Any
    """(state, batch, learning rate) -> (state, metrics); gives the old state up."""
    validation_step: Any
    """(params, batch) -> summed nats."""

    def state_like(self) -> TrainState:
        """Return the state as shapes, types and shardings."""
        model = self.experiment.model
        state = jax.eval_shape(lambda: new_state(init_params(model, 0), self.optimizer))
        return jax.tree.map(_like, state, state_shardings(self.layout, self.mesh, state))

    def batch_like(self, rows: int | None = None) -> Batch:
        """Return a global batch, or one of so many rows, as shapes, types and shardings."""
        rows = rows or self.experiment.training.global_batch_size
        length = self.experiment.model.context_length
        sharding = row_sharding(self.mesh)
        shapes: list[Any] = [
            jax.ShapeDtypeStruct((rows, length + 1), jnp.int32, sharding=sharding),
            jax.ShapeDtypeStruct((rows, length), jnp.bool_, sharding=sharding),
        ]
        return Batch(*shapes)

    def rate_like(self) -> jax.ShapeDtypeStruct:
        """Return a learning rate as shape, type and sharding."""
        return jax.ShapeDtypeStruct((), jnp.float32, sharding=self._whole)

    def place_rate(self, rate: float | np.float32) -> jax.Array:
        """Return a learning rate on all devices."""
        value = np.float32(rate)
        return jax.make_array_from_callback((), self._whole, lambda _: value)

    def new_state(self, params: Params | None = None) -> TrainState:
        """Return the state before the first update, every shard made where it lies.

        From `params` (whole arrays, the same in all processes), or drawn by `training.seed`.
        """
        model, seed = self.experiment.model, self.experiment.training.seed
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state_like())
        if params is None:
            draw = lambda: new_state(init_params(model, seed), self.optimizer)  # noqa: E731
            return jax.jit(draw, out_shardings=shardings)()
        placed = jax.tree.map(_placed, params, shardings.params)
        begin = functools.partial(new_state, optimizer=self.optimizer)
        return jax.jit(begin, out_shardings=shardings, donate_argnums=0)(placed)

    def state_after(self, step: int, params: Params, moments: Moments) -> TrainState:
        """Return the state after `step` updates that another program made.

        From whole arrays, the same in all processes; they are cast to the types of our states.
        """
        like = self.state_like()
        state = state_after(step, params, moments, like)
        return jax.tree.map(
            lambda leaf, to: _placed(np.array(leaf, to.dtype), to.sharding), state, like
        )

    @property
    def _whole(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())


def make_program(
    experiment: Experiment, mesh: Mesh, *, bos_id: int | None = None, probe: bool = True
) -> Program:
    """Return the step of an experiment on a mesh, which may be of devices that are not here.

    With `bos_id` documents are kept apart. `probe` runs a GPU's kernel once before it is chosen.
    Raises UserError for rows, tokens, kernel or memory that do not fit the mesh.
    """
    model, training = experiment.model, experiment.training
    shape = MeshShape(**mesh.shape)
    check_rows(shape, training.global_batch_size, training.accumulation)
    check_context(shape, model.context_length)
    device = mesh.devices.flat[0]
    dtype = jnp.dtype(training.dtype)
    layout = layout_on(model, mesh)
    kernel = choose_kernel(
        training.attention,
        platform="gpu" if device.platform in ("cuda", "rocm") else device.platform,
        device_kind=device.device_kind,
        dtype=dtype,
        head_dim=model.head_dim,
        context_length=model.context_length,
        isolating=bos_id is not None,
        context=shape.context,
        probe=probe,
    )
    remats = remats_of(experiment, layout, device.device_kind)
    decoder = Decoder(
        model,
        dtype=dtype,
        remat=remats,
        attend=make_attend(model, layout, kernel.attend),
        collectives=make_collectives(layout),
        shapes=layout.layers,
    )
    optimizer = make_optimizer(experiment.optimizer)
    chunk = loss_chunk_of(experiment, layout)
    train_step = make_train_step(
        decoder, optimizer, training, experiment.optimizer.clip_norm, bos_id, mesh, chunk
    )
    validation_step = make_validation_step(decoder, training, mesh, chunk)
    return Program(
        experiment=experiment,
        mesh=mesh,
        layout=layout,
        kernel=kernel,
        remats=remats,
        loss_chunk=chunk,
        decoder=decoder,
        optimizer=optimizer,
        train_step=jax.jit(_exact(train_step, dtype), donate_argnums=0),
        validation_step=jax.jit(_exact(validation_step, dtype)),
    )


def _exact(function: Any, dtype: Any) -> Any:
    """Let float32 mean float32: accelerators take it to mean less unless they are told."""

    @functools.wraps(function)
    def exact(*arguments):
        with jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default"):
            return function(*arguments)

    return exact


def _like(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _placed(leaf: Any, sharding: NamedSharding) -> jax.Array:
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

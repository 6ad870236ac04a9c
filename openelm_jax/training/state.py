"""What a step changes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from openelm_jax.model.decoder import Params


class TrainState(NamedTuple):
    """Float32 parameters, the optimiser's moments, and the number of updates done (int32)."""

    step: jax.Array
    params: Params
    moments: Any


class Moments(NamedTuple):
    """AdamW's averages of the gradients and of their squares, trees like the parameters."""

    first: Params
    second: Params
    updates: int
    """How many they average over."""


def new_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Return the state before the first update."""
    moments = jax.jit(optimizer.init)(params)
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, moments=moments)


def state_after(step: int, params: Params, moments: Moments, like: TrainState) -> TrainState:
    """Return the state after `step` updates that another program made.

    Its leaves are those of `params` and `moments` and NumPy scalars, in the places of `like`.
    """
    placed = optax.tree_utils.tree_set(
        like.moments, mu=moments.first, nu=moments.second, count=np.int32(moments.updates)
    )
    return TrainState(step=np.int32(step), params=params, moments=placed)  # type: ignore[arg-type]


def optimizer_item(state: TrainState) -> dict[str, Any]:
    """Return what a checkpoint keeps beside the parameters, as its `optimizer` item."""
    return {"step": state.step, "moments": state.moments}


def state_of(params: Params, optimizer: dict[str, Any]) -> TrainState:
    """Return the state whose parameters and `optimizer_item` these are."""
    return TrainState(params=params, **optimizer)

"""From logits to the next token: greedy, or by temperature, top-k and top-p.

Legend: B batch, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from openelm_jax.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen. Temperature 0 takes the likeliest; top_k 0 and top_p 1 cut nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(
                f"temperature is {self.temperature}: it must be 0 (greedy) or a number above."
            )
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}: it must be 0 (no limit) or a count of tokens.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: it is a share, above 0 and at most 1.")


def row_keys(seed: jax.typing.ArrayLike, rows_B: jax.Array, step: jax.Array) -> jax.Array:
    """Return the random keys [B] of a step: a row's depends on its number, not on the batch."""
    at_step = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda row: jax.random.fold_in(at_step, row))(rows_B)


def choose(
    logits_BV: jax.Array,
    keys_B: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
) -> jax.Array:
    """Return one token id [B] a row; every setting is traced, so none compiles anew.

    Logits are divided by the temperature, then all but the top_k likeliest fall, then of those
    all whose likelier ones hold top_p of what probability is left.
    """

    def sample() -> jax.Array:
        scaled_BV = logits_BV / temperature
        order_BV = jnp.argsort(-scaled_BV, axis=-1)
        sorted_BV = jnp.take_along_axis(scaled_BV, order_BV, axis=-1)
        places_V = jnp.arange(sorted_BV.shape[-1])
        kept_BV = jnp.where((top_k == 0) | (places_V < top_k), sorted_BV, -jnp.inf)
        probability_BV = jax.nn.softmax(kept_BV, axis=-1)
        above_BV = jnp.cumsum(probability_BV, axis=-1) - probability_BV
        # The sum rounds: a share of 1 must not cut the tail.
        kept_BV = jnp.where((top_p == 1) | (above_BV < top_p), kept_BV, -jnp.inf)
        place_B = jax.vmap(jax.random.categorical)(keys_B, kept_BV)
        return jnp.take_along_axis(order_BV, place_B[:, None], axis=-1)[:, 0]

    def greedy() -> jax.Array:
        return jnp.argmax(logits_BV, axis=-1)

    return jax.lax.cond(temperature > 0, sample, greedy).astype(jnp.int32)

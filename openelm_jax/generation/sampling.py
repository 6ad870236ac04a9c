"""From logits to the next token: repetition penalty, temperature, top-k and top-p, or greedy.

Legend: B batch, T time, S length of a row's text, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from openelm_jax.errors import UserError

LEAST, MOST = 1e-9, 1e9
"""What logits may be divided by and stay finite in float32."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen.

    Temperature 0 takes the likeliest; top_k 0 and top_p 1 cut nothing; repetition_penalty 1 makes
    no token that a text has less likely.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or LEAST <= self.temperature <= MOST):
            raise UserError(
                f"temperature is {self.temperature}: it must be 0 (greedy) or a number above, "
                f"{LEAST:g} to {MOST:g}."
            )
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}: it must be 0 (no limit) or a count of tokens.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: it is a share, above 0 and at most 1.")
        if not LEAST <= self.repetition_penalty <= MOST:
            raise UserError(
                f"repetition_penalty is {self.repetition_penalty}: it must be 1 (none) or another "
                f"number above 0, more than 1 to repeat less, {LEAST:g} to {MOST:g}."
            )


class Request(NamedTuple):
    """What stays the same while a batch is decoded. Traced, so that only shapes compile anew."""

    rows_B: Any
    prompt_B: Any
    """The length of each row's prompt."""
    vocab_size: Any
    eos_id: Any
    max_tokens_B: Any
    seed: Any
    temperature: Any
    top_k: Any
    top_p: Any
    repetition_penalty: Any


def next_tokens(
    logits_BTV: jax.Array, text_BS: jax.Array, length_B: jax.Array, request: Request
) -> jax.Array:
    """Return the T tokens [B, T] that follow a row's text at `length_B`, `length_B` + 1, ...

    Each as if it were the only one: `text_BS` holds what stands before it. What the text holds
    behind it, or for padding, has no influence.
    """
    num_tokens, vocab_size = logits_BTV.shape[1:]
    logits_BTV = jnp.where(jnp.arange(vocab_size) < request.vocab_size, logits_BTV, -jnp.inf)
    length_BT = length_B[:, None] + jnp.arange(num_tokens)

    def likeliest() -> jax.Array:
        return jnp.argmax(logits_BTV, axis=-1).astype(jnp.int32)

    def chosen() -> jax.Array:
        penalised_BTV = jax.lax.cond(
            request.repetition_penalty == 1,
            lambda: logits_BTV,
            lambda: penalise(
                logits_BTV, occurs(text_BS, length_BT, vocab_size), request.repetition_penalty
            ),
        )
        rows_BT = jnp.broadcast_to(request.rows_B[:, None], length_BT.shape)
        steps_BT = length_BT - request.prompt_B[:, None]
        tokens = choose(
            penalised_BTV.reshape(-1, vocab_size),
            row_keys(request.seed, rows_BT.reshape(-1), steps_BT.reshape(-1)),
            request.temperature,
            request.top_k,
            request.top_p,
        )
        return tokens.reshape(length_BT.shape)

    plain = (request.temperature == 0) & (request.repetition_penalty == 1)
    return jax.lax.cond(plain, likeliest, chosen)


def row_keys(
    seed: jax.typing.ArrayLike, rows_B: jax.Array, steps_B: jax.typing.ArrayLike
) -> jax.Array:
    """Return the random keys [B] of a step, or of one a row: they depend on nothing else."""
    steps_B = jnp.broadcast_to(jnp.asarray(steps_B), rows_B.shape)
    key = jax.random.key(seed)
    return jax.vmap(lambda row, step: jax.random.fold_in(jax.random.fold_in(key, step), row))(
        rows_B, steps_B
    )


def occurs(text_BS: jax.Array, length_BT: jax.Array, vocab_size: int) -> jax.Array:
    """Return bool [B, T, V]: is a token among the first `length_BT` of its row's text?"""
    batch_size, slots = text_BS.shape
    first_BV = jnp.full((batch_size, vocab_size), slots, jnp.int32)
    first_BV = first_BV.at[jnp.arange(batch_size)[:, None], text_BS].min(jnp.arange(slots))
    return first_BV[:, None] < length_BT[..., None]


def penalise(logits: jax.Array, occurs: jax.Array, penalty: jax.typing.ArrayLike) -> jax.Array:
    """Return the logits, those of tokens that occur divided by `penalty`, negative ones multiplied.

    (Keskar et al. 2019, arXiv 1909.05858, as transformers' RepetitionPenaltyLogitsProcessor has it;
    once a token, however often it occurs.)
    """
    return jnp.where(occurs, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def choose(
    logits_BV: jax.Array,
    keys_B: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
) -> jax.Array:
    """Return one token id [B] a row; every setting is traced, so none compiles anew.

    Logits are divided by the temperature, then all fall that have top_k likelier ones, then of
    those left all whose likelier ones hold top_p of their probability. Randomness belongs to ids,
    not to ranks: two models that think much alike mostly draw the same token with the same key.
    """

    def sample() -> jax.Array:
        kept_BV = logits_BV / temperature
        limit = jnp.where(top_k == 0, jnp.inf, top_k)
        kept_BV = _head(kept_BV, jnp.ones_like(kept_BV), limit)
        # The sum rounds: a share of 1 must not cut the tail.
        limit = jnp.where(top_p == 1, jnp.inf, top_p)
        kept_BV = _head(kept_BV, jax.nn.softmax(kept_BV, axis=-1), limit)
        return jax.vmap(jax.random.categorical)(keys_B, kept_BV)

    def greedy() -> jax.Array:
        return jnp.argmax(logits_BV, axis=-1)

    return jax.lax.cond(temperature > 0, sample, greedy).astype(jnp.int32)


def _head(x_BV: jax.Array, weight_BV: jax.Array, limit: jax.Array) -> jax.Array:
    """Return `x_BV`, with -inf for each entry above which the weights reach `limit`.

    The lowest entry that stays is found by bisection over the floats there are, in 32 sums: on
    CPUs sorting a vocabulary takes longer than computing its logits.
    """
    bits_BV = jax.lax.bitcast_convert_type(x_BV.astype(jnp.float32), jnp.int32)
    place_BV = jnp.where(bits_BV < 0, bits_BV ^ 0x7FFFFFFF, bits_BV)  # integers in the same order
    lowest_B = jnp.full(x_BV.shape[0], jnp.iinfo(jnp.int32).min)

    def narrow(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        below_B, kept_B = bounds
        middle_B = (below_B >> 1) + (kept_B >> 1) + (below_B & kept_B & 1)
        above_B = jnp.sum(weight_BV, axis=-1, where=place_BV > middle_B[:, None])
        return (
            jnp.where(above_B < limit, below_B, middle_B),
            jnp.where(above_B < limit, middle_B, kept_B),
        )

    highest_B = jnp.where(jnp.isinf(limit), lowest_B, place_BV.max(axis=-1))
    _, kept_B = jax.lax.while_loop(
        lambda bounds: jnp.any(bounds[0] + 1 < bounds[1]), narrow, (lowest_B, highest_B)
    )
    return jnp.where(place_BV >= kept_B[:, None], x_BV, -jnp.inf)

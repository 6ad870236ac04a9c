"""Decoding with a static key/value cache: one prefill, then a token loop on the device.

Prompts of different lengths share a batch, padded on the right: a row's padding lies behind its
tokens, so causality hides it (`write_cache`), and its next token goes where the padding began.

Legend: B batch, T time, D model, V vocab, I tokens of a block.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.generation.sampling import Sampling, choose, row_keys
from openelm_jax.model.cache import Cache, init_cache
from openelm_jax.model.decoder import Decoder, Params

BLOCK = 32  # tokens between two looks of the host


@dataclass(frozen=True)
class Continuation:
    """What a prompt was continued with: the tokens before </s>, and why they end."""

    tokens: tuple[int, ...]
    finish_reason: Literal["stop", "length"]


class _Request(NamedTuple):
    """What stays the same through the loop. Traced, so that only shapes compile anew."""

    rows_B: Any
    vocab_size: Any
    eos_id: Any
    seed: Any
    temperature: Any
    top_k: Any
    top_p: Any


class _State(NamedTuple):
    cache: Cache
    token_B: jax.Array
    """The newest token of each row, not yet fed to the model."""
    position_B: jax.Array
    """Where it stands in its row."""
    step: jax.Array
    finished_B: jax.Array


def generate(
    config: ModelConfig,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    eos_id: int,
    vocab_size: int | None = None,
    sampling: Sampling,
    dtype: jax.typing.DTypeLike,
    first_row: int = 0,
) -> list[Continuation]:
    """Return the continuation of each prompt; arguments as for `stream`."""
    blocks = stream(
        config,
        params,
        prompts,
        max_tokens=max_tokens,
        eos_id=eos_id,
        vocab_size=vocab_size,
        sampling=sampling,
        dtype=dtype,
        first_row=first_row,
    )
    return [_until_eos(row, eos_id) for row in np.concatenate(list(blocks), axis=1).tolist()]


def stream(
    config: ModelConfig,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    eos_id: int,
    vocab_size: int | None = None,
    sampling: Sampling,
    dtype: jax.typing.DTypeLike,
    first_row: int = 0,
    block: int = BLOCK,
) -> Iterator[np.ndarray]:
    """Yield the new tokens [B, I] as they come; a row that has ended goes on with `eos_id`.

    Prompts are token ids with <s>, at least one each. Ids from `vocab_size` on are never chosen.
    Prompt i is sampled with the seed and the number first_row + i alone, in whatever batch. One
    line on stderr says when a text passes the context length; it goes on all the same.
    """
    if max_tokens < 1:
        raise UserError(f"max_tokens is {max_tokens}: it must be at least 1.")
    assert prompts, "no prompts"
    assert all(len(prompt) for prompt in prompts), "an empty prompt has <s>"
    request = _Request(
        rows_B=np.arange(first_row, first_row + len(prompts), dtype=np.uint32),
        vocab_size=np.int32(config.vocab_size if vocab_size is None else vocab_size),
        eos_id=np.int32(eos_id),
        seed=np.uint32(sampling.seed % 2**32),
        temperature=np.float32(sampling.temperature),
        top_k=np.int32(sampling.top_k),
        top_p=np.float32(sampling.top_p),
    )
    lengths_B = np.array([len(prompt) for prompt in prompts], np.int32)
    longest = int(lengths_B.max())
    tokens_BT = np.zeros((len(prompts), bucket(longest)), np.int32)
    for row, prompt in zip(tokens_BT, prompts, strict=True):
        row[: len(prompt)] = prompt
    cache_length = bucket(longest + max_tokens)

    state = _prefill(config, dtype, cache_length, params, tokens_BT, lengths_B, request)
    # Copies: the state's own buffers are given away with the next block.
    tokens_BI, finished_B = np.array(state.token_B)[:, None], np.array(state.finished_B)
    done, warned = 1, False
    while True:
        lengths_B = lengths_B + (tokens_BI != eos_id).sum(axis=1)
        if not warned and lengths_B.max() > config.context_length:
            warned = True
            print(
                f"warning: the text is longer than the {config.context_length} tokens "
                "that the model was trained to see.",
                file=sys.stderr,
            )
        yield tokens_BI
        if done == max_tokens or finished_B.all():
            return
        limit = np.int32(min(block, max_tokens - done))
        state, new_BI, count = _decode(config, dtype, params, state, request, limit)
        tokens_BI, finished_B = np.array(new_BI)[:, : int(count)], np.array(state.finished_B)
        done += int(count)


def bucket(length: int) -> int:
    """Return the padded length: powers of two from 16 to 256, then multiples of 256."""
    if length <= 256:
        return max(16, 1 << (length - 1).bit_length())
    return -(-length // 256) * 256


def apply(decoder: Decoder, params: Params, method: str, *arguments: Any) -> Any:
    """Return what a method of the decoder does; float32 is float32 on GPUs and TPUs as well."""
    exact = jnp.dtype(decoder.dtype) == jnp.float32
    with jax.default_matmul_precision("highest" if exact else "default"):
        return decoder.apply({"params": params}, *arguments, method=method)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _prefill(
    config: ModelConfig,
    dtype: jax.typing.DTypeLike,
    cache_length: int,
    params: Params,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    request: _Request,
) -> _State:
    batch_size, length = tokens_BT.shape
    positions_BT = jnp.broadcast_to(jnp.arange(length), tokens_BT.shape)
    cache = init_cache(config, batch_size, cache_length, dtype)
    decoder = Decoder(config, dtype=dtype)
    hidden_BTD, cache = apply(decoder, params, "hidden", tokens_BT, positions_BT, cache)
    last_BD = jnp.take_along_axis(hidden_BTD, (lengths_B - 1)[:, None, None], axis=1)[:, 0]
    logits_BV = apply(decoder, params, "logits", last_BD)
    step = jnp.int32(0)
    token_B = _next_token(logits_BV, request, step)
    return _State(cache, token_B, lengths_B, step + 1, token_B == request.eos_id)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _decode(
    config: ModelConfig,
    dtype: jax.typing.DTypeLike,
    params: Params,
    state: _State,
    request: _Request,
    limit: jax.Array,
) -> tuple[_State, jax.Array, jax.Array]:
    """Return the state after at most `limit` more tokens, those [B, BLOCK], and their count."""
    decoder = Decoder(config, dtype=dtype)
    eos_B = jnp.full_like(state.token_B, request.eos_id)
    tokens_BI = jnp.broadcast_to(eos_B[:, None], (eos_B.size, BLOCK))

    def proceed(carry: tuple[_State, jax.Array, jax.Array]) -> jax.Array:
        state, _, i = carry
        return (i < limit) & ~state.finished_B.all()

    def one_token(
        carry: tuple[_State, jax.Array, jax.Array],
    ) -> tuple[_State, jax.Array, jax.Array]:
        state, tokens_BI, i = carry
        token_B1, position_B1 = state.token_B[:, None], state.position_B[:, None]
        hidden_BTD, cache = apply(decoder, params, "hidden", token_B1, position_B1, state.cache)
        logits_BV = apply(decoder, params, "logits", hidden_BTD[:, 0])
        token_B = jnp.where(state.finished_B, eos_B, _next_token(logits_BV, request, state.step))
        finished_B = state.finished_B | (token_B == eos_B)
        state = _State(cache, token_B, state.position_B + 1, state.step + 1, finished_B)
        return state, tokens_BI.at[:, i].set(token_B), i + 1

    return jax.lax.while_loop(proceed, one_token, (state, tokens_BI, jnp.int32(0)))


def _next_token(logits_BV: jax.Array, request: _Request, step: jax.Array) -> jax.Array:
    real_V = jnp.arange(logits_BV.shape[-1]) < request.vocab_size
    return choose(
        jnp.where(real_V, logits_BV, -jnp.inf),
        row_keys(request.seed, request.rows_B, step),
        request.temperature,
        request.top_k,
        request.top_p,
    )


def _until_eos(tokens: list[int], eos_id: int) -> Continuation:
    if eos_id in tokens:
        return Continuation(tuple(tokens[: tokens.index(eos_id)]), "stop")
    return Continuation(tuple(tokens), "length")

"""Decoding with a static key/value cache: one prefill, then a token loop on the device.

Prompts of different lengths share a batch, padded on the right: a row's padding lies behind its
tokens, so causality hides it (`write_cache`), and its next token goes where the padding began.
Where tokens are proposed (`speculative.py`), rows advance by different numbers of tokens a call.

Legend: B batch, T time, S cache length, K proposed tokens, D model, V vocab, I tokens of a block.
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
from jax.sharding import Mesh

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.generation.forward import apply, extend
from openelm_jax.generation.placement import divide_rows, mesh_of, whole_rows
from openelm_jax.generation.sampling import Request, Sampling, next_tokens
from openelm_jax.generation.speculative import (
    Counts,
    Speculation,
    Tally,
    agreement,
    begin,
    count_call,
    propose,
)
from openelm_jax.model.cache import Cache, init_cache
from openelm_jax.model.decoder import Decoder, Params

BLOCK = 32  # calls of the model between two looks of the host


@dataclass(frozen=True)
class Continuation:
    """What a prompt was continued with: the tokens before </s>, and why they end."""

    tokens: tuple[int, ...]
    finish_reason: Literal["stop", "length"]


class _State(NamedTuple):
    cache: Cache
    kept: Any
    """What proposals are made with: a draft model's cache, or nothing."""
    text_BS: jax.Array
    """Each row's tokens, the prompt's first. The newest has not been fed to the model."""
    length_B: jax.Array
    """How many they are; what stands behind them is of no meaning."""
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
    speculation: Speculation | None = None,
    tally: Tally | None = None,
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
        speculation=speculation,
        tally=tally,
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
    speculation: Speculation | None = None,
    tally: Tally | None = None,
) -> Iterator[np.ndarray]:
    """Yield the new tokens [B, I] as they come; a row that has ended goes on with `eos_id`.

    Prompts are token ids with <s>, at least one each. Ids from `vocab_size` on are never chosen.
    Prompt i is sampled with the seed and the number first_row + i alone, in whatever batch. The
    host looks every `block` calls of the model, and yields what all rows have that go on. The
    outcome of `speculation` is added to `tally`. One line on stderr says when a text passes the
    context length; it goes on all the same. Raises UserError where the cache does not fit memory.
    """
    if max_tokens < 1:
        raise UserError(f"max_tokens is {max_tokens}: it must be at least 1.")
    assert prompts, "no prompts"
    assert all(len(prompt) for prompt in prompts), "an empty prompt has <s>"
    mesh, num_rows = mesh_of(params), len(prompts)
    # On a mesh the last prompt may stand several times, for devices have equally many rows: those
    # that only fill up end with the token that the prompt's own pass chooses.
    index_B = np.arange(whole_rows(num_rows, mesh))
    rows_B = np.minimum(index_B, num_rows - 1)
    prompts = [prompts[row] for row in rows_B]
    prompt_B = np.array([len(prompt) for prompt in prompts], np.int32)
    longest = int(prompt_B.max())
    proposed = 0 if speculation is None else speculation.count
    cache_length = bucket(longest + max_tokens + proposed)
    too_long = UserError(
        f"memory has no room for a cache of {num_rows:,} x {cache_length:,} tokens: take fewer "
        "max_tokens, shorter prompts or proposals, or fewer prompts at a time."
    )
    if cache_length > np.iinfo(np.int32).max:
        raise too_long
    request = Request(
        rows_B=(first_row + rows_B).astype(np.uint32),
        prompt_B=prompt_B,
        vocab_size=np.int32(config.vocab_size if vocab_size is None else vocab_size),
        eos_id=np.int32(eos_id),
        max_tokens_B=np.where(index_B < num_rows, max_tokens, 1).astype(np.int32),
        seed=np.uint32(sampling.seed % 2**32),
        temperature=np.float32(sampling.temperature),
        top_k=np.int32(min(sampling.top_k, config.vocab_size)),
        top_p=np.float32(sampling.top_p),
        repetition_penalty=np.float32(sampling.repetition_penalty),
    )
    tokens_BT = np.zeros((len(prompts), bucket(longest)), np.int32)
    for row, prompt in zip(tokens_BT, prompts, strict=True):
        row[: len(prompt)] = prompt

    tokens_BT, request = divide_rows((tokens_BT, request), mesh)
    try:
        state = _prefill(config, dtype, cache_length, mesh, params, tokens_BT, request, speculation)
        jax.block_until_ready(state)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise too_long from None
        raise
    sent, warned = 0, False
    while True:
        # Copies: the state's own buffers are given away with the next block.
        text_BS, length_B = np.array(state.text_BS), np.array(state.length_B)
        finished_B = np.array(state.finished_B)
        new_BI = _new_tokens(text_BS, length_B, prompt_B, eos_id)
        text_length = (prompt_B + (new_BI != eos_id).sum(axis=1)).max()
        if not warned and text_length > config.context_length:
            warned = True
            print(
                f"warning: the text is longer than the {config.context_length} tokens "
                "that the model was trained to see.",
                file=sys.stderr,
            )
        count_B = length_B - prompt_B
        ready = int(count_B.max() if finished_B.all() else count_B[~finished_B].min())
        yield new_BI[:num_rows, sent:ready]
        sent = ready
        if finished_B.all():
            return
        state, counts = _decode(config, dtype, params, state, request, np.int32(block), speculation)
        if tally is not None:
            tally.add(counts)


def bucket(length: int) -> int:
    """Return the padded length: multiples of 8 from 16 to 64, of 32 to 256, then of 256.

    Few enough to compile, with little more to compute than there is.
    """
    step = 8 if length <= 64 else 32 if length <= 256 else 256
    return max(16, -(-length // step) * step)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _prefill(
    config: ModelConfig,
    dtype: jax.typing.DTypeLike,
    cache_length: int,
    mesh: Mesh | None,
    params: Params,
    tokens_BT: jax.Array,
    request: Request,
    speculation: Speculation | None = None,
) -> _State:
    batch_size, length = tokens_BT.shape
    cache = divide_rows(init_cache(config, batch_size, cache_length, dtype), mesh)
    first_B = jnp.zeros(batch_size, jnp.int32)
    hidden_BTD, cache = extend(config, dtype, params, tokens_BT, first_B, cache)
    length_B = request.prompt_B
    last_B1D = jnp.take_along_axis(hidden_BTD, (length_B - 1)[:, None, None], axis=1)
    logits_B1V = apply(Decoder(config, dtype=dtype), params, "logits", last_B1D)
    text_BS = jnp.pad(tokens_BT, ((0, 0), (0, cache_length - length)))
    chosen_B1 = next_tokens(logits_B1V, text_BS, length_B, request)
    kept = begin(speculation, tokens_BT, cache_length, mesh)
    nobody_B = jnp.zeros(batch_size, bool)
    return _append(_State(cache, kept, text_BS, length_B, nobody_B), chosen_B1, 1, request)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _decode(
    config: ModelConfig,
    dtype: jax.typing.DTypeLike,
    params: Params,
    state: _State,
    request: Request,
    limit: jax.Array,
    speculation: Speculation | None = None,
) -> tuple[_State, Counts]:
    """Return the state after at most `limit` more calls of the model, and what they came to."""
    decoder = Decoder(config, dtype=dtype)

    def proceed(carry: tuple[_State, Counts, jax.Array]) -> jax.Array:
        state, _, i = carry
        return (i < limit) & ~state.finished_B.all()

    def one_call(carry: tuple[_State, Counts, jax.Array]) -> tuple[_State, Counts, jax.Array]:
        (cache, kept, text_BS, length_B, finished_B), counts, i = carry
        kept, proposal_BK = propose(speculation, kept, text_BS, length_B, request)
        text_BS = _write(text_BS, length_B, jnp.maximum(proposal_BK, 0))
        fed_T = jnp.arange(-1, proposal_BK.shape[1])
        fed_BT = jnp.take_along_axis(text_BS, length_B[:, None] + fed_T, axis=1)
        hidden_BTD, cache = extend(config, dtype, params, fed_BT, length_B - 1, cache)
        logits_BTV = apply(decoder, params, "logits", hidden_BTD)
        chosen_BT = next_tokens(logits_BTV, text_BS, length_B, request)
        agreed_B = agreement(proposal_BK, chosen_BT)
        before = _State(cache, kept, text_BS, length_B, finished_B)
        after = _append(before, chosen_BT, agreed_B + 1, request)
        if speculation is not None:
            new_B = after.length_B - length_B
            counts = count_call(counts, proposal_BK, agreed_B, new_B)
        return after, counts, i + 1

    counts = Counts(*jnp.zeros(4, jnp.int32))
    state, counts, _ = jax.lax.while_loop(proceed, one_call, (state, counts, jnp.int32(0)))
    return state, counts


def _append(
    state: _State, chosen_BT: jax.Array, most_B: jax.typing.ArrayLike, request: Request
) -> _State:
    """Return the state with `most_B` of the chosen tokens, or those up to </s> or the most."""
    num_tokens = chosen_BT.shape[1]
    ends_BT = chosen_BT == request.eos_id
    until_end_B = jnp.where(ends_BT.any(axis=1), jnp.argmax(ends_BT, axis=1) + 1, num_tokens + 1)
    room_B = request.prompt_B + request.max_tokens_B - state.length_B
    new_B = jnp.minimum(jnp.minimum(most_B, until_end_B), room_B)
    new_B = jnp.where(state.finished_B, 0, new_B)
    return state._replace(
        text_BS=_write(state.text_BS, state.length_B, chosen_BT),
        length_B=state.length_B + new_B,
        finished_B=state.finished_B | (new_B == until_end_B) | (new_B == room_B),
    )


def _write(text_BS: jax.Array, start_B: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    rows_B1 = jnp.arange(text_BS.shape[0])[:, None]
    slots_BT = start_B[:, None] + jnp.arange(tokens_BT.shape[1])
    return text_BS.at[rows_B1, slots_BT].set(tokens_BT)


def _new_tokens(
    text_BS: np.ndarray, length_B: np.ndarray, prompt_B: np.ndarray, eos_id: int
) -> np.ndarray:
    """Return what stands behind each prompt [B, I], rows of fewer tokens filled with `eos_id`."""
    new_BI = np.full((len(text_BS), (length_B - prompt_B).max()), eos_id, np.int32)
    for new, text, start, stop in zip(new_BI, text_BS, prompt_B, length_B, strict=True):
        new[: stop - start] = text[start:stop]
    return new_BI


def _until_eos(tokens: list[int], eos_id: int) -> Continuation:
    if eos_id in tokens:
        return Continuation(tuple(tokens[: tokens.index(eos_id)]), "stop")
    return Continuation(tuple(tokens), "length")

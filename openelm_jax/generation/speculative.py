"""Speculation: several tokens proposed, then verified by one call of the model.

Whatever is proposed, the text is that of plain decoding: at each place the model's own token is
chosen, with the random numbers of that step, and a proposal counts as far as it is the same.
(Leviathan et al. 2023, arXiv 2211.17192, accept by chance where the model would draw another
token; here only rounding can tell the two ways of decoding apart.)

Legend: B batch, T time, S length of a row's text, K proposed tokens, V vocab, D model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.generation.forward import apply, extend
from openelm_jax.generation.placement import divide_rows
from openelm_jax.generation.sampling import Request, next_tokens
from openelm_jax.model.cache import Cache, init_cache
from openelm_jax.model.decoder import Decoder, Params

LONGEST_MATCH = 2  # tokens that prompt lookup compares: transformers' max_matching_ngram_size
DRAFT_TOKENS = 4
"""How many a draft model proposes if nothing is said."""


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["count"])
@dataclass(frozen=True)
class PromptLookup:
    """Propose the `count` tokens that followed when the text's last tokens stood in it before."""

    count: int


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params"],
    meta_fields=["config", "dtype", "count"],
)
@dataclass(frozen=True, eq=False)
class Draft:
    """Propose the `count` tokens that a smaller model of the same vocabulary chooses.

    It chooses as the model does, with the same random numbers: the more alike the two think, the
    more often they draw the same token.
    """

    config: ModelConfig
    params: Params
    dtype: jax.typing.DTypeLike
    count: int


Speculation = PromptLookup | Draft


def proposal_count(prompt_lookup: int | None, has_draft: bool, draft_tokens: int | None) -> int:
    """Return how many tokens are proposed at a time: 0 if neither way is asked for.

    Raises UserError if both are, or for a number below 1.
    """
    if prompt_lookup is not None and has_draft:
        raise UserError(
            "prompt_lookup and draft are both given: proposals come from one of them, give one."
        )
    if draft_tokens is not None and not has_draft:
        raise UserError(
            f"draft_tokens is {draft_tokens}, but no draft is given: give the model that proposes."
        )
    name, count = "prompt_lookup", prompt_lookup
    if has_draft:
        name, count = "draft_tokens", DRAFT_TOKENS if draft_tokens is None else draft_tokens
    if count is not None and count < 1:
        raise UserError(f"{name} is {count}: it is how many tokens to propose, at least 1.")
    return count or 0


class Counts(NamedTuple):
    """What some calls of the model came to, summed over the rows that they went on with."""

    calls: Any = 0
    """Each counted for every row that it went on with."""
    tokens: Any = 0
    """Chosen in them."""
    proposed: Any = 0
    accepted: Any = 0


@dataclass
class Tally:
    """What speculation came to, over all that it was given to."""

    counts: Counts = field(default_factory=Counts)

    def add(self, counts: Counts) -> None:
        self.counts = Counts(*(a + int(b) for a, b in zip(self.counts, counts, strict=True)))

    def __str__(self) -> str:
        calls, tokens, proposed, accepted = self.counts
        if not calls:
            return "speculation: nothing was left to propose"
        share = f"{accepted / proposed:.0%} of {proposed:,} proposed tokens accepted"
        return (
            f"speculation: {share if proposed else 'nothing was proposed'}, "
            f"{tokens / calls:.2f} tokens per call of the model"
        )


def begin(
    speculation: Speculation | None, tokens_BT: jax.Array, cache_length: int, mesh: Mesh | None
) -> Cache | tuple[()]:
    """Return what is kept between proposals for a batch of prompts: a draft model's cache.

    On a mesh its rows are divided like those of the model's cache.
    """
    if not isinstance(speculation, Draft):
        return ()
    config, dtype = speculation.config, speculation.dtype
    cache = divide_rows(init_cache(config, tokens_BT.shape[0], cache_length, dtype), mesh)
    first_B = jnp.zeros(tokens_BT.shape[0], jnp.int32)
    return extend(config, dtype, speculation.params, tokens_BT, first_B, cache)[1]


def propose(
    speculation: Speculation | None,
    kept: Any,
    text_BS: jax.Array,
    length_B: jax.Array,
    request: Request,
) -> tuple[Any, jax.Array]:
    """Return what is kept, and tokens [B, K] to follow each row's text; -1 is no proposal."""
    if isinstance(speculation, PromptLookup):
        return kept, look_up(text_BS, length_B, speculation.count)
    if isinstance(speculation, Draft):
        return _draft(speculation, kept, text_BS, length_B, request)
    return kept, jnp.zeros((length_B.size, 0), jnp.int32)


def look_up(text_BS: jax.Array, length_B: jax.Array, count: int) -> jax.Array:
    """Return the `count` tokens [B, K] behind the first place that reads like each row's end.

    Like its last two tokens, or else its last one; -1 where neither occurred before. What follows
    a place near the end is repeated until there are `count`. (PromptLookupCandidateGenerator of
    transformers, which proposes fewer tokens there.)
    """
    slots_S = jnp.arange(text_BS.shape[1])
    last_B1 = length_B[:, None] - 1
    match_BS = slots_S < last_B1
    place_B1 = jnp.full_like(last_B1, -1)
    for back in range(LONGEST_MATCH):
        token_B1 = jnp.take_along_axis(text_BS, last_B1 - back, axis=1)
        match_BS &= (jnp.roll(text_BS, back, axis=1) == token_B1) & (slots_S >= back)
        first_B1 = jnp.argmax(match_BS, axis=1, keepdims=True)
        place_B1 = jnp.where(match_BS.any(axis=1, keepdims=True), first_B1, place_B1)
    following_BK = place_B1 + 1 + jnp.arange(count) % (last_B1 - place_B1)
    proposal_BK = jnp.take_along_axis(text_BS, following_BK, axis=1)
    return jnp.where(place_B1 < 0, -1, proposal_BK)


def _draft(
    draft: Draft, cache: Cache, text_BS: jax.Array, length_B: jax.Array, request: Request
) -> tuple[Cache, jax.Array]:
    config, dtype, params = draft.config, draft.dtype, draft.params
    rows_B = jnp.arange(length_B.size)

    def choose(hidden_BTD: jax.Array, text_BS: jax.Array, length_B: jax.Array) -> jax.Array:
        decoder = Decoder(config, dtype=dtype)
        logits_B1V = apply(decoder, params, "logits", hidden_BTD[:, -1:])
        return next_tokens(logits_B1V, text_BS, length_B, request)[:, 0]

    def one_more(
        carry: tuple[Cache, jax.Array, jax.Array], length_B: jax.Array
    ) -> tuple[tuple[Cache, jax.Array, jax.Array], jax.Array]:
        cache, text_BS, token_B = carry
        text_BS = text_BS.at[rows_B, length_B - 1].set(token_B)
        hidden_BTD, cache = extend(config, dtype, params, token_B[:, None], length_B - 1, cache)
        token_B = choose(hidden_BTD, text_BS, length_B)
        return (cache, text_BS, token_B), token_B

    # Two tokens: of proposals that were all accepted, the last is not in this cache yet.
    start_B = length_B - 2
    newest_B2 = jnp.take_along_axis(text_BS, start_B[:, None] + jnp.arange(2), axis=1)
    hidden_BTD, cache = extend(config, dtype, params, newest_B2, start_B, cache)
    token_B = choose(hidden_BTD, text_BS, length_B)
    lengths_KB = length_B + jnp.arange(1, draft.count)[:, None]
    (cache, _, _), rest_KB = jax.lax.scan(one_more, (cache, text_BS, token_B), lengths_KB)
    return cache, jnp.concatenate([token_B[:, None], rest_KB.T], axis=1)


def agreement(proposal_BK: jax.Array, chosen_BT: jax.Array) -> jax.Array:
    """Return how many proposals [B] come before the first that is not what the model chose."""
    right_BK = proposal_BK == chosen_BT[:, :-1]
    return jnp.cumprod(right_BK, axis=1, dtype=jnp.int32).sum(axis=1)


def count_call(
    counts: Counts, proposal_BK: jax.Array, agreed_B: jax.Array, new_B: jax.Array
) -> Counts:
    """Return the counts with one more call, which added `new_B` tokens to each row."""
    goes_on_B = new_B > 0
    return Counts(
        calls=counts.calls + goes_on_B.sum(),
        tokens=counts.tokens + new_B.sum(),
        proposed=counts.proposed + ((proposal_BK >= 0) & goes_on_B[:, None]).sum(),
        accepted=counts.accepted + jnp.minimum(agreed_B, new_B).sum(),
    )

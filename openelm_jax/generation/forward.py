"""Calls of the decoder.

Legend: B batch, T time, D model.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from openelm_jax.config import ModelConfig
from openelm_jax.model.cache import Cache
from openelm_jax.model.decoder import Decoder, Params


def apply(decoder: Decoder, params: Params, method: str, *arguments: Any) -> Any:
    """Return what a method of the decoder does; float32 is float32 on GPUs and TPUs as well."""
    exact = jnp.dtype(decoder.dtype) == jnp.float32
    with jax.default_matmul_precision("highest" if exact else "default"):
        return decoder.apply({"params": params}, *arguments, method=method)


def extend(
    config: ModelConfig,
    dtype: jax.typing.DTypeLike,
    params: Params,
    tokens_BT: jax.Array,
    first_B: jax.Array,
    cache: Cache,
) -> tuple[jax.Array, Cache]:
    """Return the hidden states [B, T, D] of tokens at `first_B`, `first_B` + 1, ..., and the cache.

    The cache must hold what stands before `first_B`; what it held from there on is not seen.
    """
    positions_BT = first_B[:, None] + jnp.arange(tokens_BT.shape[1])
    decoder = Decoder(config, dtype=dtype)
    return apply(decoder, params, "hidden", tokens_BT, positions_BT, cache)

"""Calls of the decoder, and its parameters as they are read fastest.

Legend: B batch, T time, D model.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from openelm_jax.config import ModelConfig
from openelm_jax.model.cache import Cache
from openelm_jax.model.decoder import Decoder, Params
from openelm_jax.model.matrix import Bits, Dense, Matrix, in_bits


def apply(decoder: Decoder, params: Params, method: str, *arguments: Any) -> Any:
    """Return what a method of the decoder does; float32 is float32 on GPUs and TPUs as well."""
    exact = jnp.dtype(decoder.dtype) == jnp.float32
    with jax.default_matmul_precision("highest" if exact else "default"):
        return decoder.apply({"params": params}, *arguments, method=method)


def decoding_params(
    params: Params, dtype: jax.typing.DTypeLike, quantize: Bits | None = None
) -> Params:
    """Return parameters on the device as decoding reads them fastest: see `placed`."""

    def place(path: tuple[Any, ...], array: np.ndarray) -> Any:
        return placed(tuple(key.key for key in path), array, dtype, quantize)

    return jax.tree_util.tree_map_with_path(place, params)


def placed(
    path: tuple[str, ...],
    array: np.ndarray | jax.Array,
    dtype: jax.typing.DTypeLike,
    quantize: Bits | None = None,
) -> jax.Array | Matrix:
    """Return one of our parameters on the device: a norm in float32, a matrix [out, in].

    Matrices are in `dtype`, or in `quantize` bits.
    """
    if array.ndim == 1:
        return jnp.asarray(array, jnp.float32)
    weight_OI = array if path[-1] in ("embedding", "head") else array.T
    return (
        Dense(jnp.asarray(weight_OI, dtype))
        if quantize is None
        else in_bits(weight_OI, quantize, dtype)
    )


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

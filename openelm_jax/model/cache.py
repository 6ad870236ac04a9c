"""The key/value cache: static, and as wide in each layer as that layer's key/value heads.

Legend: B batch, T time, S cache length, K kv heads, H head dim, M kv heads of all rows (B times K).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from openelm_jax.config import ModelConfig
from openelm_jax.model.scaling import layer_shapes


class LayerCache(NamedTuple):
    """Rotated keys and values of one layer; slot s of a row holds its token at position s.

    A head's slots stand together, as its products read them.
    """

    key_MSH: jax.Array
    value_MSH: jax.Array


Cache = tuple[LayerCache, ...]


def init_cache(
    config: ModelConfig, batch_size: int, length: int, dtype: jax.typing.DTypeLike
) -> Cache:
    """Return an empty cache for `batch_size` rows of at most `length` tokens."""

    def layer(num_kv_heads: int) -> LayerCache:
        shape = (batch_size * num_kv_heads, length, config.head_dim)
        return LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    return tuple(layer(shape.num_kv_heads) for shape in layer_shapes(config))


def write_cache(
    cache: LayerCache, key_BTKH: jax.Array, value_BTKH: jax.Array, positions_BT: jax.Array
) -> LayerCache:
    """Return the cache with the new keys and values in the slots of their positions.

    Rows may stand at different positions. What padding behind a row's prompt writes is never seen:
    a query looks at slots up to its own position, and its row has rewritten each of them by then.
    """
    batch_size = positions_BT.shape[0]
    rows_B1 = jnp.arange(batch_size)[:, None]

    def write(cache_MSH: jax.Array, new_BTKH: jax.Array) -> jax.Array:
        cache_BKSH = cache_MSH.reshape(batch_size, -1, *cache_MSH.shape[1:])
        written_BKSH = cache_BKSH.at[rows_B1, :, positions_BT].set(new_BTKH.astype(cache_MSH.dtype))
        return written_BKSH.reshape(cache_MSH.shape)

    return LayerCache(write(cache.key_MSH, key_BTKH), write(cache.value_MSH, value_BTKH))

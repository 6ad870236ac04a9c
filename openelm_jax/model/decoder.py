"""The OpenELM decoder: pre-norm, QK-norm, grouped queries, SwiGLU, every layer its own width.

Legend: B batch, T time, S cache length, D model, N query heads, K kv heads, H head dim, F ffn,
V vocab. Kernels are stored [in, out], embedding and head [V, D]; parameters are float32 and cast
to the compute dtype where they are used. No layer is scanned over: no two need be alike. For
decoding a parameter may be a `Matrix` instead, in whatever form that stores it.

A mesh enters by `Collectives` and by `shapes`: a device then computes its own heads and columns of
each layer, from its own shard of each weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from openelm_jax.config import ModelConfig
from openelm_jax.model.adapters import UNADAPTED, Adapter, Adapters, LookupAdapter, adapter_at
from openelm_jax.model.attention import (
    Attend,
    Turns,
    attend,
    attend_slots,
    positions_in,
    rotate,
    turns,
)
from openelm_jax.model.cache import Cache, LayerCache, write_cache
from openelm_jax.model.matrix import FORMS, Matrix, multiply, product, rows_of
from openelm_jax.model.scaling import LayerShape, layer_shapes

Params = dict[str, Any]

NORM_EPS = {"rms_norm": 1e-6, "layer_norm": 1e-5}
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "swish": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}

REMAT_KEEPS: dict[str, tuple[str, ...]] = {
    "dots": ("qkv", "attention_out", "attention_log_partition", "attended", "wide", UNADAPTED),
    "save_attention": ("attention_out", "attention_log_partition"),
    "block": (),
}
"""The named activations that the backward pass of a layer finds, by `remat`; with `none`, all."""


def gather(weight: jax.Array | Matrix, path: str, dtype: Any) -> jax.Array | Matrix:
    """Return a weight in the compute dtype: what is done to it where nothing is sharded."""
    return weight if isinstance(weight, FORMS) else weight.astype(dtype)


@jax.custom_vjp
def _rows(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    return table_VD[tokens_BT]


def _rows_forward(table_VD, tokens_BT):
    return table_VD[tokens_BT], (table_VD, tokens_BT)


def _rows_backward(residuals, d_x_BTD):
    table_VD, tokens_BT = residuals
    return add_rows(table_VD.shape, tokens_BT, d_x_BTD), None


_rows.defvjp(_rows_forward, _rows_backward)


def add_rows(shape: tuple[int, ...], tokens_BT: jax.Array, x_BTD: jax.Array) -> jax.Array:
    """Return float32 [V, D], the sum of what `x_BTD` holds for each token."""
    return jnp.zeros(shape, jnp.float32).at[tokens_BT].add(x_BTD.astype(jnp.float32))


def embed(table_VD: jax.Array | Matrix, tokens_BT: jax.Array, dtype: Any) -> jax.Array:
    """Return the rows [B, T, D] of the tokens; a row's gradients are summed in float32."""
    if isinstance(table_VD, FORMS):
        return rows_of(table_VD, tokens_BT).astype(dtype)
    return _rows(table_VD, tokens_BT).astype(dtype)


def same(x: jax.Array, path: str) -> jax.Array:
    """Return `x`: what happens at the borders of a layer whose columns are not divided."""
    return x


class Collectives(NamedTuple):
    """Where a mesh enters the model; `path` is the parameter's, `layers_3/attention/qkv`, say.

    gather: (weight, path, dtype) -> the matrix that this device computes with. embed: (table,
    tokens, dtype) -> rows. enter, leave: around the products of a layer that devices divide by
    columns, `path` being that of the half layer.
    """

    gather: Callable[[jax.Array, str, Any], jax.Array] = gather
    embed: Callable[[jax.Array, jax.Array, Any], jax.Array] = embed
    enter: Callable[[jax.Array, str], jax.Array] = same
    leave: Callable[[jax.Array, str], jax.Array] = same


class Norm(nn.Module):
    """RMSNorm, or LayerNorm with a bias: statistics in float32, cast back, then scaled.

    (`rms_norm.py` of CoreNet: the product with the weight comes after the cast.)
    """

    kind: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        x_f32 = x.astype(jnp.float32)
        if self.kind == "layer_norm":
            x_f32 -= x_f32.mean(axis=-1, keepdims=True)
        mean_square = jnp.square(x_f32).mean(axis=-1, keepdims=True)
        normal = (x_f32 * jax.lax.rsqrt(mean_square + NORM_EPS[self.kind])).astype(x.dtype) * scale
        if self.kind == "layer_norm":
            normal += self.param("bias", nn.initializers.zeros, (x.shape[-1],), jnp.float32)
        return normal.astype(x.dtype)


class Attention(nn.Module):
    """Fused q|k|v projection, QK-norm, rotary embedding, grouped-query attention."""

    config: ModelConfig
    shape: LayerShape
    attend: Attend
    collectives: Collectives
    adapters: Adapters

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        turns: Turns,
        positions_BT: jax.Array | None,
        segments_BT: jax.Array | None,
        cache: LayerCache | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        config, shape, path = self.config, self.shape, path_of(self)
        qkv = _kernel(self, "qkv", config.model_dim, shape.query_dim + 2 * shape.kv_dim)
        out = _kernel(self, "out", shape.query_dim, config.model_dim, _residual_std(config))

        x_BTD = self.collectives.enter(x_BTD, path)
        heads = _projected(self, "qkv", x_BTD, qkv, keep="qkv")
        heads = heads.reshape(*x_BTD.shape[:2], -1, config.head_dim)
        query_BTNH, key_BTKH, value_BTKH = jnp.split(
            heads,
            [shape.num_query_heads, shape.num_query_heads + shape.num_kv_heads],
            axis=2,
        )
        if config.normalize_qk_projections:
            query_BTNH = Norm(config.normalization, name="query_norm")(query_BTNH)
            key_BTKH = Norm(config.normalization, name="key_norm")(key_BTKH)
        query_BTNH, key_BTKH = rotate(query_BTNH, turns), rotate(key_BTKH, turns)

        if cache is None:
            mixed_BTNH = self.attend(query_BTNH, key_BTKH, value_BTKH, segments_BT)
        else:
            assert positions_BT is not None, "a cache needs positions"
            assert segments_BT is None, "slots have no segments"
            cache = write_cache(cache, key_BTKH, value_BTKH, positions_BT)
            key_MSH = cache.key_MSH.astype(x_BTD.dtype)
            value_MSH = cache.value_MSH.astype(x_BTD.dtype)
            mixed_BTNH = attend_slots(query_BTNH, key_MSH, value_MSH, positions_BT)
        mixed_BTE = mixed_BTNH.reshape(*x_BTD.shape[:2], shape.query_dim)
        projected_BTD = _projected(self, "out", mixed_BTE, out)
        return self.collectives.leave(projected_BTD, path), cache


class FeedForward(nn.Module):
    """down(activation(gate x) * up x), gate and up fused in that order; or without the gate."""

    config: ModelConfig
    shape: LayerShape
    collectives: Collectives
    adapters: Adapters

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        config, ffn_dim, path = self.config, self.shape.ffn_dim, path_of(self)
        activation = ACTIVATIONS[config.activation]
        up = _kernel(self, "up", config.model_dim, (2 if config.ffn_with_glu else 1) * ffn_dim)
        down = _kernel(self, "down", ffn_dim, config.model_dim, _residual_std(config))

        x_BTD = self.collectives.enter(x_BTD, path)
        wide = _projected(self, "up", x_BTD, up, keep="wide")
        if config.ffn_with_glu:
            gate_BTF, up_BTF = jnp.split(wide, 2, axis=-1)
            wide_BTF = activation(gate_BTF) * up_BTF
        else:
            wide_BTF = activation(wide)
        projected_BTD = _projected(self, "down", wide_BTF, down)
        return self.collectives.leave(projected_BTD, path)


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + ffn(norm(x))."""

    config: ModelConfig
    shape: LayerShape
    attend: Attend
    collectives: Collectives
    adapters: Adapters

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        turns: Turns,
        positions_BT: jax.Array | None,
        segments_BT: jax.Array | None,
        cache: LayerCache | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        config, shape = self.config, self.shape
        normal = Norm(config.normalization, name="attention_norm")(x_BTD)
        rest = self.collectives, self.adapters
        mixed, cache = Attention(config, shape, self.attend, *rest, name="attention")(
            normal, turns, positions_BT, segments_BT, cache
        )
        x_BTD = checkpoint_name(x_BTD + mixed, "attended")
        normal = Norm(config.normalization, name="ffn_norm")(x_BTD)
        return x_BTD + FeedForward(config, shape, *rest, name="ffn")(normal), cache


class Decoder(nn.Module):
    """Tokens to logits.

    `attend` computes attention. `remat` says what the backward pass computes again, for all layers
    or for each; `shapes` are the widths that this device computes of each layer, if not all.
    """

    config: ModelConfig
    dtype: Any = jnp.float32
    remat: str | tuple[str, ...] = "none"
    attend: Attend = attend
    collectives: Collectives = Collectives()
    shapes: tuple[LayerShape, ...] | None = None
    adapters: Adapters = ()

    def setup(self) -> None:
        config = self.config
        shapes = self.shapes or layer_shapes(config)
        remats = (self.remat,) * len(shapes) if isinstance(self.remat, str) else self.remat
        self.layers = [
            _remade(remat)(config, shape, self.attend, self.collectives, self.adapters)
            for shape, remat in zip(shapes, remats, strict=True)
        ]
        self.final_norm = Norm(config.normalization)
        std = config.model_dim**-0.5
        self.embedding = _kernel(self, "embedding", config.vocab_size, config.model_dim, std)
        if shape := adapter_at(self.adapters, "embedding"):
            self.lookup = LookupAdapter(shape, config.vocab_size, name="embedding")
        if not config.tie_embeddings:
            self.head = _kernel(self, "head", config.vocab_size, config.model_dim, std)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Return float32 logits [B, T, V] of the token after each of `tokens_BT`."""
        hidden_BTD, _ = self.hidden(tokens_BT)
        return self.logits(hidden_BTD)

    def hidden(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        cache: Cache | None = None,
        segments_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Return the normed last layer [B, T, D] and the updated cache (None if none was given).

        Positions default to 0..T-1; they must be given with a cache, and where these are not the
        first tokens of their rows. `segments_BT` keeps the
        runs of equal numbers in it apart: each is computed as if it stood alone, from position 0.
        """
        x_BTD = self.collectives.embed(self.embedding, tokens_BT, self.dtype)
        if adapter_at(self.adapters, "embedding"):
            x_BTD = self.lookup(x_BTD, tokens_BT)
        if positions_BT is not None:
            rotate_at = positions_BT
        elif segments_BT is not None:
            rotate_at = positions_in(segments_BT)
        else:
            rotate_at = jnp.arange(tokens_BT.shape[1])[None]
        turned = turns(rotate_at, self.config.head_dim, self.config.rope_base)
        caches = [None] * len(self.layers) if cache is None else cache
        layer_caches: list[Any] = []
        for layer, layer_cache in zip(self.layers, caches, strict=True):
            x_BTD, layer_cache = layer(x_BTD, turned, positions_BT, segments_BT, layer_cache)
            layer_caches.append(layer_cache)
        return self.final_norm(x_BTD), None if cache is None else tuple(layer_caches)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return float32 logits [..., V] of hidden states [..., D]."""
        head_VD = head_matrix(self)
        if isinstance(head_VD, FORMS):
            return product(hidden, head_VD, jnp.float32)
        head_VD = head_VD.astype(hidden.dtype)
        return jnp.einsum("...D,VD->...V", hidden, head_VD, preferred_element_type=jnp.float32)


def head_matrix(decoder: Decoder) -> jax.Array:
    """Return the matrix [V, D] that makes logits: the embedding, or the head of its own."""
    return decoder.embedding if decoder.config.tie_embeddings else decoder.head


def head_of(config: ModelConfig, params: Params) -> jax.Array:
    """Return that matrix [V, D] from a parameter tree."""
    return params["embedding"] if config.tie_embeddings else params["head"]


def init_params(config: ModelConfig, seed: int) -> Params:
    """Return float32 parameters drawn as the reference draws them (`reset_parameters`).

    Normal, not truncated: std D^-0.5 for embedding, head and input projections, and
    D^-0.5 (2 num_layers)^-0.5 for the projections back into the residual stream; norms are 1.
    """
    tokens = jnp.zeros((1, 1), jnp.int32)
    init = jax.jit(Decoder(config).init)
    return init(jax.random.key(seed), tokens)["params"]


def init_adapters(config: ModelConfig, adapters: Adapters, params: Params, seed: int) -> Params:
    """Return new adapters of a model's parameters, float32: with them it makes what it made.

    A is uniform and B zero, of the embedding A zero and B normal, as peft begins them; the lengths
    of DoRA are those of `params`, which may be `frozen` ones.
    """
    decoder = Decoder(config, adapters=adapters)

    def init(params: Params, key: jax.Array) -> Params:
        tokens = jnp.zeros((1, 1), jnp.int32)
        _, made = decoder.apply(
            {"params": params}, tokens, rngs={"adapters": key}, mutable=["adapters"]
        )
        return made["adapters"]

    return jax.jit(init)(params, jax.random.key(seed))


def path_of(module: nn.Module) -> str:
    """Return the path of a module's parameters: `layers_3/attention`, say."""
    return "/".join(module.path)


def _remade(remat: str) -> type[Block]:
    """Return Block, with what its backward pass computes again."""
    if remat == "none":
        return Block
    keep = jax.checkpoint_policies.save_only_these_names(*REMAT_KEEPS[remat])
    return nn.remat(Block, policy=keep)


def _projected(
    module: Attention | FeedForward, name: str, x: jax.Array, weight: Any, keep: str | None = None
) -> jax.Array:
    """Return x times one of a module's matrices, gathered, with its adapter if it has one.

    It is an activation of the name `keep`; with an adapter what the matrix alone makes has a name.
    """
    path = f"{path_of(module)}/{name}"
    weight = module.collectives.gather(weight, path, x.dtype)
    if shape := adapter_at(module.adapters, path):
        return Adapter(shape, name=name)(x, weight)
    y = multiply(x, weight)
    return checkpoint_name(y, keep) if keep else y


def _kernel(
    module: nn.Module, name: str, dim_in: int, dim_out: int, std: float | None = None
) -> Any:
    if module.has_variable("params", name):  # a shard, maybe: not of the whole matrix's shape
        weight: Any = module.get_variable("params", name)
        return weight if isinstance(weight, FORMS) else jnp.asarray(weight)
    init = nn.initializers.normal(dim_in**-0.5 if std is None else std)
    return module.param(name, init, (dim_in, dim_out), jnp.float32)


def _residual_std(config: ModelConfig) -> float:
    """Uses D, not the projection's own input width: so does the reference."""
    return config.model_dim**-0.5 * (2 * config.num_layers) ** -0.5

"""Low-rank matrices beside frozen weights: LoRA (arXiv 2106.09685) and DoRA (arXiv 2402.09353).

Adapters are a collection of their own beside the parameters, by the paths of the matrices they
belong to, so that gradients and optimiser state are theirs alone. They are float32, computed with
in float32, as in peft; what a matrix makes with its adapter is cast once, to the compute type.

Legend: I inputs (of the embedding: the vocabulary), O outputs, R rank, B batch, T time, D model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from openelm_jax.errors import UserError
from openelm_jax.model.matrix import FORMS, Bits, Matrix, in_bits, multiply

Array = jax.Array

UNADAPTED = "unadapted"
"""The name of the activation that a matrix makes without its adapter."""


@dataclass(frozen=True, kw_only=True)
class AdapterShape:
    """What the adapter of one matrix is."""

    rank: int
    alpha: float
    """The scale of what is added, times the rank (or, with `rslora`, times its root)."""
    dropout: float = 0.0
    """Share of the inputs that the adapter does not see while training; an embedding's sees all."""
    rslora: bool = False
    """Divide by the root of the rank (arXiv 2312.03732)."""
    dora: bool = False
    """Train the length of each output's weights apart from their direction."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"the rank of an adapter is {self.rank}: it must be at least 1.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"the dropout of an adapter is {self.dropout}: it must be in [0, 1).")

    @property
    def scale(self) -> float:
        """What the product of the two matrices is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


Adapters = tuple[tuple[str, AdapterShape], ...]
"""Which matrices have an adapter: paths as `layers_3/attention/qkv` or `embedding`, and shapes."""


class Adapter(nn.Module):
    """x W + scale (x A) B; with DoRA each output rescaled to a trained length."""

    shape: AdapterShape

    @nn.compact
    def __call__(self, x: Array, weight: Array | Matrix) -> Array:
        """Return what a weight that `gather` made makes of x, with its adapter.

        Drops inputs where there is a random key for `dropout`. The length of DoRA's weights is a
        constant in the gradient (section 4.3 of its paper); the dropped inputs also go through the
        weight itself then, for what the rescaling adds (`DoraLinearLayer` of peft).
        """
        shape = self.shape
        dropping = shape.dropout > 0 and self.has_rng("dropout")
        key = self.make_rng("dropout") if dropping else None
        y = checkpoint_name(multiply(x, weight), UNADAPTED)
        down_IR, up_RO = _pair(self, _uniform, _zeros, (x.shape[-1], y.shape[-1]))
        add = jax.checkpoint(partial(_add, shape, key))  # else float32 copies of x would be kept
        if not shape.dora:
            return add(x, y, down_IR, up_RO)
        magnitude_O = self.variable(
            "adapters", "magnitude_O", lambda: lengths(_widened(weight))
        ).value
        weight_IO, *fixed = jax.lax.stop_gradient((_widened(weight), down_IR, up_RO))
        gain_O = magnitude_O / lengths(weight_IO + shape.scale * (fixed[0] @ fixed[1]))
        if key is None:
            return add(x, y, down_IR, up_RO, gain_O, y)
        seen_y = multiply(_seen(x, shape, key).astype(x.dtype), weight)
        return add(x, y, down_IR, up_RO, gain_O, checkpoint_name(seen_y, UNADAPTED))


class LookupAdapter(nn.Module):
    """Rows of the embedding plus scale A[token] B; logits of tied embeddings do not see it."""

    shape: AdapterShape
    vocab_size: int

    @nn.compact
    def __call__(self, rows_BTD: Array, tokens_BT: Array) -> Array:
        """Return the rows of the tokens with what the adapter adds."""
        assert not self.shape.dora, "an embedding has no DoRA"
        dims = (self.vocab_size, rows_BTD.shape[-1])
        down_IR, up_RO = _pair(self, _zeros, _normal, dims)
        added_BTD = self.shape.scale * (down_IR[tokens_BT] @ up_RO)
        return (rows_BTD.astype(jnp.float32) + added_BTD).astype(rows_BTD.dtype)


def _add(
    shape: AdapterShape,
    key: Array | None,
    x: Array,
    y: Array,
    down_IR: Array,
    up_RO: Array,
    gain_O: Array | None = None,
    seen_y: Array | None = None,
) -> Array:
    """Return y with what the adapter makes of x; `gain_O` and `seen_y` are DoRA's."""
    added = shape.scale * (_seen(x, shape, key) @ down_IR @ up_RO)
    whole = y.astype(jnp.float32)
    if gain_O is None or seen_y is None:
        return (whole + added).astype(y.dtype)
    return (whole + (gain_O - 1) * seen_y.astype(jnp.float32) + gain_O * added).astype(y.dtype)


def _seen(x: Array, shape: AdapterShape, key: Array | None) -> Array:
    """Return in float32 the inputs that are not dropped, made as large as all were."""
    x = x.astype(jnp.float32)
    if key is None:
        return x
    left = jax.random.bernoulli(key, 1 - shape.dropout, x.shape)
    return jnp.where(left, x / (1 - shape.dropout), 0)


def adapter_at(adapters: Adapters, path: str) -> AdapterShape | None:
    """Return the shape of the adapter of the matrix at `path`, None if it has none."""
    return dict(adapters).get(path)


def lengths(weight_IO: Any) -> Any:
    """Return the length [O] of each output's weights, of a NumPy or a JAX array."""
    return (weight_IO * weight_IO).sum(axis=0) ** 0.5


def merged(weight_IO: Any, shape: AdapterShape, adapter: dict[str, Any]) -> Any:
    """Return in float32 the matrix that makes what a matrix and its adapter make.

    NumPy arrays give a NumPy array, JAX arrays a JAX array.
    """
    weight_IO = weight_IO.astype(np.float32)
    weight_IO = weight_IO + shape.scale * (adapter["down_IR"] @ adapter["up_RO"])
    if shape.dora:
        weight_IO = weight_IO * (adapter["magnitude_O"] / lengths(weight_IO))
    return weight_IO


def frozen(
    path: tuple[str, ...], array: Any, dtype: jax.typing.DTypeLike, bits: Bits | None = None
) -> Array | Matrix:
    """Return one of our parameters as it is kept where only adapters are trained.

    Norms are float32 and matrices in `dtype`, or in `bits` all but embedding and head (QLoRA, arXiv
    2305.14314).
    """
    if array.ndim == 1:
        return jnp.asarray(array, jnp.float32)
    if bits is None or path[-1] in ("embedding", "head"):
        return jnp.asarray(array, dtype)
    return in_bits(array.T, bits, dtype)


def _pair(module: nn.Module, down: Any, up: Any, dims: tuple[int, int]) -> tuple[Array, Array]:
    """Return A [I, R] and B [R, O] of a module, as they are or as they begin."""
    rank = module.shape.rank
    shapes = {"down_IR": (down, (dims[0], rank)), "up_RO": (up, (rank, dims[1]))}

    def part(name: str) -> Array:
        init, shape = shapes[name]
        array = module.variable("adapters", name, lambda: init(module, shape)).value
        assert array.shape == shape, f"{module.path} {name}: {array.shape}, not {shape}"
        return array

    return part("down_IR"), part("up_RO")


def _uniform(module: nn.Module, shape: tuple[int, int]) -> Array:
    """Kaiming's with a = sqrt(5): between -1 and 1 over the root of the inputs."""
    most = shape[0] ** -0.5
    return jax.random.uniform(module.make_rng("adapters"), shape, jnp.float32, -most, most)


def _normal(module: nn.Module, shape: tuple[int, int]) -> Array:
    return jax.random.normal(module.make_rng("adapters"), shape, jnp.float32)


def _zeros(module: nn.Module, shape: tuple[int, int]) -> Array:
    return jnp.zeros(shape, jnp.float32)


def _widened(weight: Array | Matrix) -> Array:
    """Return a matrix that `gather` made as float32 [I, O]."""
    return (
        weight.widened().T.astype(jnp.float32)
        if isinstance(weight, FORMS)
        else (weight.astype(jnp.float32))
    )

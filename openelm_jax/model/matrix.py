"""Matrices as decoding stores them: a row for each output, in the compute type or in fewer bits.

A token reads every weight once, so decoding is as fast as memory is read, and fewer bits are less
to read. The products are written as XLA makes them fast on the platform: its CPU compiler turns
most products of one vector with a matrix that is not float32 into scalar loops.

Legend: R rows of activations, I inputs, O outputs, P parts of the outputs and o outputs of a part,
G groups of inputs, E inputs of a group, H half of E.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

GROUP_SIZE = 64
"""Inputs that share a scale in four bits."""
PARTS = 8
"""Of a matrix, among which a CPU's threads divide the outputs of one row of activations."""
MOST_VECTORS = 8
"""Rows that a CPU multiplies one by one with eight bits; widening the matrix pays for more."""


class Dense(NamedTuple):
    """A matrix in the compute type."""

    weight_OI: jax.Array

    def widened(self) -> jax.Array:
        return self.weight_OI


class Int8(NamedTuple):
    """Levels from -127 to 127 of an output's largest weight."""

    levels_OI: jax.Array
    scale_O1: jax.Array

    def widened(self) -> jax.Array:
        return self.levels_OI.astype(jnp.float32) * self.scale_O1


class Int4(NamedTuple):
    """Levels from 0 to 15 between the least and the largest weight of a group of an output.

    A byte has the level of input e of a group in its lower half, that of input e + H in the upper.
    """

    levels_OGH: jax.Array
    scale_OG1: jax.Array
    bias_OG1: jax.Array

    def widened(self) -> jax.Array:
        levels_OGE = jnp.concatenate([self.levels_OGH & 15, self.levels_OGH >> 4], axis=-1)
        weight_OGE = levels_OGE.astype(jnp.float32) * self.scale_OG1 + self.bias_OG1
        return weight_OGE.reshape(len(weight_OGE), -1)


Matrix = Dense | Int8 | Int4
Bits = Literal[4, 8]
FORMS = (Dense, Int8, Int4)


def in_bits(weight_OI: np.ndarray | jax.Array, bits: Bits, dtype: jax.typing.DTypeLike) -> Matrix:
    """Return a matrix in 8 or 4 bits, each weight at its nearest level.

    In four bits one whose inputs are no multiple of 64 stays in `dtype`. Scales are float32.
    """
    if bits == 4 and weight_OI.shape[1] % GROUP_SIZE:
        return Dense(jnp.asarray(weight_OI, dtype))
    weight_OI = np.asarray(weight_OI, np.float32)
    if bits == 8:
        scale_O1 = np.abs(weight_OI).max(axis=1, keepdims=True) / 127
        levels_OI = np.rint(weight_OI / _nonzero(scale_O1)).astype(np.int8)
        return Int8(jnp.asarray(levels_OI), jnp.asarray(scale_O1))
    weight_OGE = weight_OI.reshape(len(weight_OI), -1, GROUP_SIZE)
    bias_OG1 = weight_OGE.min(axis=-1, keepdims=True)
    scale_OG1 = (weight_OGE.max(axis=-1, keepdims=True) - bias_OG1) / 15
    levels_OGE = np.rint((weight_OGE - bias_OG1) / _nonzero(scale_OG1)).astype(np.uint8)
    low_OGH, high_OGH = np.split(levels_OGE, 2, axis=-1)
    return Int4(*(jnp.asarray(part) for part in (low_OGH | high_OGH << 4, scale_OG1, bias_OG1)))


def rows_of(matrix: Matrix, index: jax.Array) -> jax.Array:
    """Return the matrix's rows at `index` [...], as float32 or the compute type [..., I]."""
    flat = jax.tree.map(lambda part: part[index.reshape(-1)], matrix)
    return flat.widened().reshape(*index.shape, -1)


def multiply(x: jax.Array, weight: jax.Array | Matrix) -> jax.Array:
    """Return x [..., I] times an array [I, O] or a matrix, in the type of `x`."""
    return product(x, weight) if isinstance(weight, FORMS) else x @ weight


def product(x: jax.Array, matrix: Matrix, out_dtype: jax.typing.DTypeLike | None = None):
    """Return x [..., I] times a matrix, [..., O], in the type of `x` unless another is named.

    Sums are float32. The gradient is that of `x` alone.
    """
    y_RO = _product(x.reshape(-1, x.shape[-1]), matrix)
    return y_RO.astype(out_dtype or x.dtype).reshape(*x.shape[:-1], -1)


@jax.custom_vjp
def _product(x_RI: jax.Array, matrix: Matrix) -> jax.Array:
    return jax.lax.platform_dependent(x_RI, matrix, cpu=_on_cpu, default=_anywhere)


def _product_forward(x_RI, matrix):
    # The matrix is kept for the gradient as it is stored: JAX would keep it widened.
    return _product(x_RI, matrix), (matrix, jnp.zeros((), x_RI.dtype))


def _product_backward(residuals, d_RO):
    matrix, of_type = residuals
    weight_OI = matrix.widened().astype(of_type.dtype)
    d_RI = jnp.einsum(
        "RO,OI->RI", d_RO.astype(of_type.dtype), weight_OI, preferred_element_type=jnp.float32
    )
    return d_RI.astype(of_type.dtype), None


_product.defvjp(_product_forward, _product_backward)


def _anywhere(x_RI: jax.Array, matrix: Matrix) -> jax.Array:
    return _dot(x_RI, matrix.widened().astype(x_RI.dtype))


def _on_cpu(x_RI: jax.Array, matrix: Matrix) -> jax.Array:
    match matrix:
        case Dense(weight_OI) if len(x_RI) == 1 and weight_OI.dtype == jnp.float32:
            return _parts(x_RI, weight_OI)
        case Dense(weight_OI) if len(x_RI) == 1:
            return _vectors(x_RI, weight_OI)
        case Int8(levels_OI, scale_O1) if len(x_RI) <= MOST_VECTORS:
            return _vectors(x_RI, levels_OI) * scale_O1[:, 0]
        case Int4() if len(x_RI) <= MOST_VECTORS:
            return _groups(x_RI, matrix)
        case Int8() | Int4():  # exactly the weights of fewer rows, whatever the compute type
            return _dot(x_RI.astype(jnp.float32), matrix.widened())
    return _anywhere(x_RI, matrix)


def _dot(x_RI: jax.Array, weight_OI: jax.Array) -> jax.Array:
    return jnp.einsum("RI,OI->RO", x_RI, weight_OI, preferred_element_type=jnp.float32)


def _parts(x_1I: jax.Array, weight_OI: jax.Array) -> jax.Array:
    """Multiply by parts of the matrix: one product of a vector would be a single thread's work."""
    num_parts = math.gcd(PARTS, len(weight_OI))
    weight_PoI = weight_OI.reshape(num_parts, -1, weight_OI.shape[1])
    x_P1I = jnp.broadcast_to(x_1I, (num_parts, *x_1I.shape))
    return jnp.einsum("PRI,PoI->PRo", x_P1I, weight_PoI).reshape(1, -1)


def _vectors(x_RI: jax.Array, weight_OI: jax.Array) -> jax.Array:
    """Multiply and add up in float32, widening what is read as it is read."""
    sums = []
    for x_I in x_RI.astype(jnp.float32):
        # The barrier keeps apart what would be a loop of scalars together: the rows, and whatever
        # makes `x_I`; and it keeps the widening in the loop over tokens.
        weight_OI, x_I = jax.lax.optimization_barrier((weight_OI, x_I))
        sums.append((weight_OI.astype(jnp.float32) * x_I).sum(axis=-1))
    return jnp.stack(sums)


def _groups(x_RI: jax.Array, matrix: Int4) -> jax.Array:
    """Add up the levels of a group before they are scaled: no matrix of float32 is made."""
    _, groups, half = matrix.levels_OGH.shape
    low_OGH, high_OGH = matrix.levels_OGH & 15, matrix.levels_OGH >> 4
    sums = []
    for x_G2H in x_RI.astype(jnp.float32).reshape(-1, groups, 2, half):
        weighted_OGH = low_OGH.astype(jnp.float32) * x_G2H[:, 0]
        weighted_OGH += high_OGH.astype(jnp.float32) * x_G2H[:, 1]
        of_group_OG = weighted_OGH.sum(axis=-1) * matrix.scale_OG1[..., 0]
        of_group_OG += matrix.bias_OG1[..., 0] * x_G2H.sum(axis=(1, 2))
        sums.append(of_group_OG.sum(axis=-1))
    return jnp.stack(sums)


def _nonzero(scale: np.ndarray) -> np.ndarray:
    return np.where(scale == 0, 1, scale)

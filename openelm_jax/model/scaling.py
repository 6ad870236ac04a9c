"""Layer-wise scaling (paper Eq. 1), with the rounding that Apple's code really does.

Two things are not in the equation and change shapes: the interpolated multipliers are rounded to
two decimals, and widths go to the nearest multiple of a divisor. Pure Python, no jax.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

from openelm_jax.config import ModelConfig

NOT_COMPARED = {
    "vocab_size",
    "context_length",
    "num_gqa_groups",
    "qkv_multipliers",
    "ffn_multipliers",
    "ffn_dim_divisor",
}
"""Fields by which two configs may differ and have the same matrices in every layer."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The widths of one layer."""

    model_dim: int
    head_dim: int
    num_query_heads: int
    num_kv_heads: int
    ffn_dim: int
    qkv_multiplier: float
    ffn_multiplier: float

    @property
    def query_dim(self) -> int:
        return self.num_query_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim


@lru_cache
def layer_shapes(config: ModelConfig) -> tuple[LayerShape, ...]:
    """Return the shape of every layer, first to last (`GPTConfig` in CoreNet's general_gpt.py)."""
    alphas = expand_multipliers(config.qkv_multipliers, config.num_layers)
    betas = expand_multipliers(config.ffn_multipliers, config.num_layers)
    shapes = []
    for alpha, beta in zip(alphas, betas, strict=True):
        query_dim = make_divisible(
            config.model_dim * alpha, config.head_dim * config.num_gqa_groups
        )
        num_query_heads = query_dim // config.head_dim
        shapes.append(
            LayerShape(
                model_dim=config.model_dim,
                head_dim=config.head_dim,
                num_query_heads=num_query_heads,
                num_kv_heads=num_query_heads // config.num_gqa_groups,
                ffn_dim=make_divisible(beta * config.model_dim, config.ffn_dim_divisor),
                qkv_multiplier=alpha,
                ffn_multiplier=beta,
            )
        )
    return tuple(shapes)


def expand_multipliers(value: float | tuple[float, ...], num_layers: int) -> tuple[float, ...]:
    """Return one multiplier a layer.

    A pair is interpolated linearly, first to last, and each value rounded to two decimals: the
    rounding is Apple's, and without it seven layers of the published models have other shapes.
    """
    if not isinstance(value, tuple):
        return (float(value),) * num_layers
    if len(value) == 2:
        first, last = value
        step = (last - first) / max(num_layers - 1, 1)
        points = [first + i * step for i in range(num_layers)]
        points[num_layers - 1 :] = [last] if num_layers > 1 else [first]
        return tuple(round(point, 2) for point in points)
    return tuple(float(v) for v in value)


def make_divisible(value: float, divisor: int) -> int:
    """Return the multiple of `divisor` nearest to `value`, halves up, never below 0.9 of it.

    (`make_divisible` in CoreNet's math_utils.py.)
    """
    nearest = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return nearest + divisor if nearest < 0.9 * value else nearest


def differing_widths(a: ModelConfig, b: ModelConfig) -> list[str]:
    """Return one line for each thing in which two configs are other models: `model.field: a, b`.

    Layers are compared by their widths, however the multipliers are spelled. Rows of vocabulary
    and context length make no other model.
    """
    fields = [
        field.name for field in dataclasses.fields(ModelConfig) if field.name not in NOT_COMPARED
    ]
    pairs = [(f"model.{name}", getattr(a, name), getattr(b, name)) for name in fields]
    if a.num_layers == b.num_layers:
        pairs += [
            (
                f"{name} by layer",
                [getattr(shape, name) for shape in layer_shapes(a)],
                [getattr(shape, name) for shape in layer_shapes(b)],
            )
            for name in ("num_query_heads", "num_kv_heads", "ffn_dim")
        ]
    return [f"{name}: {in_a!r}, {in_b!r}" for name, in_a, in_b in pairs if in_a != in_b]


def parameter_count(config: ModelConfig, vocab_size: int | None = None) -> int:
    """Return the number of parameters, at the config's vocabulary or at `vocab_size`."""
    rows = config.vocab_size if vocab_size is None else vocab_size
    embeddings = rows * config.model_dim * (1 if config.tie_embeddings else 2)
    layers = sum(layer_parameter_count(config, shape) for shape in layer_shapes(config))
    return embeddings + layers + _norm_parameters(config, config.model_dim)


def layer_parameter_count(config: ModelConfig, shape: LayerShape) -> int:
    """Return the number of parameters of one layer, norms included."""
    qk_norms = 2 * _norm_parameters(config, shape.head_dim)
    return (
        sum(_matrix_sizes(config, shape))
        + 2 * _norm_parameters(config, shape.model_dim)
        + (qk_norms if config.normalize_qk_projections else 0)
    )


def flops_per_token(config: ModelConfig, context_length: int | None = None) -> int:
    """Return the matrix-product FLOPs of one token's forward pass, a multiply-add counted as two.

    Attention is causal: a token sees (context_length + 1) / 2 keys on average. A training step
    costs three times this (forward, and two products a matrix in the backward pass).
    """
    length = config.context_length if context_length is None else context_length
    flops = 2 * config.model_dim * config.vocab_size
    for shape in layer_shapes(config):
        flops += 2 * sum(_matrix_sizes(config, shape))
        flops += 2 * shape.query_dim * (length + 1)  # scores and weighted sum: 2 * 2 * (length+1)/2
    return flops


def _matrix_sizes(config: ModelConfig, shape: LayerShape) -> tuple[int, int, int, int]:
    ffn_in = (2 if config.ffn_with_glu else 1) * shape.ffn_dim
    return (
        shape.model_dim * (shape.query_dim + 2 * shape.kv_dim),
        shape.query_dim * shape.model_dim,
        shape.model_dim * ffn_in,
        shape.ffn_dim * shape.model_dim,
    )


def _norm_parameters(config: ModelConfig, width: int) -> int:
    return width * (2 if config.normalization == "layer_norm" else 1)

"""What a training step keeps in memory, by the shapes alone, and which layers should recompute.

Legend: D model, N query heads, K kv heads, H head dim, F ffn, V vocab. Needs no jax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.model.scaling import (
    LayerShape,
    layer_parameter_count,
    layer_shapes,
    parameter_count,
)

Remat = Literal["none", "dots", "save_attention", "block"]

KEPT: dict[Remat, tuple[str, ...]] = {
    "none": (
        *("input", "normal", "qkv", "turned", "attention_out", "columns", "log_partition"),
        *("attended", "ffn_normal", "wide", "gated"),
    ),
    "dots": ("input", "qkv", "attention_out", "log_partition", "attended", "wide"),
    "save_attention": ("input", "attention_out", "log_partition"),
    "block": ("input",),
}
"""The `activations` that the backward pass of a layer finds; it computes the others again."""

FLOAT32 = 4
GIB = 2**30
LOGITS_BYTES = 256 * 2**20
"""Most bytes of a chunk's float32 logits."""
CHUNK_MULTIPLE = 128
UNITS = 20_000
"""Parts of a budget: what a layer keeps is rounded up to whole ones when layers are chosen."""


def activations(
    config: ModelConfig,
    shape: LayerShape,
    *,
    dtype_bytes: int,
    context: int = 1,
    lanes: int = 0,
) -> dict[str, int]:
    """Return the bytes a token of what a layer's gradient needs, by name.

    `shape` is what a device computes of the layer. Of `context` devices that divide a row, each
    has its own queries and the keys and values of all. These are the residuals that autodiff
    saves of `decoder.Block`, without its weights: pointwise functions (norms, the gate) keep only
    their inputs, attention is a kernel that keeps no scores, and its output stands there twice, as
    heads for its own gradient and as columns for the product that follows.

    On a TPU, whose registers are `lanes` wide, heads are filled up to that width, and pointwise
    functions are computed within the product that reads them, so that nothing of them stands in
    memory. (Both as in what its compiler allots.)
    """
    query, kv, model = shape.query_dim, shape.kv_dim, shape.model_dim
    pointwise = 0 if lanes else 1
    filled = -(-config.head_dim // lanes) * lanes / config.head_dim if lanes else 1
    # without a norm before the rotation, nothing needs queries and keys that are not yet turned
    turned = query + kv if config.normalize_qk_projections else 0
    elements = {
        "input": model,
        "normal": model * pointwise,
        "qkv": query + 2 * kv,
        "turned": int((turned + 2 * kv * (context - 1)) * filled),
        "attention_out": int(query * filled),
        "columns": query,
        "attended": model,
        "ffn_normal": model * pointwise,
        "wide": _wide_dim(config, shape),
        "gated": shape.ffn_dim * pointwise,
    }
    log_partition = {"log_partition": shape.num_query_heads * FLOAT32}
    return {name: count * dtype_bytes for name, count in elements.items()} | log_partition


def kept_by_layer(
    config: ModelConfig,
    shape: LayerShape,
    remat: Remat,
    *,
    dtype_bytes: int,
    context: int = 1,
    lanes: int = 0,
) -> int:
    """Return the bytes a token that a layer keeps from its forward to its backward pass."""
    parts = activations(config, shape, dtype_bytes=dtype_bytes, context=context, lanes=lanes)
    return sum(parts[name] for name in KEPT[remat])


def working_by_layer(
    config: ModelConfig,
    shape: LayerShape,
    remat: Remat,
    *,
    dtype_bytes: int,
    context: int = 1,
    lanes: int = 0,
) -> int:
    """Return the bytes a token that a layer's backward pass needs besides what was kept for it.

    What it computes again is all there when its feed-forward network begins: with the gradients
    of both sides of the gate, and of what comes into and goes out of the half layer.
    """
    parts = activations(config, shape, dtype_bytes=dtype_bytes, context=context, lanes=lanes)
    again = sum(parts.values()) - sum(parts[name] for name in KEPT[remat])
    return again + parts["gated"] + parts["wide"] + 2 * parts["input"]


def recomputed_by_layer(
    config: ModelConfig, shape: LayerShape, remat: Remat, context_length: int | None = None
) -> int:
    """Return the FLOPs a token of the matrix products that a layer's backward pass repeats.

    Attention is causal: a token sees (context_length + 1) / 2 keys on average. The product back
    from the FFN is never repeated: no gradient needs its result.
    """
    if remat in ("none", "dots"):
        return 0
    length = config.context_length if context_length is None else context_length
    columns = shape.query_dim + 2 * shape.kv_dim + shape.query_dim + _wide_dim(config, shape)
    flops = 2 * shape.model_dim * columns
    return flops + (2 * shape.query_dim * (length + 1) if remat == "block" else 0)


def recomputed_flops(
    config: ModelConfig,
    remats: Sequence[Remat],
    *,
    tokens: int = 1,
    shapes: Sequence[LayerShape] | None = None,
    context_length: int | None = None,
) -> int:
    """Return the FLOPs that the backward pass of all layers repeats for `tokens` tokens."""
    layers = zip(shapes or layer_shapes(config), remats, strict=True)
    return tokens * sum(
        recomputed_by_layer(config, shape, remat, context_length) for shape, remat in layers
    )


def kept_bytes(
    config: ModelConfig,
    remats: Sequence[Remat],
    *,
    tokens: int,
    dtype_bytes: int,
    shapes: Sequence[LayerShape] | None = None,
    context: int = 1,
    lanes: int = 0,
) -> int:
    """Return the bytes that all layers keep for the backward pass of `tokens` of a device."""
    layers = zip(shapes or layer_shapes(config), remats, strict=True)
    return tokens * sum(
        kept_by_layer(config, shape, remat, dtype_bytes=dtype_bytes, context=context, lanes=lanes)
        for shape, remat in layers
    )


def backward_bytes(
    config: ModelConfig,
    remats: Sequence[Remat],
    *,
    tokens: int,
    dtype_bytes: int,
    shapes: Sequence[LayerShape] | None = None,
    context: int = 1,
    lanes: int = 0,
) -> list[int]:
    """Return the bytes of activations while each layer's backward pass runs, first layer first.

    That is what this layer and those before it keep, and what this one computes again; what those
    after it kept is gone. The largest of these is what must fit.
    """
    sizes = {"dtype_bytes": dtype_bytes, "context": context, "lanes": lanes}
    layers = list(zip(shapes or layer_shapes(config), remats, strict=True))
    kept = accumulate(kept_by_layer(config, shape, remat, **sizes) for shape, remat in layers)
    working = (working_by_layer(config, shape, remat, **sizes) for shape, remat in layers)
    return [tokens * (a + b) for a, b in zip(kept, working, strict=True)]


def choose_remat(
    config: ModelConfig,
    *,
    tokens: int,
    budget_bytes: int,
    dtype_bytes: int,
    shapes: Sequence[LayerShape] | None = None,
    context: int = 1,
    lanes: int = 0,
    among: Sequence[Remat] = ("none", "dots", "save_attention", "block"),
) -> tuple[Remat, ...]:
    """Return one remat a layer, so that activations fit and the fewest FLOPs are repeated.

    `tokens` are those of a device and of one part of the batch. At equal FLOPs the layers keep as
    much of the rest as fits. A dynamic programme over UNITS parts of the budget, layer by layer:
    exact but for the rounding up of each layer's bytes. Raises UserError if nothing fits.
    """
    shapes = layer_shapes(config) if shapes is None else shapes
    sizes = {"dtype_bytes": dtype_bytes, "context": context, "lanes": lanes}
    everywhere: list[Remat] = ["block"] * len(shapes)
    least = _peak(config, everywhere, tokens=tokens, shapes=shapes, **sizes)
    if least > budget_bytes:
        raise _does_not_fit(tokens, least, budget_bytes)
    # Counted from what `block` everywhere keeps, so that rounding cannot forbid that.
    kept = _table(kept_by_layer, config, shapes, among, **sizes) * tokens
    working = _table(working_by_layer, config, shapes, among, **sizes) * tokens
    floor = _table(kept_by_layer, config, shapes, ("block",), **sizes) * tokens
    more = kept - floor
    room = budget_bytes - np.cumsum(floor, axis=0) - working - more
    unit = max(1, -(-int(room.max()) // UNITS))
    taken, most = -(-more // unit), room // unit
    costs = np.full(int((most + taken).max()) + 1, np.inf)
    costs[0] = 0.0
    choices = np.zeros((len(shapes), len(costs)), np.int8)
    for layer, shape in enumerate(shapes):
        best = np.full(len(costs), np.inf)
        for option, remat in enumerate(among):
            end, shift = int(most[layer, option]) + 1, int(taken[layer, option])
            if end <= 0:
                continue
            cost = costs[:end] + _cost(config, shape, remat, **sizes)
            reached = slice(shift, shift + end)
            better = cost < best[reached]
            np.copyto(best[reached], cost, where=better)
            np.copyto(choices[layer, reached], option, where=better)
        costs = best
    assert np.isfinite(costs.min()), "block everywhere fits"
    used = int(costs.argmin())
    remats: list[Remat] = []
    for layer in reversed(range(len(shapes))):
        option = choices[layer, used]
        used -= int(taken[layer, option])
        remats.append(among[option])
    return tuple(reversed(remats))


def uniform_block(
    config: ModelConfig,
    *,
    tokens: int,
    budget_bytes: int,
    dtype_bytes: int,
    shapes: Sequence[LayerShape] | None = None,
    context: int = 1,
    lanes: int = 0,
    rest: Remat = "none",
) -> tuple[Remat, ...]:
    """Return what `block` does best when a run of neighbouring layers has it and the others `rest`.

    Of all runs that fit, the one that repeats the fewest FLOPs. Raises UserError if none fits.
    """
    shapes = layer_shapes(config) if shapes is None else shapes
    sizes = {"dtype_bytes": dtype_bytes, "context": context, "lanes": lanes}
    ends = range(len(shapes) + 1)
    runs: list[tuple[Remat, ...]] = [
        tuple("block" if first <= layer < end else rest for layer in range(len(shapes)))
        for first in ends
        for end in ends[first:]
    ]
    peaks = [_peak(config, run, tokens=tokens, shapes=shapes, **sizes) for run in runs]
    fitting = [run for run, peak in zip(runs, peaks, strict=True) if peak <= budget_bytes]
    if not fitting:
        raise _does_not_fit(tokens, min(peaks), budget_bytes)
    return min(fitting, key=lambda run: recomputed_flops(config, run, shapes=shapes))


def loss_chunk_size(config: ModelConfig, tokens: int) -> int:
    """Return the tokens of a chunk of the loss for `tokens` of a device.

    Chunks are as even as multiples of CHUNK_MULTIPLE are, and as few as LOGITS_BYTES allows.
    """
    lanes = LOGITS_BYTES // (FLOAT32 * config.vocab_size * CHUNK_MULTIPLE)
    most = max(lanes, 1) * CHUNK_MULTIPLE
    chunks = math.ceil(tokens / most)
    even = math.ceil(tokens / chunks)
    return min(tokens, math.ceil(even / CHUNK_MULTIPLE) * CHUNK_MULTIPLE)


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes of a device at the moment of a step when it holds most; `moment` says which."""

    parameters: int
    first_moment: int
    second_moment: int
    gradients: int
    """Of the part of the batch at hand, as far as they are made by then."""
    accumulated: int
    """The sum of the gradients of earlier parts."""
    activations: int
    gathered: int
    """Whole matrices in the compute dtype, and whole gradients that are not yet divided."""
    logits: int
    moment: str
    scores: int = 0
    """Of a kernel of attention that holds them, which `parallel/memory.py` knows."""

    @property
    def state(self) -> int:
        return self.parameters + self.first_moment + self.second_moment

    @property
    def total(self) -> int:
        made = self.gradients + self.accumulated + self.activations + self.scores
        return self.state + made + self.gathered + self.logits


def step_bytes(
    config: ModelConfig,
    remats: Sequence[Remat],
    *,
    tokens: int,
    dtype_bytes: int,
    loss_chunk: int,
    shards: int = 1,
    accumulation: int = 1,
    first_moment_bytes: int = FLOAT32,
    shapes: Sequence[LayerShape] | None = None,
    context: int = 1,
    lanes: int = 0,
) -> StepBytes:
    """Return what a device holds of one step at its worst moment.

    `shards` devices divide each matrix, where it is stored; `shapes` are what the tensor axis
    leaves a device to compute of each layer. The moments that compete: the loss, when every layer
    has kept what it keeps; the backward pass of each layer; and its end, at the embedding.
    """
    shapes = layer_shapes(config) if shapes is None else shapes
    sizes: dict[str, Any] = {
        "tokens": tokens,
        "dtype_bytes": dtype_bytes,
        "context": context,
        "lanes": lanes,
    }
    layers = [layer_parameter_count(config, shape) for shape in layer_shapes(config)]
    computed = [layer_parameter_count(config, shape) for shape in shapes]
    table = config.vocab_size * config.model_dim
    parameters = -(-parameter_count(config) // shards)
    ends = tokens * config.model_dim * dtype_bytes  # the hidden states that the loss sees
    kept = kept_bytes(config, remats, shapes=shapes, **sizes) + ends

    def held(moment: str, gradients: float, activations: int, gathered: int, logits: int = 0):
        return StepBytes(
            parameters=parameters * FLOAT32,
            first_moment=parameters * first_moment_bytes,
            second_moment=parameters * FLOAT32,
            gradients=math.ceil(gradients) * FLOAT32,
            accumulated=parameters * FLOAT32 if accumulation > 1 else 0,
            activations=activations,
            gathered=gathered,
            logits=logits,
            moment=moment,
        )

    # float32 logits and what becomes of them, then the gradient that the two products read
    logits = loss_chunk * config.vocab_size * (2 * FLOAT32 + dtype_bytes)
    moments = [held("loss", 0, kept + ends, table * (dtype_bytes + FLOAT32), logits)]
    for layer, at_layer in enumerate(backward_bytes(config, remats, shapes=shapes, **sizes)):
        made = (sum(layers[layer + 1 :]) + table) / shards
        # this layer's matrices and the next one's to come, and this one's gradient
        neighbours = computed[layer] + computed[max(layer - 1, 0)]
        gathered = neighbours * dtype_bytes + computed[layer] * FLOAT32
        moments.append(held(f"backward pass of layer {layer}", made, at_layer, gathered))
    moments.append(held("embedding", parameters, ends, table * FLOAT32 if shards > 1 else 0))
    return max(moments, key=lambda moment: moment.total)


def _wide_dim(config: ModelConfig, shape: LayerShape) -> int:
    return (2 if config.ffn_with_glu else 1) * shape.ffn_dim


def _table(
    function: Callable[..., int],
    config: ModelConfig,
    shapes: Sequence[LayerShape],
    among: Sequence[Remat],
    **sizes: int,
) -> np.ndarray:
    """Return what `function` says of each layer [rows] with each remat [columns], int64."""
    rows = [[function(config, shape, remat, **sizes) for remat in among] for shape in shapes]
    return np.array(rows, np.int64)


def _peak(config: ModelConfig, remats: Sequence[Remat], **sizes) -> int:
    return max(backward_bytes(config, remats, **sizes))


def _cost(config: ModelConfig, shape: LayerShape, remat: Remat, **sizes: int) -> float:
    """FLOPs repeated, and one for each byte made again: too few to outweigh any product."""
    full = kept_by_layer(config, shape, "none", **sizes)
    again = full - kept_by_layer(config, shape, remat, **sizes)
    return float(recomputed_by_layer(config, shape, remat) + again)


def _does_not_fit(tokens: int, least: int, budget_bytes: int) -> UserError:
    return UserError(
        f"The activations of {tokens:,} tokens need {least / GIB:.2f} GiB of a device even if "
        f"every layer is computed again, and {budget_bytes / GIB:.2f} GiB are left for them: raise "
        "training.accumulation, which takes fewer tokens at a time, training.memory_gib or the "
        "number of devices, or lower training.global_batch_size."
    )

"""The one map between our parameter paths and the reference's tensor names.

Linears are [out, in] there and [in, out] here; embedding and head are [V, D] in both. Every
format reads and writes through this file, and no other module knows a foreign tensor name.

Legend: D model, E query width, H head dim, F ffn, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.model.scaling import LayerShape, layer_shapes

Params = dict[str, Any]
ParamPath = tuple[str, ...]
Layout = Literal["corenet", "huggingface"]

# Apple's Hugging Face code builds this matrix when the head is not tied, and never calls it.
UNUSED = "transformer.classifier.weight"


@dataclass(frozen=True, kw_only=True)
class NamedWeight:
    """One parameter: where it stands in our tree, and what the reference calls it."""

    path: ParamPath
    name: str
    shape: tuple[int, ...]
    """Ours; the reference's is the reverse where `transpose` is set."""
    transpose: bool = False

    @property
    def reference_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transpose else self.shape


def named_weights(config: ModelConfig, layout: Layout = "huggingface") -> tuple[NamedWeight, ...]:
    """Return every parameter of the model, in the reference's order.

    `corenet` has the names of Apple's `.pt` files; `huggingface` puts `transformer.` before them
    and calls the head of an untied model `lm_head`, and so does MLX.
    """
    prefix, head = {
        "corenet": ("", "classifier.weight"),
        "huggingface": ("transformer.", "lm_head.weight"),
    }[layout]
    table = (config.vocab_size, config.model_dim)
    weights = [
        NamedWeight(path=("embedding",), name=f"{prefix}token_embeddings.weight", shape=table)
    ]
    for i, shape in enumerate(layer_shapes(config)):
        weights += _layer_weights(config, shape, f"layers_{i}", f"{prefix}layers.{i}")
    weights += _norm_weights(config, ("final_norm",), f"{prefix}norm", config.model_dim)
    if not config.tie_embeddings:
        weights.append(NamedWeight(path=("head",), name=head, shape=table))
    return tuple(weights)


def reference_shapes(
    config: ModelConfig, layout: Layout = "huggingface"
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each of the reference's tensors, in its order."""
    return {weight.name: weight.reference_shape for weight in named_weights(config, layout)}


def to_reference(
    config: ModelConfig,
    read: Callable[[ParamPath], np.ndarray],
    layout: Layout = "huggingface",
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the reference's name and array, in its shape, of each parameter that `read` returns."""
    for weight in named_weights(config, layout):
        array = read(weight.path)
        assert array.shape == weight.shape, f"{weight.path}: {array.shape}, not {weight.shape}"
        yield weight.name, array.T if weight.transpose else array


def from_reference(
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    where: str,
    layout: Layout = "huggingface",
) -> Callable[[ParamPath], np.ndarray]:
    """Return what reads a parameter by our path from tensors that `read` returns by their name.

    `shapes` has every tensor that is there. Raises UserError naming each that is missing,
    unexpected or of another shape; `where` begins the sentence.
    """
    weights = named_weights(config, layout)
    expected = reference_shapes(config, layout)
    missing = [name for name in expected if name not in shapes]
    ignored = [] if config.tie_embeddings or layout != "huggingface" else [UNUSED]
    unexpected = [name for name in shapes if name not in expected and name not in ignored]
    if missing or unexpected:
        faults = [
            f"{len(names)} {kind} ({_some(names)})"
            for kind, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise UserError(
            f"{where}: its tensors are not those of its configuration: {' and '.join(faults)}; "
            "take the complete files of one model."
        )
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise UserError(
                f"{where}: {name} is {list(shapes[name])}, but the configuration makes it "
                f"{list(shape)}; take weights and configuration of the same model."
            )
    by_path = {weight.path: weight for weight in weights}

    def read_ours(path: ParamPath) -> np.ndarray:
        weight = by_path[path]
        array = read(weight.name)
        return array.T if weight.transpose else array

    return read_ours


def at(params: Params, path: ParamPath) -> Any:
    """Return the parameter at `path` of a tree."""
    for key in path:
        params = params[key]
    return params


def put(params: Params, path: ParamPath, array: Any) -> None:
    """Set the parameter at `path` of a tree."""
    for key in path[:-1]:
        params = params.setdefault(key, {})
    params[path[-1]] = array


def _layer_weights(
    config: ModelConfig, shape: LayerShape, ours: str, theirs: str
) -> list[NamedWeight]:
    dim = config.model_dim
    ffn_in = (2 if config.ffn_with_glu else 1) * shape.ffn_dim
    qkv_dim = shape.query_dim + 2 * shape.kv_dim

    def linear(module: str, kernel: str, name: str, shape_io: tuple[int, int]) -> NamedWeight:
        return NamedWeight(
            path=(ours, module, kernel),
            name=f"{theirs}.{name}.weight",
            shape=shape_io,
            transpose=True,
        )

    weights = [linear("attention", "qkv", "attn.qkv_proj", (dim, qkv_dim))]
    if config.normalize_qk_projections:
        for norm, name in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            path = (ours, "attention", norm)
            weights += _norm_weights(config, path, f"{theirs}.attn.{name}", config.head_dim)
    return [
        *weights,
        linear("attention", "out", "attn.out_proj", (shape.query_dim, dim)),
        linear("ffn", "up", "ffn.proj_1", (dim, ffn_in)),
        linear("ffn", "down", "ffn.proj_2", (shape.ffn_dim, dim)),
        *_norm_weights(config, (ours, "ffn_norm"), f"{theirs}.ffn_norm", dim),
        *_norm_weights(config, (ours, "attention_norm"), f"{theirs}.attn_norm", dim),
    ]


def _norm_weights(
    config: ModelConfig, path: tuple[str, ...], name: str, width: int
) -> list[NamedWeight]:
    parts = [("scale", "weight"), ("bias", "bias")]
    return [
        NamedWeight(path=(*path, ours), name=f"{name}.{theirs}", shape=(width,))
        for ours, theirs in parts[: 2 if config.normalization == "layer_norm" else 1]
    ]


def _some(names: list[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest

"""Trained adapters: which matrices of a model have them, and the model with them merged.

Matrices go by the names of the modules that peft and MLX know them by, in `weights/names.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.model.adapters import Adapters, AdapterShape, adapter_at, merged
from openelm_jax.weights.names import NamedWeight, ParamPath, Params, at, named_weights
from openelm_jax.weights.stored import StoredWeights

Value = TypeVar("Value")

ALL_LINEAR = "all-linear"
EMBEDDING = ("embedding",)


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredAdapters:
    """Adapters with their arrays, float32 by our paths."""

    adapters: Adapters
    tree: Params
    source: str
    """Where they are, for messages."""
    replaced: Mapping[ParamPath, np.ndarray] = field(default_factory=dict)
    """Parameters that were trained whole and stand in the place of the model's."""


def adaptable(config: ModelConfig) -> dict[str, NamedWeight]:
    """Return the matrices that may have an adapter, by their modules' names: all but the head."""
    return {
        weight.name.removesuffix(".weight"): weight
        for weight in named_weights(config)
        if len(weight.shape) == 2 and weight.path != ("head",)
    }


def choose_adapters(
    config: ModelConfig,
    targets: str | Sequence[str],
    shape: AdapterShape,
    *,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
    layers: Sequence[int] | None = None,
) -> Adapters:
    """Return which matrices have an adapter, and of which shape.

    `targets` are names or their last parts (`qkv_proj`, `attn.qkv_proj`), a regular expression of
    whole names, or `all-linear`, which is all but the embedding; `layers` keeps those of some
    layers. `ranks` and `alphas` are other values by a pattern of the end of a name. Raises
    UserError for a target, layer or pattern that fits nothing, and for DoRA of the embedding.
    """
    modules = adaptable(config)
    for layer in layers or ():
        if not 0 <= layer < config.num_layers:
            raise UserError(
                f"there is no layer {layer} to adapt: 0 to {config.num_layers - 1} are."
            )
    for target in [targets] if isinstance(targets, str) else [[name] for name in targets]:
        if not any(matches(module, target) for module in modules):
            name = target if isinstance(target, str) else target[0]
            raise UserError(f"no matrix fits the target {name}: {names_in_words(config)}.")
    chosen = [module for module in modules if matches(module, targets, layers)]
    if not chosen:
        raise UserError("no matrix has an adapter: name targets that these layers have.")
    for pattern in [*(ranks or ()), *(alphas or ())]:
        if not any(_fits_end(pattern, module) for module in chosen):
            raise UserError(f"no adapted matrix fits the pattern {pattern} of a rank or alpha.")
    return shaped(config, chosen, shape, ranks or {}, alphas or {})


def shaped(
    config: ModelConfig,
    chosen: Sequence[str],
    shape: AdapterShape,
    ranks: Mapping[str, int],
    alphas: Mapping[str, float],
) -> Adapters:
    """Return adapters of the modules `chosen`; raises UserError for DoRA of the embedding."""
    modules = adaptable(config)
    if shape.dora and any(modules[module].path == EMBEDDING for module in chosen):
        raise UserError(
            "DoRA is for linear layers, and programs disagree on what it would be for an embedding "
            "(the length of a row, or of a column): leave token_embeddings out of the targets."
        )
    return tuple(
        (
            "/".join(modules[module].path),
            dataclasses.replace(
                shape,
                rank=value_of(ranks, module, shape.rank),
                alpha=value_of(alphas, module, shape.alpha),
            ),
        )
        for module in chosen
    )


def matches(
    module: str,
    targets: str | Sequence[str],
    layers: Sequence[int] | None = None,
) -> bool:
    """Return whether targets, as for `choose_adapters`, name a module of one of the layers."""
    number = re.search(r"\.layers\.(\d+)\.", module)
    if layers is not None and (number is None or int(number[1]) not in layers):
        return False
    if targets == ALL_LINEAR:
        return number is not None
    if isinstance(targets, str) and _match(targets, module):
        return True
    names = [targets] if isinstance(targets, str) else targets
    return any(module == name or module.endswith(f".{name}") for name in names)


def value_of(patterns: Mapping[str, Value], module: str, default: Value) -> Value:
    """Return the value of the first pattern that fits the end of a name, as peft does."""
    fitting = (value for pattern, value in patterns.items() if _fits_end(pattern, module))
    return next(fitting, default)


def _fits_end(pattern: str, module: str) -> bool:
    return _match(rf"(.*\.)?({pattern})", module)


def _match(pattern: str, module: str) -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error as fault:
        raise UserError(f"{pattern} is no regular expression ({fault}); correct it.") from None


def names_in_words(config: ModelConfig) -> str:
    """Return what may be a target, as part of a sentence."""
    of_a_layer = [
        module.rpartition(".layers.0.")[2] for module in adaptable(config) if ".layers.0." in module
    ]
    return (
        f"there are token_embeddings, and {', '.join(of_a_layer)} of each layer "
        f"(transformer.layers.0.{of_a_layer[0]}), or {ALL_LINEAR} for all of the layers"
    )


def merge_adapters(stored: StoredWeights, given: StoredAdapters) -> StoredWeights:
    """Return the model whose weights make what the model's and its adapters make.

    A merged matrix is float32, whatever the model is stored in: it is cast where it is used or
    written. Adapters of a tied embedding are for the lookup alone, so the head becomes a matrix of
    its own: the embedding as it was.
    """
    shapes = dict(given.adapters)
    untied = stored.config.tie_embeddings and changes_embedding(given)

    def read(path: ParamPath) -> np.ndarray:
        if untied and path == ("head",):
            return stored.read(EMBEDDING)
        weight = given.replaced[path] if path in given.replaced else stored.read(path)
        shape = shapes.get("/".join(path))
        return weight if shape is None else merged(weight, shape, at(given.tree, path))

    config = dataclasses.replace(stored.config, tie_embeddings=False) if untied else stored.config
    source = f"{stored.source} with the adapters of {given.source}"
    return dataclasses.replace(
        stored, config=config, read=read, source=source, file=None, saved=None, record=None
    )


def changes_embedding(given: StoredAdapters) -> bool:
    """Return whether tokens are looked up elsewhere than in the model's embedding."""
    return EMBEDDING in given.replaced or adapter_at(given.adapters, "embedding") is not None

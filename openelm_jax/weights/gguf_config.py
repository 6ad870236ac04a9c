"""The model that the metadata of a GGUF file describes, and which models llama.cpp can run."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.model.scaling import expand_multipliers, layer_shapes, make_divisible
from openelm_jax.weights.huggingface_config import config_from_fields, fields_of_config

ARCHITECTURE = "openelm"
CONFIG_KEY = "openelm_jax.config"
"""Ours: what the per-layer widths were made of. Other readers pass over it."""
RMS_NORM_EPS = 1e-6
MAX_LAYERS = 512
USUAL_DIVISOR = 256
ROUND = (1, 5, 10, 25, 50, 100)
"""Hundredths in multiples of these are round, the more so the larger."""


def what_llama_cpp_lacks(config: ModelConfig) -> list[str]:
    """Return each thing of the model that llama.cpp's openelm does not have."""
    faults = {
        "no norm on queries and keys (normalize_qk_projections)": (
            not config.normalize_qk_projections
        ),
        "a head of its own (tie_embeddings)": not config.tie_embeddings,
        f"the activation {config.activation}": config.activation != "swish",
        "a feed-forward without a gate (ffn_with_glu)": not config.ffn_with_glu,
        f"{config.normalization} as its norm": config.normalization != "rms_norm",
        f"more than {MAX_LAYERS} layers": config.num_layers > MAX_LAYERS,
    }
    return [fault for fault, holds in faults.items() if holds]


def config_as_text(config: ModelConfig) -> str:
    """Return what `CONFIG_KEY` holds: config.json's fields."""
    return json.dumps(fields_of_config(config, "float32"), sort_keys=True)


def config_of(metadata: Mapping[str, Any], vocab_size: int, where: str) -> ModelConfig:
    """Return the model of a file with `vocab_size` rows of embedding; `where` is for errors.

    Without our own key the multipliers are the roundest pair that gives every layer its widths,
    or else one a layer. Raises UserError for a model that this is not.
    """
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise UserError(f"{where}: its architecture is {architecture}; known is {ARCHITECTURE}.")
    if CONFIG_KEY in metadata:
        try:
            fields = dict(json.loads(metadata[CONFIG_KEY]))
        except (TypeError, ValueError):
            raise UserError(f"{where}: {CONFIG_KEY} holds no JSON; export it again.") from None
        return config_from_fields(fields, where)
    return _derived_config(metadata, vocab_size, where)


def _derived_config(metadata: Mapping[str, Any], vocab_size: int, where: str) -> ModelConfig:
    def value(name: str, default: Any = None) -> Any:
        return metadata.get(f"{ARCHITECTURE}.{name}", default)

    def refuse(name: str, needed: str) -> UserError:
        return UserError(f"{where}: {ARCHITECTURE}.{name} is {value(name)}; it must be {needed}.")

    def count(name: str) -> int:
        if not _is_count(given := value(name)):
            raise refuse(name, "a whole number above 0")
        return given

    def per_layer(name: str) -> list[int]:
        given = value(name)
        each = given if isinstance(given, list) else [given] * num_layers
        if len(each) != num_layers or not all(map(_is_count, each)):
            raise refuse(name, f"a whole number above 0 for each of {num_layers} layers")
        return each

    num_layers, model_dim = count("block_count"), count("embedding_length")
    if num_layers > MAX_LAYERS:
        raise refuse("block_count", f"at most {MAX_LAYERS}")
    head_dim = count("attention.key_length")
    for name, only in {
        "attention.layer_norm_rms_epsilon": RMS_NORM_EPS,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.scaling.factor": 1.0,
    }.items():
        if not _is_near(value(name, only), only):
            raise refuse(name, f"{only:g} for this model")
    heads, kv_heads = per_layer("attention.head_count"), per_layer("attention.head_count_kv")
    groups = {query / kv for query, kv in zip(heads, kv_heads, strict=True)}
    if len(groups) > 1 or not (num_gqa_groups := groups.pop()).is_integer():
        raise UserError(
            f"{where}: its layers have {heads} query and {kv_heads} key heads; known is one whole "
            "ratio of the two in every layer."
        )
    ffn_dims = per_layer("feed_forward_length")
    divisor = math.gcd(*ffn_dims)
    divisor = USUAL_DIVISOR if divisor % USUAL_DIVISOR == 0 else divisor
    query_dims = [head_dim * number for number in heads]
    query_divisor = head_dim * int(num_gqa_groups)
    try:
        config = ModelConfig(
            num_layers=num_layers,
            model_dim=model_dim,
            head_dim=head_dim,
            vocab_size=vocab_size,
            num_gqa_groups=int(num_gqa_groups),
            qkv_multipliers=_multipliers(query_dims, model_dim, query_divisor),
            ffn_multipliers=_multipliers(ffn_dims, model_dim, divisor),
            ffn_dim_divisor=divisor,
            rope_base=value("rope.freq_base", 10000.0),
            context_length=count("context_length"),
        )
    except UserError as mistake:
        if str(mistake).startswith(where):
            raise
        raise UserError(f"{where}: {mistake}") from None
    made = [(shape.query_dim, shape.ffn_dim) for shape in layer_shapes(config)]
    if made != list(zip(query_dims, ffn_dims, strict=True)):
        raise UserError(
            f"{where}: no multipliers of two decimals make its layers {query_dims} and {ffn_dims} "
            "wide; give the model in another format."
        )
    return config


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_near(value: Any, only: float) -> bool:
    return isinstance(value, int | float) and math.isclose(value, only, rel_tol=1e-6)


def _multipliers(widths: list[int], model_dim: int, divisor: int) -> float | tuple[float, ...]:
    """Return multipliers that make these widths: one number, the roundest pair, or one a layer."""

    def candidates(width: int) -> list[float]:
        """Return what makes a width, in hundredths; round ones first, like 0.5, 1.0 and 4.0."""
        nearest, reach = round(100 * width / model_dim), 100 * divisor // model_dim + 1
        made = [
            n
            for n in range(max(1, nearest - reach), nearest + reach + 1)
            if make_divisible(model_dim * (n / 100), divisor) == width
        ]
        made.sort(key=lambda n: (-max(s for s in ROUND if n % s == 0), abs(n - nearest)))
        return [n / 100 for n in made[:20]]

    def makes_them(multipliers: float | tuple[float, ...]) -> bool:
        each = expand_multipliers(multipliers, len(widths))
        return [make_divisible(model_dim * one, divisor) for one in each] == widths

    first, last = candidates(widths[0]), candidates(widths[-1])
    places = itertools.product(range(len(first)), range(len(last)))
    pairs = [(first[i], last[j]) for i, j in sorted(places, key=sum)]
    short: list[float | tuple[float, ...]] = [*first, *pairs]
    shortest = next(filter(makes_them, short), None)
    return shortest or tuple(width / model_dim for width in widths)

"""Layer shapes, parameter counts and FLOPs equal the reference's, line by line.

`data/variants.json` was computed with Apple's own code, CoreNet at commit 1aa3acd
(`general_gpt.py`, `math_utils.py`); its totals are those of the published weights.
"""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from openelm_jax import plan
from openelm_jax.config import ModelConfig
from openelm_jax.experiment_file import load_experiment
from openelm_jax.model.decoder import Decoder, init_params
from openelm_jax.model.scaling import (
    differing_widths,
    expand_multipliers,
    flops_per_token,
    layer_shapes,
    make_divisible,
    parameter_count,
)

REFERENCE = json.loads((Path(__file__).parent / "data" / "variants.json").read_text())
SIZES = ("270m", "450m", "1_1b", "3b")


def reference_layers(size: str) -> list[dict[str, Any]]:
    columns = REFERENCE["columns"]
    return [dict(zip(columns, row, strict=True)) for row in REFERENCE["variants"][size]["layers"]]


@pytest.mark.parametrize("size", SIZES)
def test_every_layer_has_the_reference_shape(size: str) -> None:
    shapes = layer_shapes(load_experiment(size).model)
    expected = reference_layers(size)
    assert len(shapes) == len(expected)
    for shape, line in zip(shapes, expected, strict=True):
        for name in (
            "qkv_multiplier",
            "ffn_multiplier",
            "num_query_heads",
            "num_kv_heads",
            "ffn_dim",
        ):
            assert getattr(shape, name) == line[name]


@pytest.mark.parametrize("size", SIZES)
def test_totals_equal_the_published_models_at_both_vocabularies(size: str) -> None:
    config, variant = load_experiment(size).model, REFERENCE["variants"][size]
    assert parameter_count(config, 32000) == variant["parameters_at_32000"]
    assert parameter_count(config, 32128) == variant["parameters_at_32128"]


def test_the_published_totals_are_the_ones_on_the_model_cards() -> None:
    totals = {size: REFERENCE["variants"][size]["parameters_at_32000"] for size in SIZES}
    assert totals == {
        "270m": 271_527_168,
        "450m": 457_179_136,
        "1_1b": 1_079_891_456,
        "3b": 3_036_647_424,
    }


@pytest.mark.parametrize("size", SIZES)
def test_plan_as_json_is_the_reference_table(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(["--exp", size, "--json"])
    printed = json.loads(capsys.readouterr().out)
    variant = REFERENCE["variants"][size]
    layers = [{"layer": i, **line} for i, line in enumerate(reference_layers(size))]
    assert printed["layers"] == layers
    assert printed["parameters"] == variant["parameters_at_32128"]
    assert printed["parameters_at_32000"] == variant["parameters_at_32000"]
    assert printed["kv_cache_elements_per_token"] == variant["kv_cache_elements_per_token"]
    assert printed["tokens_per_step"] == 2048 * 2048
    assert printed["total_tokens"] == 350_000 * 2048 * 2048


@pytest.mark.parametrize("size", SIZES)
def test_plan_prints_the_reference_table(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(["--exp", size])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    variant = REFERENCE["variants"][size]
    expected = [
        " ".join([str(i), *map(str, list(line.values())[:-1]), f"{line['parameters']:,}"])
        for i, line in enumerate(reference_layers(size))
    ]
    assert lines[1 : len(expected) + 1] == expected
    assert f"parameters (vocabulary 32128) {variant['parameters_at_32128']:,}" in lines
    assert f"parameters (vocabulary 32000) {variant['parameters_at_32000']:,}" in lines
    assert f"KV cache elements a token {variant['kv_cache_elements_per_token']:,}" in lines
    assert "tokens in 350,000 steps 1,468,006,400,000" in lines


def test_plan_counts_a_training_step_as_three_forward_passes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan.main(["--exp", "tiny", "--json", "--training.steps", "10"])
    printed = json.loads(capsys.readouterr().out)
    # By hand. Width 128; layers of 2, 4, 4 query heads and 1, 2, 2 key/value heads of 32; FFN
    # widths 64, 288, 512: matrices q + k + v, out and three of the FFN; 4,096 rows.
    layers = (
        128 * (64 + 64) + 64 * 128 + 3 * 128 * 64
        + 128 * (128 + 128) + 128 * 128 + 3 * 128 * 288
        + 128 * (128 + 128) + 128 * 128 + 3 * 128 * 512
    )  # fmt: skip
    assert layers == 454_656
    # Two products over the (1 + 128) / 2 keys that a token sees, in query widths 64, 128, 128.
    attention = 2 * 2 * (64 + 128 + 128) * 129 // 2
    assert 2 * (layers + 4096 * 128) + attention == 2_040_448
    assert printed["forward_flops_per_token"] == 2_040_448
    assert printed["training_flops_per_token"] == 6_121_344
    assert printed["total_training_flops"] == 62_682_562_560  # 10 steps of 8 rows of 128
    assert printed["parameters_at_32000"] is None


def test_without_the_rounding_to_two_decimals_seven_layers_would_differ() -> None:
    differing = 0
    for size in SIZES:
        config = load_experiment(size).model
        for i, shape in enumerate(layer_shapes(config)):
            share = Fraction(i, config.num_layers - 1)
            alpha = float(Fraction(1, 2) + share / 2)
            beta = float(Fraction(1, 2) + share * Fraction(7, 2))
            query_dim = make_divisible(config.model_dim * alpha, config.head_dim * 4)
            ffn_dim = make_divisible(config.model_dim * beta, 256)
            differing += (query_dim, ffn_dim) != (shape.query_dim, shape.ffn_dim)
    assert differing == 7


@pytest.mark.parametrize(
    ("value", "divisor", "expected"),
    [
        (16, 8, 16),
        (1, 8, 8),  # never less than the divisor
        (20, 8, 24),  # halves go up
        (36, 8, 40),
        (35.5, 8, 32),  # down by a tenth of the value at most ...
        (19, 8, 24),  # ... and up when 16 would be less than 0.9 * 19
        (11, 8, 16),
    ],
)
def test_widths_go_to_the_nearest_multiple(value: float, divisor: int, expected: int) -> None:
    assert make_divisible(value, divisor) == expected


def test_multipliers_are_one_number_a_pair_or_one_a_layer() -> None:
    assert expand_multipliers(0.7, 3) == (0.7, 0.7, 0.7)
    assert expand_multipliers((0.5, 1.0), 4) == (0.5, 0.67, 0.83, 1.0)
    assert expand_multipliers((0.5, 0.123, 1.0), 3) == (0.5, 0.123, 1.0)  # a list is not rounded
    assert expand_multipliers((0.5, 1.0), 1) == (0.5,)


def test_a_pair_for_two_layers_is_the_list_of_both() -> None:
    pair = ModelConfig(num_layers=2, model_dim=256, head_dim=32, qkv_multipliers=(0.5, 1.0))
    assert [shape.num_query_heads for shape in layer_shapes(pair)] == [4, 8]
    assert [shape.ffn_dim for shape in layer_shapes(pair)] == [256, 1024]


def small(**changes: Any) -> ModelConfig:
    return ModelConfig(**{"num_layers": 3, "model_dim": 256, "head_dim": 32, **changes})


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"qkv_multipliers": (0.5, 1.0)}, {"qkv_multipliers": (0.5, 0.75, 1.0)}),
        ({"ffn_multipliers": (0.5, 4.0)}, {"ffn_multipliers": (0.5, 2.25, 4.0)}),
        ({"qkv_multipliers": 0.7}, {"qkv_multipliers": (0.7, 0.7)}),
        ({"qkv_multipliers": 0.7}, {"qkv_multipliers": (0.7, 0.7, 0.7)}),
        ({"num_layers": 1, "ffn_multipliers": 2.0}, {"num_layers": 1, "ffn_multipliers": (2.0,)}),
        ({"qkv_multipliers": (0.5, 1.0)}, {"qkv_multipliers": (0.51, 0.99)}),
        ({"ffn_multipliers": 2.0}, {"ffn_multipliers": 2.0, "ffn_dim_divisor": 128}),
        ({"vocab_size": 32128}, {"vocab_size": 32000, "context_length": 64}),
    ],
)
def test_a_model_is_the_same_however_its_widths_are_spelled(
    a: dict[str, Any], b: dict[str, Any]
) -> None:
    assert differing_widths(small(**a), small(**b)) == []


def test_what_makes_another_model_is_named() -> None:
    assert differing_widths(small(), small(rope_base=5e5)) == ["model.rope_base: 10000.0, 500000.0"]
    assert differing_widths(small(), small(num_layers=4)) == ["model.num_layers: 3, 4"]
    # Eight heads by 0.5, 0.75 and 1, to the nearest multiple of the group, halves up.
    assert differing_widths(small(), small(num_gqa_groups=2)) == [
        "num_query_heads by layer: [4, 8, 8], [4, 6, 8]",
        "num_kv_heads by layer: [1, 2, 2], [2, 3, 4]",
    ]
    # 256 by 0.5, 2.25 and 4, to the nearest 256; 512 is less than 0.9 of 576.
    assert differing_widths(small(), small(ffn_multipliers=(0.5, 1.0))) == [
        "ffn_dim by layer: [256, 768, 1024], [256, 256, 256]"
    ]
    assert len(differing_widths(small(), small(activation="gelu", tie_embeddings=False))) == 2


VARIED = {
    "published": ModelConfig(num_layers=4, model_dim=256, head_dim=32, vocab_size=512),
    "layer_norm": ModelConfig(
        num_layers=3, model_dim=256, head_dim=64, normalization="layer_norm", num_gqa_groups=2
    ),
    "untied": ModelConfig(num_layers=2, model_dim=128, head_dim=32, tie_embeddings=False),
    "plain": ModelConfig(
        num_layers=2, model_dim=128, head_dim=16, ffn_with_glu=False, normalize_qk_projections=False
    ),
}


@pytest.mark.parametrize("config", VARIED.values(), ids=VARIED)
def test_the_parameter_count_is_that_of_the_initialised_tree(config: ModelConfig) -> None:
    tree = jax.eval_shape(lambda: init_params(config, seed=0))
    assert parameter_count(config) == sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("size", SIZES)
def test_the_published_models_initialise_as_many_parameters(size: str) -> None:
    tree = jax.eval_shape(lambda: init_params(load_experiment(size).model, seed=0))
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
    assert total == REFERENCE["variants"][size]["parameters_at_32128"]


def matrix_product_flops(jaxpr: Any) -> int:
    """Add up the multiply-adds of every dot_general in a jaxpr, and of the jaxprs inside it."""
    flops = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            inner = math.prod(equation.invars[0].aval.shape[i] for i in contracted)
            flops += 2 * inner * math.prod(equation.outvars[0].aval.shape)
        for value in equation.params.values():
            closed = getattr(value, "jaxpr", None)
            if closed is not None:
                flops += matrix_product_flops(closed)
    return flops


@pytest.mark.parametrize("config", VARIED.values(), ids=VARIED)
def test_flops_are_those_of_the_traced_forward_pass(config: ModelConfig) -> None:
    length = 48
    tokens_BT = jnp.zeros((1, length), jnp.int32)
    params = jax.eval_shape(lambda: init_params(config, seed=0))
    traced = jax.make_jaxpr(lambda p: Decoder(config).apply({"params": p}, tokens_BT))(params)
    # The trace multiplies all T x T pairs of the causal mask, of which T (T + 1) / 2 are needed.
    masked_pairs = length * length - length * (length + 1) // 2
    masked = sum(4 * shape.query_dim * masked_pairs for shape in layer_shapes(config))
    assert matrix_product_flops(traced.jaxpr) - masked == length * flops_per_token(config, length)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (load_experiment("270m").model, 512),
        (ModelConfig(num_layers=3, model_dim=1024, head_dim=64, tie_embeddings=False), 256),
    ],
    ids=["270m", "untied"],
)
def test_flops_are_those_that_xla_counts_in_the_forward_pass(
    config: ModelConfig, length: int
) -> None:
    tokens_BT = jax.ShapeDtypeStruct((1, length), jnp.int32)
    params = jax.eval_shape(lambda: init_params(config, seed=0))
    forward = jax.jit(lambda p, x: Decoder(config).apply({"params": p}, x))
    counted = forward.lower(params, tokens_BT).cost_analysis()["flops"]
    # XLA counts all T keys of every query, where causal attention needs (T + 1) / 2 on average.
    masked_pairs = length * length - length * (length + 1) // 2
    masked = sum(4 * shape.query_dim * masked_pairs for shape in layer_shapes(config))
    products = length * flops_per_token(config, length) + masked
    # What is left are norms, softmax, rotations and activations: some, and below half a percent.
    assert products < counted < 1.005 * products

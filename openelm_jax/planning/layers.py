"""What an experiment's shapes and costs are, from the shapes alone: no jax, no hardware."""

from __future__ import annotations

from dataclasses import dataclass

from openelm_jax.config import Experiment, ModelConfig
from openelm_jax.model.scaling import (
    LayerShape,
    flops_per_token,
    layer_parameter_count,
    layer_shapes,
    parameter_count,
)

PADDED_VOCABULARY, TOKENIZER_PIECES = 32128, 32000
"""Rows that the paper's models train, and those that their published weights keep."""


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """One layer; matrices are [out, in], as the published weights store them."""

    layer: int
    qkv_multiplier: float
    ffn_multiplier: float
    num_query_heads: int
    num_kv_heads: int
    ffn_dim: int
    qkv_proj: tuple[int, int]
    out_proj: tuple[int, int]
    proj_1: tuple[int, int]
    proj_2: tuple[int, int]
    parameters: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An experiment's layers and totals; FLOPs are of matrix products, a multiply-add being two."""

    experiment: str
    vocab_size: int
    layers: tuple[LayerPlan, ...]
    parameters: int
    parameters_at_32000: int | None
    kv_cache_elements_per_token: int
    forward_flops_per_token: int
    training_flops_per_token: int
    tokens_per_step: int
    steps: int
    total_tokens: int
    total_training_flops: int


def plan_experiment(experiment: Experiment) -> Plan:
    """Return the plan of an experiment; training FLOPs count no recomputation."""
    model, training = experiment.model, experiment.training
    shapes = layer_shapes(model)
    forward = flops_per_token(model)
    tokens_per_step = training.global_batch_size * model.context_length
    total_tokens = tokens_per_step * training.steps
    padded = model.vocab_size == PADDED_VOCABULARY
    return Plan(
        experiment=experiment.name,
        vocab_size=model.vocab_size,
        layers=tuple(_plan_layer(model, i, shape) for i, shape in enumerate(shapes)),
        parameters=parameter_count(model),
        parameters_at_32000=parameter_count(model, TOKENIZER_PIECES) if padded else None,
        kv_cache_elements_per_token=sum(2 * shape.kv_dim for shape in shapes),
        forward_flops_per_token=forward,
        training_flops_per_token=3 * forward,
        tokens_per_step=tokens_per_step,
        steps=training.steps,
        total_tokens=total_tokens,
        total_training_flops=3 * forward * total_tokens,
    )


def format_plan(plan: Plan) -> str:
    """Return the plan as text: a line a layer, then the totals."""
    heading = (
        "layer", "qkv mult", "ffn mult", "q heads", "kv heads", "FFN dim",
        "qkv_proj [out,in]", "out_proj [out,in]", "proj_1 [out,in]", "proj_2 [out,in]",
        "parameters",
    )  # fmt: skip
    rows = [heading, *(_cells(layer) for layer in plan.layers)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heading))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    totals = [(f"parameters (vocabulary {plan.vocab_size})", f"{plan.parameters:,}")]
    if plan.parameters_at_32000 is not None:
        totals.append(
            (f"parameters (vocabulary {TOKENIZER_PIECES})", f"{plan.parameters_at_32000:,}")
        )
    totals += [
        ("KV cache elements a token", f"{plan.kv_cache_elements_per_token:,}"),
        ("forward FLOPs a token", f"{plan.forward_flops_per_token:,}"),
        ("training FLOPs a token", f"{plan.training_flops_per_token:,}"),
        ("tokens a step", f"{plan.tokens_per_step:,}"),
        (f"tokens in {plan.steps:,} steps", f"{plan.total_tokens:,}"),
        ("training FLOPs in all", f"{plan.total_training_flops:.3e}"),
    ]
    left = max(len(name) for name, _ in totals)
    right = max(len(figure) for _, figure in totals)
    return "\n".join([*lines, "", *(f"{name:<{left}}  {value:>{right}}" for name, value in totals)])


def _plan_layer(model: ModelConfig, layer: int, shape: LayerShape) -> LayerPlan:
    return LayerPlan(
        layer=layer,
        qkv_multiplier=shape.qkv_multiplier,
        ffn_multiplier=shape.ffn_multiplier,
        num_query_heads=shape.num_query_heads,
        num_kv_heads=shape.num_kv_heads,
        ffn_dim=shape.ffn_dim,
        qkv_proj=(shape.query_dim + 2 * shape.kv_dim, shape.model_dim),
        out_proj=(shape.model_dim, shape.query_dim),
        proj_1=((2 if model.ffn_with_glu else 1) * shape.ffn_dim, shape.model_dim),
        proj_2=(shape.model_dim, shape.ffn_dim),
        parameters=layer_parameter_count(model, shape),
    )


def _cells(layer: LayerPlan) -> tuple[str, ...]:
    matrices = (layer.qkv_proj, layer.out_proj, layer.proj_1, layer.proj_2)
    return (
        str(layer.layer),
        str(layer.qkv_multiplier),
        str(layer.ffn_multiplier),
        str(layer.num_query_heads),
        str(layer.num_kv_heads),
        str(layer.ffn_dim),
        *(f"[{rows}, {columns}]" for rows, columns in matrices),
        f"{layer.parameters:,}",
    )

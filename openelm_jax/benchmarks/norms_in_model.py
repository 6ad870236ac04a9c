"""What its norms cost a model: the same decoder with RMSNorm, with LayerNorm, and without norms.

All three hold the same matrices and take turns in one process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from openelm_jax.benchmarks.generation import (
    CURE,
    NO_PREALLOCATION,
    PROMPT_TOKENS,
    Protocol,
    prompts_of,
)
from openelm_jax.benchmarks.generation_models import model_of
from openelm_jax.benchmarks.generation_report import Spread, rates_of, spread_of, title_of
from openelm_jax.benchmarks.generation_sides import (
    Stream,
    Turn,
    our_stream,
    time_stream,
    warm_up,
)
from openelm_jax.benchmarks.norms import BENCHMARK, norm_shapes
from openelm_jax.benchmarks.processes import process, questions
from openelm_jax.benchmarks.report import Figure, format_parts, format_table, median_figure, short
from openelm_jax.config import DType, ModelConfig

LEAST_RATIO = 0.97
"""Of generation with RMSNorm to that with LayerNorm and without norms, on accelerators."""
NORMALIZATIONS = {"rms_norm": "RMSNorm", "layer_norm": "LayerNorm", "none": "no norms"}


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """How fast a model generates with a normalization: a row of Table 8."""

    model: str
    title: str
    normalization: str
    dtype: str
    invocations: int
    prompt: Spread
    generation: Spread
    total: Spread


def measure_in_model(
    size: str,
    dtypes: tuple[DType, ...],
    protocol: Protocol,
    say: Callable[[str], None],
) -> tuple[list[ModelRow], list[Figure]]:
    """Return how fast a size generates with each normalization, and the ratios of RMSNorm's."""
    config, new_tokens = model_of(size), protocol.new_tokens
    prompts_BT = prompts_of(protocol, config.vocab_size)[1]
    length = protocol.prompt_tokens + new_tokens
    config = dataclasses.replace(
        config, normalization="rms_norm", context_length=max(config.context_length, length)
    )
    rows: list[ModelRow] = []
    figures: list[Figure] = []
    for dtype in dtypes:
        say(f"{title_of(size)}: {dtype}, with each normalization")
        with process(
            *(serve_normalizations, config, dtype, prompts_BT, new_tokens),
            benchmark=BENCHMARK,
            cure=CURE,
            environment=NO_PREALLOCATION,
        ) as ask:
            found: list[tuple[dict[str, Turn], str]] = [
                ask(number) for number in range(protocol.rounds)
            ]
        rates = {
            name: rates_of([turns[name] for turns, _ in found], 1, PROMPT_TOKENS, new_tokens)
            for name in NORMALIZATIONS
        }
        for name in NORMALIZATIONS:
            prompt, generation, total = map(spread_of, rates[name].values())
            rows.append(
                ModelRow(
                    model=size,
                    title=title_of(size),
                    normalization=name,
                    dtype=dtype,
                    invocations=0 if name == "none" else len(norm_shapes(size, 1)),
                    prompt=prompt,
                    generation=generation,
                    total=total,
                )
            )
        on_a_cpu = found[0][1] == "cpu"
        figures += norm_ratios(size, dtype, rates, None if on_a_cpu else LEAST_RATIO)
    return rows, figures


def norm_ratios(
    size: str, dtype: str, rates: dict[str, dict[str, list[float]]], least: float | None
) -> Iterator[Figure]:
    """Yield how fast generation with RMSNorm is to that with LayerNorm, and with no norms."""
    for other in ("layer_norm", "none"):
        pairs = zip(rates["rms_norm"]["generation"], rates[other]["generation"], strict=True)
        yield median_figure(
            title_of(size),
            f"generation_{size}_{dtype}_rms_norm_to_{other}",
            [rate / other_rate for rate, other_rate in pairs],
            "x",
            f"generation in {dtype}: RMSNorm to {NORMALIZATIONS[other]}",
            least=least,
        )


def serve_normalizations(
    connection: Connection,
    config: ModelConfig,
    dtype: DType,
    prompts_BT: np.ndarray,
    new_tokens: int,
) -> None:
    """Answer the number of a round with a Turn by normalization, and the platform."""
    import jax

    from openelm_jax.generation.forward import decoding_params
    from openelm_jax.model.decoder import init_params

    params = decoding_params(init_params(config, 0), dtype)
    streams = normalized_streams(config, params, dtype, prompts_BT, new_tokens)
    for number in questions(connection):
        turns = round_of(streams, number, prompts_BT, new_tokens)
        connection.send((turns, jax.devices()[0].platform))


def round_of(
    streams: dict[str, Stream], number: int, prompts_BT: np.ndarray, new_tokens: int
) -> dict[str, Turn]:
    """Return a turn of each, in turning order."""
    turns: dict[str, Turn] = {}
    for name in list(streams)[:: -1 if number % 2 else 1]:
        warm_up(streams[name], prompts_BT, new_tokens)
        turns[name] = time_stream(streams[name], prompts_BT, new_tokens)
    return turns


def normalized_streams(
    config: ModelConfig, params: Any, dtype: DType, prompts_BT: np.ndarray, new_tokens: int
) -> dict[str, Stream]:
    """Return how the model generates with each normalization, compiled.

    `params` are those of a model with RMSNorm, as the engine takes them.
    """
    layer_norm = dataclasses.replace(config, normalization="layer_norm")
    # jax keeps compiled code by the config, so that of no norms needs one of its own.
    nothing = dataclasses.replace(config, context_length=config.context_length + 1)
    streams = {
        "rms_norm": our_stream(config, params, dtype),
        "layer_norm": our_stream(layer_norm, with_biases(params), dtype),
        "none": our_stream(nothing, params, dtype),
    }
    for name, stream in streams.items():
        if name == "none":
            with without_norms():
                warm_up(stream, prompts_BT, new_tokens)
        else:
            warm_up(stream, prompts_BT, new_tokens)
    return streams


@contextmanager
def without_norms() -> Iterator[None]:
    """Let decoders that are traced meanwhile leave their norms out."""
    import flax.linen as nn

    from openelm_jax.model import decoder

    class NoNorm(nn.Module):
        kind: str

        def __call__(self, x: Any) -> Any:
            return x

    norm = decoder.Norm
    decoder.Norm = NoNorm  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        decoder.Norm = norm  # type: ignore[misc]


def with_biases(params: Any) -> Any:
    """Return parameters with a bias of zeros beside each scale of a norm."""
    import jax.numpy as jnp

    if not isinstance(params, dict):
        return params
    made = {name: with_biases(part) for name, part in params.items()}
    return made | {"bias": jnp.zeros_like(params["scale"])} if "scale" in params else made


def format_in_model(rows: list[ModelRow], figures: list[Figure]) -> list[str]:
    """Return the lines that people read."""
    heading = ["model", "normalization", "type", "norms", "prompt", "generation", "", "total"]
    cells = [
        [
            *(row.title, NORMALIZATIONS[row.normalization], row.dtype, str(row.invocations)),
            *(short(row.prompt.median), short(row.generation.median)),
            f"({short(row.generation.low)} to {short(row.generation.high)})",
            short(row.total.median),
        ]
        for row in rows
    ]
    return [
        "Whole models in jax, tokens a second, medians of turns (smallest to largest).",
        "",
        *format_table(heading, cells, left=3),
        *format_parts(figures),
        "",
    ]

"""What `benchmark accelerator` does on the device itself for generation: decoding, and norms.

Legend: B batch, T time.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax

from openelm_jax.benchmarks.bandwidth import READ_BYTES, reader
from openelm_jax.benchmarks.generation import Protocol, prompts_of
from openelm_jax.benchmarks.generation_models import model_of
from openelm_jax.benchmarks.generation_report import (
    Key,
    Result,
    bound_of,
    make_row,
    rates_of,
    title_of,
)
from openelm_jax.benchmarks.generation_sides import (
    Turn,
    our_facts,
    our_stream,
    time_stream,
    warm_up,
)
from openelm_jax.benchmarks.norms import KINDS, MODELS, TOKENS, jax_pass, norm_shapes, seconds_of
from openelm_jax.benchmarks.norms_in_model import NORMALIZATIONS, normalized_streams, round_of
from openelm_jax.config import DType, Experiment, ModelConfig
from openelm_jax.generation.forward import decoding_params
from openelm_jax.model.decoder import init_params

NORMS_SIZE = "1_1b"
"""The model of the paper's Table 8."""
REHEARSAL_TOKENS = 16
"""New ones, on a CPU."""
ROUNDS = 3


def decode_size(experiment: Experiment) -> Iterator[dict[str, Any]]:
    """Yield how fast the model generates, one text, beside what memory allows."""
    protocol, dtype, config = _setting(experiment.model)
    prompts_BT = prompts_of(protocol, config.vocab_size)[1]
    params = decoding_params(init_params(config, 0), dtype)
    facts = our_facts(config, params, dtype)
    yield {
        "parameters": facts.parameters,
        "dtype": dtype,
        "prompt_tokens": protocol.prompt_tokens,
        "new_tokens": protocol.new_tokens,
        "weight_bytes": facts.weight_bytes,
    }
    stream = our_stream(config, params, dtype)
    begin = time.perf_counter()
    warm_up(stream, prompts_BT, protocol.new_tokens)
    yield {"compile_seconds": time.perf_counter() - begin}
    turns = [time_stream(stream, prompts_BT, protocol.new_tokens) for _ in range(ROUNDS)]
    result = Result(
        key=Key(experiment.name, "jax", dtype, 1),
        facts=facts,
        turns=tuple(turns),
        prompt_tokens=protocol.prompt_tokens,
        new_tokens=protocol.new_tokens,
    )
    device, bandwidth = reader(READ_BYTES)()
    row = make_row(result, bound_of(result, {device: bandwidth}))
    yield {
        "prompt_tokens_per_second": row.prompt.median,
        "generation_tokens_per_second": row.generation.median,
        "generation_tokens_per_second_range": [row.generation.low, row.generation.high],
        "total_tokens_per_second": row.total.median,
        "bytes_read_per_second": bandwidth,
        "bound_tokens_per_second": row.bound.tokens_per_second,
        "share_of_bound": row.share,
    }


def compare_norms(experiment: Experiment) -> Iterator[dict[str, Any]]:
    """Yield what norms cost in OpenELM 1.1B, and by themselves, for Table 8's models.

    On a CPU, a rehearsal, in the model of `experiment` instead.
    """
    on_a_cpu = jax.devices()[0].platform == "cpu"
    protocol, dtype, config = _setting(experiment.model if on_a_cpu else model_of(NORMS_SIZE))
    prompts_BT = prompts_of(protocol, config.vocab_size)[1]
    params = decoding_params(init_params(config, 0), dtype)
    streams = normalized_streams(config, params, dtype, prompts_BT, protocol.new_tokens)
    rounds = [
        round_of(streams, number, prompts_BT, protocol.new_tokens) for number in range(ROUNDS)
    ]
    yield {
        "in_model": {
            name: _medians([turns[name] for turns in rounds], protocol) for name in NORMALIZATIONS
        }
    }
    del streams, params  # their memory
    for model in MODELS:
        for tokens in TOKENS:
            shapes = norm_shapes(model, tokens)
            passes = {kind: jax_pass(kind, shapes, dtype) for kind in KINDS}
            seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for number in range(ROUNDS):
                for kind in list(KINDS)[:: -1 if number % 2 else 1]:
                    seconds[kind].append(seconds_of(passes[kind]))
            yield {
                f"{title_of(model)}, {len(shapes)} norms, {tokens} tokens, microseconds": {
                    kind: 1e6 * statistics.median(each) for kind, each in seconds.items()
                }
            }


def _medians(turns: list[Turn], protocol: Protocol) -> dict[str, float]:
    rates = rates_of(turns, 1, protocol.prompt_tokens, protocol.new_tokens)
    return {f"{name}_tokens_per_second": statistics.median(each) for name, each in rates.items()}


def _setting(model: ModelConfig) -> tuple[Protocol, DType, ModelConfig]:
    """Return the paper's protocol and type, or a rehearsal's, and the model for so long a text."""
    on_a_cpu = jax.devices()[0].platform == "cpu"
    protocol = Protocol(new_tokens=REHEARSAL_TOKENS) if on_a_cpu else Protocol()
    length = max(model.context_length, protocol.prompt_tokens + protocol.new_tokens)
    config = dataclasses.replace(model, normalization="rms_norm", context_length=length)
    return protocol, "float32" if on_a_cpu else "bfloat16", config

"""How each program generates, greedily and with a cache: us, PyTorch, mlx-lm, transformers' models.

Each runs in a process of its own, which `serve_generation` is. torch, transformers and mlx are
imported there.

Legend: B batch, T time, I tokens of a block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from openelm_jax.benchmarks.generation_models import (
    OTHERS,
    Cost,
    cost_of,
    cost_of_other,
    other_model,
)
from openelm_jax.benchmarks.processes import questions
from openelm_jax.benchmarks.report import num_cores
from openelm_jax.config import ModelConfig
from openelm_jax.model.matrix import Bits

Stream = Callable[[np.ndarray, int], Iterator[np.ndarray]]
"""(prompts [B, T], new tokens) -> those [B, I] as they come; the first when the prompt is read."""

BYTES = {"float32": 4, "bfloat16": 2}
"""Of a number, by compute type."""
BITS: dict[str, Bits] = {"int8": 8, "int4": 4}
"""Of a weight, by the precisions that only our own program has; it computes in its default type."""
WARM_UP_TOKENS = 8
"""New tokens after which all code is compiled and what memory is needed is there."""


class Facts(NamedTuple):
    """What is known of a side before it runs."""

    parameters: int
    weight_bytes: int
    """That a new token reads."""
    cache_bytes: int
    """Of each token of a row."""
    device: str
    """The platform: cpu, gpu."""


class Side(NamedTuple):
    """A program with a model ready to generate."""

    stream: Stream
    facts: Facts


class Turn(NamedTuple):
    """Seconds until the prompt is read and the first token chosen, and until all tokens are."""

    prompt_seconds: float
    seconds: float


def serve_generation(
    connection: Connection,
    program: str,
    source: str,
    precision: str,
    prompts: dict[int, np.ndarray],
    new_tokens: int,
) -> None:
    """Answer "facts" with them; ("dry", batch) when all new tokens are generated;
    ("first", batch) with the first ones; ("turn", batch) with a Turn, warmed up.

    `source` is a Hugging Face directory, or for transformers the name of a model. `prompts` are
    [B, T] by batch size.
    """
    length = new_tokens + max(rows_BT.shape[1] for rows_BT in prompts.values())
    side = PROGRAMS[program](source, precision, length)
    for question in questions(connection):
        if question == "facts":
            connection.send(side.facts)
            continue
        kind, batch = question
        if kind == "dry":
            connection.send(time_stream(side.stream, prompts[batch], new_tokens))
            continue
        first_BI = warm_up(side.stream, prompts[batch], new_tokens)
        if kind == "first":
            connection.send(first_BI)
        else:
            connection.send(time_stream(side.stream, prompts[batch], new_tokens))


def warm_up(stream: Stream, prompts_BT: np.ndarray, new_tokens: int) -> np.ndarray:
    """Generate the first tokens, and return them."""
    blocks: list[np.ndarray] = []
    for block_BI in stream(prompts_BT, new_tokens):
        blocks.append(block_BI)
        if sum(block_BI.shape[1] for block_BI in blocks) >= WARM_UP_TOKENS:
            break
    return np.concatenate(blocks, axis=1)[:, :WARM_UP_TOKENS]


def time_stream(stream: Stream, prompts_BT: np.ndarray, new_tokens: int) -> Turn:
    """Return how long reading the prompts and generating all new tokens take."""
    begin = time.perf_counter()
    blocks = stream(prompts_BT, new_tokens)
    count = next(blocks).shape[1]
    prompt_seconds = time.perf_counter() - begin
    count += sum(block.shape[1] for block in blocks)
    seconds = time.perf_counter() - begin
    assert count == new_tokens, f"{count} tokens of {new_tokens}"
    return Turn(prompt_seconds, seconds)


def our_stream(config: ModelConfig, params: Any, dtype: str) -> Stream:
    """Return how our engine generates with parameters as it takes them; no token ends a text."""
    from openelm_jax.generation import engine
    from openelm_jax.generation.sampling import Sampling

    greedy = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)

    def stream(prompts_BT: np.ndarray, new_tokens: int) -> Iterator[np.ndarray]:
        return engine.stream(
            config,
            params,
            prompts_BT.tolist(),
            max_tokens=new_tokens,
            eos_id=-1,
            sampling=greedy,
            dtype=dtype,
        )

    return stream


def our_facts(config: ModelConfig, params: Any, dtype: str) -> Facts:
    """Return them of parameters as the engine takes them, whatever type they are stored in."""
    import jax

    table = 0 if config.tie_embeddings else num_bytes(params["embedding"])
    cost = cost_of(config)
    return Facts(
        parameters=cost.parameters,
        weight_bytes=num_bytes(params) - table,
        cache_bytes=cost.cache_per_token * BYTES[dtype],
        device=jax.devices()[0].platform,
    )


def num_bytes(tree: Any) -> int:
    """Return the bytes of all arrays in a tree."""
    import jax

    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _ours(directory: str, precision: str, length: int) -> Side:
    from openelm_jax.xla_flags import set_flags

    set_flags()
    from openelm_jax.generation.language_model import load
    from openelm_jax.training.compilation import keep_compiled_code

    keep_compiled_code()
    if precision in BITS:
        model = load(directory, quantize=BITS[precision])
    else:
        model = load(directory, dtype=precision)  # type: ignore[arg-type]
    facts = our_facts(model.config, model.params, model.dtype)
    return Side(our_stream(model.config, model.params, model.dtype), facts)


def _torch(directory: str, dtype: str, length: int) -> Side:
    """Our model in PyTorch."""
    from openelm_jax.weights.huggingface import open_huggingface
    from openelm_jax.weights.torch_model import load_params, torch_model

    with open_huggingface(Path(directory)) as stored:
        model = torch_model(stored.config)
        load_params(model, stored)
    return _torch_side(model, dtype, cost_of(stored.config))


def _transformers(name: str, dtype: str, length: int) -> Side:
    """Another program's model, with random weights."""
    import torch

    torch.manual_seed(0)
    model = other_model(OTHERS[name], length)
    cost = cost_of_other(model)
    assert cost.parameters == OTHERS[name].parameters, f"{name} has {cost.parameters} parameters"
    return _torch_side(model, dtype, cost)


def _torch_side(model: Any, dtype: str, cost: Cost) -> Side:
    import torch

    torch.set_num_threads(num_cores())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device, getattr(torch, dtype)).eval()
    return Side(torch_stream(model), _facts(cost, dtype, "gpu" if device == "cuda" else "cpu"))


def _facts(cost: Cost, dtype: str, device: str) -> Facts:
    size = BYTES[dtype]
    return Facts(cost.parameters, cost.weights_read * size, cost.cache_per_token * size, device)


def torch_stream(model: Any) -> Stream:
    """Return how a causal model of transformers generates, eagerly, with its static cache."""
    import torch
    from transformers import StaticCache
    from transformers.modeling_outputs import CausalLMOutputWithPast

    # transformers calls the cache by another name from some version on.
    fields = CausalLMOutputWithPast.__dataclass_fields__
    name = "cache" if "cache" in fields else "past_key_values"

    def stream(prompts_BT: np.ndarray, new_tokens: int) -> Iterator[np.ndarray]:
        length = prompts_BT.shape[1] + new_tokens
        cache = StaticCache(config=model.config, max_cache_len=length)
        tokens_BT = torch.from_numpy(prompts_BT.astype(np.int64)).to(model.device)
        for _ in range(new_tokens):
            with torch.inference_mode():
                outputs = model(tokens_BT, use_cache=True, logits_to_keep=1, **{name: cache})
                tokens_BT = outputs.logits[:, -1].argmax(dim=-1, keepdim=True)
            yield tokens_BT.cpu().numpy()

    return stream


def _mlx(directory: str, dtype: str, length: int) -> Side:
    """mlx-lm's own OpenELM and its own loop, which generates one text at a time."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    from openelm_jax.weights.huggingface_config import config_from_fields

    model, fields = load_model(Path(directory))
    model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())

    def stream(prompts_1T: np.ndarray, new_tokens: int) -> Iterator[np.ndarray]:
        (prompt_T,) = prompts_1T
        for token, _ in generate_step(mx.array(prompt_T), model, max_tokens=new_tokens):
            yield np.array([[int(token)]])

    cost = cost_of(config_from_fields(fields, directory))
    device = "gpu" if mx.default_device() == mx.gpu else "cpu"
    return Side(stream, _facts(cost, dtype, device))


PROGRAMS: dict[str, Callable[[str, str, int], Side]] = {
    "jax": _ours,
    "torch": _torch,
    "mlx": _mlx,
    "transformers": _transformers,
}
"""By name: (source, precision, most tokens of a text) -> a side."""

"""The models of `benchmark generate`: OpenELM's, a uniform one of equal size, and other programs'.

The others are made by transformers from their configurations, with random weights: what a token
costs does not depend on them. torch and transformers are imported where a model is made.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from openelm_jax.config import DType, ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import load_experiment
from openelm_jax.model.scaling import layer_shapes, parameter_count
from openelm_jax.tokenizer import Tokenizer
from openelm_jax.weights.huggingface import write_huggingface
from openelm_jax.weights.names import ParamPath, named_weights
from openelm_jax.weights.stored import StoredWeights

SIZES = ("270m", "450m", "1_1b", "3b", "10m")
PUBLISHED_VOCABULARY = 32000
UNIFORM = "uniform"
UNIFORM_WIDTH = 64
"""What divides the FFN width of a uniform model."""


class Cost(NamedTuple):
    """What a model is and what a new token reads of it, in numbers."""

    parameters: int
    weights_read: int
    """For one token: a table of embeddings that is no head is not read, a shared layer again."""
    cache_per_token: int
    """Numbers that the cache holds of each token."""


def model_of(size: str) -> ModelConfig:
    """Return the model of a size: a published one with the tokenizer's 32,000 pieces, or 10m."""
    if size not in SIZES:
        raise UserError(f"no size {size}; known are {', '.join(SIZES)}.")
    if size == "10m":
        return dataclasses.replace(load_experiment("sotu").model, model_dim=384)
    return dataclasses.replace(load_experiment(size).model, vocab_size=PUBLISHED_VOCABULARY)


def uniform(config: ModelConfig) -> ModelConfig:
    """Return the model with as many layers, all alike, whose parameters are nearest in number.

    Its heads are the mean of the model's, and its FFN takes the rest of the budget.
    """
    shapes = layer_shapes(config)
    groups = config.num_gqa_groups
    mean_heads = sum(shape.num_query_heads for shape in shapes) / len(shapes)
    heads = groups * max(1, round(mean_heads / groups))

    def with_width(ffn_dim: int) -> ModelConfig:
        return dataclasses.replace(
            config,
            qkv_multipliers=heads * config.head_dim / config.model_dim,
            ffn_multipliers=ffn_dim / config.model_dim,
            ffn_dim_divisor=UNIFORM_WIDTH,
        )

    budget = parameter_count(config)
    widest = max(shape.ffn_dim for shape in shapes)
    widths = range(UNIFORM_WIDTH, widest + UNIFORM_WIDTH, UNIFORM_WIDTH)
    return min(map(with_width, widths), key=lambda made: abs(parameter_count(made) - budget))


def cost_of(config: ModelConfig) -> Cost:
    """Return what an OpenELM costs a token."""
    parameters = parameter_count(config)
    table = 0 if config.tie_embeddings else config.vocab_size * config.model_dim
    cache = sum(2 * shape.kv_dim for shape in layer_shapes(config))
    return Cost(parameters, parameters - table, cache)


def write_random(
    directory: Path, config: ModelConfig, dtype: DType, tokenizer: Tokenizer | None = None
) -> None:
    """Write a model with random weights, the same every time, as a Hugging Face directory.

    Matrices are drawn with a standard deviation of one over the root of `model_dim`; norms are 1.
    """
    shapes = {weight.path: weight.shape for weight in named_weights(config)}

    def read(path: ParamPath) -> np.ndarray:
        shape = shapes[path]
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        random = np.random.default_rng(zlib.crc32("/".join(path).encode()))
        return random.standard_normal(shape, np.float32) * np.float32(config.model_dim**-0.5)

    directory.mkdir(parents=True)
    stored = StoredWeights(config=config, read=read, source="random weights", tokenizer=tokenizer)
    write_huggingface(directory, stored, dtype=dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Other:
    """A model of another program: its name, and its transformers configuration in words."""

    title: str
    architecture: str
    """What transformers calls the model: Opt, GPTNeoX, Olmo, Llama."""
    fields: dict[str, Any]
    parameters: int
    """How many it has, published or counted from the shapes that are."""
    shares_ffn: bool = False
    """All layers have one feed-forward module."""


def _mobillama(title: str, width: int, ffn: int, parameters: int, *, shared: bool) -> Other:
    """(arXiv 2402.16840: TinyLlama's layers, without grouped queries.)"""
    fields = {
        **{"hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": 22},
        **{"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000},
        "tie_word_embeddings": False,
    }
    return Other(
        title=title,
        architecture="Llama",
        fields=fields,
        parameters=parameters,
        shares_ffn=shared,
    )


OTHERS = {
    "opt_350m": Other(
        title="OPT 350M",
        architecture="OPT",
        fields={
            **{"hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24},
            **{"num_attention_heads": 16, "vocab_size": 50272, "word_embed_proj_dim": 512},
            "do_layer_norm_before": False,
        },
        parameters=331_196_416,
    ),
    "mobillama_0_5b": _mobillama("MobiLlama 0.5B", 2048, 5632, 534_865_920, shared=True),
    "mobillama_0_8b": _mobillama("MobiLlama 0.8B", 2560, 10240, 819_315_200, shared=True),
    "pythia_1_4b": Other(
        title="Pythia 1.4B",
        architecture="GPTNeoX",
        fields={
            **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24},
            **{"num_attention_heads": 16, "vocab_size": 50304, "tie_word_embeddings": False},
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 10000.0},
                "partial_rotary_factor": 0.25,
            },
        },
        parameters=1_414_647_808,
    ),
    "mobillama_1_26b": _mobillama("MobiLlama 1.26B", 2048, 5632, 1_261_529_088, shared=False),
    "olmo_1_18b": Other(
        title="OLMo 1.18B",
        architecture="Olmo",
        fields={
            **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
            **{"num_attention_heads": 16, "vocab_size": 50304, "tie_word_embeddings": True},
        },
        parameters=1_176_764_416,
    ),
}
"""The rows of the paper's Table 7 that are not OpenELM, smallest first."""


def other_model(other: Other, length: int = 2048) -> Any:
    """Return the PyTorch model of another program, drawn by transformers, for `length` tokens."""
    import transformers
    from torch import nn

    Config = getattr(transformers, f"{other.architecture}Config")
    Model: Callable[[Any], Any] = getattr(transformers, f"{other.architecture}ForCausalLM")
    config = Config(**other.fields | {"max_position_embeddings": max(2048, length)})
    if not other.shares_ffn:
        return Model(config).eval()
    # Layers are made with next to no FFN, and then given the one: 22 wide ones would not fit.
    narrow = Config(**config.to_dict() | {"intermediate_size": 1})
    model = Model(narrow)
    ffn = type(model.model.layers[0].mlp)(config)
    for parameter in ffn.parameters():
        nn.init.normal_(parameter, std=config.initializer_range)
    for layer in model.model.layers:
        layer.mlp = ffn
    model.config.intermediate_size = config.intermediate_size
    return model.eval()


def cost_of_other(model: Any) -> Cost:
    """Return what a model of transformers costs a token.

    A feed-forward module that layers share is read in each of them: between two of them comes more
    than a cache of the processor holds.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    read = sum(
        parameter.numel()
        for _, module in model.named_modules(remove_duplicate=False)
        for parameter in module.parameters(recurse=False)
    )
    tables = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    read -= tables[0].numel()  # a row of it; where it is the head too, the head was counted above
    config = model.config
    return Cost(parameters, read, 2 * config.num_hidden_layers * config.hidden_size)

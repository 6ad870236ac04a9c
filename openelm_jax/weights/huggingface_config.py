"""config.json of Apple's Hugging Face layout, which mlx-lm shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.model.scaling import expand_multipliers, layer_shapes

ExportDType = Literal["float32", "bfloat16", "float16"]

ACTIVATIONS = {"swish": "swish", "silu": "swish", "gelu": "gelu"}
NORMALIZATIONS = {"rms_norm": "rms_norm", "layer_norm": "layer_norm"}
MOST_LAYERS = 10_000
"""What a file may ask for: every layer is laid out before a tensor is looked at."""

READ = {
    "activation_fn_name", "ffn_dim_divisor", "ffn_multipliers", "ffn_with_glu", "head_dim",
    "max_context_length", "model_dim", "model_type", "normalization_layer_name",
    "normalize_qk_projections", "num_gqa_groups", "num_kv_heads", "num_query_heads",
    "num_transformer_layers", "qkv_multipliers", "quantization", "rope_freq_constant",
    "share_input_output_layers", "vocab_size",
}  # fmt: skip
"""Fields that say which model it is."""

FIXED = {
    "rms_norm_eps": 1e-6,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "pruned_heads": {},
}
"""Fields that may be there with the one value that the model has."""

REPEATED = {
    "num_hidden_layers": "num_transformer_layers",
    "quantization_config": "quantization",
    "tie_word_embeddings": "share_input_output_layers",
}
"""Fields that other programs may add, and those of this layout that say the same."""

INERT = {
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path",
    "architectures", "attn_implementation", "auto_map", "bad_words_ids", "begin_suppress_tokens",
    "bos_token_id", "chunk_size_feed_forward", "cross_attention_hidden_size",
    "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping",
    "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label",
    "initializer_range", "is_decoder", "label2id", "length_penalty", "max_length",
    "max_new_tokens", "min_length", "min_new_tokens", "name_or_path", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_scores", "pad_token_id", "prefix", "problem_type",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
    "rope_max_length", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature",
    "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers_version", "typical_p", "use_bfloat16", "use_cache",
}  # fmt: skip
"""Fields of transformers and mlx-lm that change no logit: generation, training, bookkeeping."""


def config_from_fields(fields: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the model that a config.json describes; `where` begins the errors' sentences.

    A missing field has the default on which Apple's code and mlx-lm agree, and where they do not
    it is asked for. A list of multipliers becomes the pair it came from, if it did. Raises
    UserError for a field that is neither known nor known to change no logit.
    """
    if fields.get("model_type", "openelm") != "openelm":
        raise UserError(f"{where}: model_type is {fields['model_type']!r}; known is openelm.")
    for name, only in FIXED.items():
        if fields.get(name, only) != only:
            raise UserError(f"{where}: {name} is {fields[name]}; known is {only}.")
    _refuse_unknown(fields, where)

    def required(name: str) -> Any:
        if name not in fields:
            raise UserError(f"{where}: the field {name} is missing; add it.")
        return fields[name]

    def flag(name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise UserError(f"{where}: {name} is {value!r}; known are true, false.")
        return value

    def number(name: str, default: float) -> float:
        value = fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{where}: {name} is {value!r}; it must be a number.")
        return float(value)

    def choice(name: str, default: str, known: Mapping[str, str]) -> Any:
        value = fields.get(name, default)
        if not isinstance(value, str) or value not in known:
            raise UserError(f"{where}: {name} is {value!r}; known are {', '.join(known)}.")
        return known[value]

    num_layers = required("num_transformer_layers")
    if isinstance(num_layers, int) and num_layers > MOST_LAYERS:
        raise UserError(
            f"{where}: num_transformer_layers is {num_layers}; it must be at most {MOST_LAYERS}."
        )
    try:
        config = ModelConfig(
            num_layers=num_layers,
            model_dim=required("model_dim"),
            head_dim=required("head_dim"),
            vocab_size=required("vocab_size"),
            num_gqa_groups=required("num_gqa_groups"),
            qkv_multipliers=_collapse(required("qkv_multipliers"), num_layers),
            ffn_multipliers=_collapse(required("ffn_multipliers"), num_layers),
            ffn_dim_divisor=required("ffn_dim_divisor"),
            ffn_with_glu=flag("ffn_with_glu", fields.get("ffn_with_glu", True)),
            activation=choice("activation_fn_name", "swish", ACTIVATIONS),
            normalization=choice("normalization_layer_name", "rms_norm", NORMALIZATIONS),
            normalize_qk_projections=flag(
                "normalize_qk_projections", required("normalize_qk_projections")
            ),
            tie_embeddings=flag("share_input_output_layers", required("share_input_output_layers")),
            rope_base=number("rope_freq_constant", 10000),
            context_length=fields.get("max_context_length", 2048),
        )
        _check_heads(config, fields, where)
    except OverflowError:
        raise UserError(f"{where}: it has a number that no float holds; correct it.") from None
    except UserError as mistake:
        if str(mistake).startswith(where):
            raise
        raise UserError(f"{where}: {mistake}") from None
    return config


def fields_of_config(config: ModelConfig, dtype: ExportDType) -> dict[str, Any]:
    """Return config.json's fields: Apple's, plus all that its readers compute differently.

    Apple's code computes the heads from the multipliers, mlx-lm reads the lists; without
    `auto_map` no tool asks whether it may run foreign code.
    """
    shapes = layer_shapes(config)
    base = config.rope_base
    assert dtype in get_args(ExportDType)
    return {
        "activation_fn_name": config.activation,
        "architectures": ["OpenELMForCausalLM"],
        "ffn_dim_divisor": config.ffn_dim_divisor,
        "ffn_multipliers": list(expand_multipliers(config.ffn_multipliers, config.num_layers)),
        "ffn_with_glu": config.ffn_with_glu,
        "head_dim": config.head_dim,
        "initializer_range": 0.02,
        "max_context_length": config.context_length,
        "model_dim": config.model_dim,
        "model_type": "openelm",
        "normalization_layer_name": config.normalization,
        "normalize_qk_projections": config.normalize_qk_projections,
        "num_gqa_groups": config.num_gqa_groups,
        "num_hidden_layers": config.num_layers,
        "num_kv_heads": [shape.num_kv_heads for shape in shapes],
        "num_query_heads": [shape.num_query_heads for shape in shapes],
        "num_transformer_layers": config.num_layers,
        "qkv_multipliers": _shortest(config.qkv_multipliers, config.num_layers),
        "rope_freq_constant": int(base) if base == int(base) else base,
        "rope_max_length": 2 * config.context_length,
        "share_input_output_layers": config.tie_embeddings,
        "torch_dtype": dtype,
        "transformers_version": "4.39.3",
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def what_mlx_lm_lacks(config: ModelConfig) -> list[str]:
    """Return each thing of the model that mlx-lm's openelm does not have.

    It fails on a feed-forward without a gate, and computes the others otherwise without a word.
    """
    faults = {
        f"{config.normalization} as its norm": config.normalization != "rms_norm",
        f"the activation {config.activation}": config.activation != "swish",
        "a feed-forward without a gate (ffn_with_glu)": not config.ffn_with_glu,
    }
    return [fault for fault, holds in faults.items() if holds]


def differing_readers(config: ModelConfig) -> list[str]:
    """Return a sentence for each published reader that does not compute this model."""
    sentences = []
    if lacking := what_mlx_lm_lacks(config):
        sentences.append(f"mlx-lm cannot run a model with {' and '.join(lacking)}.")
    apples = []
    if config.normalization != "rms_norm":
        apples.append(f"computes rms_norm, not {config.normalization}")
    alphas = _shortest(config.qkv_multipliers, config.num_layers)
    if isinstance(alphas, tuple) and len(alphas) != 2:
        apples.append(
            "takes one number or a (first, last) pair as qkv_multipliers, not a list of "
            f"{len(alphas)}"
        )
    if apples:
        sentences.append(f"Apple's Hugging Face code {' and '.join(apples)}.")
    return sentences


def _refuse_unknown(fields: Mapping[str, Any], where: str) -> None:
    known = READ | FIXED.keys() | REPEATED.keys() | INERT
    unknown = [name for name in sorted(fields.keys() - known) if fields[name] is not None]
    if unknown:
        raise UserError(
            f"{where}: {', '.join(unknown)}: this model has no such setting; take it out if the "
            "logits do not depend on it, otherwise these are another model's weights."
        )
    for name, ours in REPEATED.items():
        theirs, value = fields.get(name), fields.get(ours)
        if theirs is not None and value is not None and theirs != value:
            raise UserError(
                f"{where}: {name} is {theirs}, but {ours} is {value}; correct one of them."
            )


def _shortest(value: float | tuple[float, ...], num_layers: int) -> float | tuple[float, ...]:
    """Return multipliers as they were given, or shorter if one for each layer was."""
    if isinstance(value, tuple) and len(value) == num_layers != 2:
        return _collapse(list(value), num_layers)
    return value


def _collapse(value: Any, num_layers: Any) -> Any:
    """Return the number or pair that expands to this list of every layer, if there is one."""
    if not isinstance(value, list):
        return value
    if len(value) != num_layers or not all(isinstance(v, int | float) for v in value):
        return tuple(value)
    for short in (value[0], (value[0], value[-1])):
        if expand_multipliers(short, len(value)) == tuple(value):
            return short
    return tuple(value)


def _check_heads(config: ModelConfig, fields: Mapping[str, Any], where: str) -> None:
    """The reference recomputes the heads and mlx-lm does not: they must be the same."""
    shapes = layer_shapes(config)
    for name in ("num_query_heads", "num_kv_heads"):
        stored = fields.get(name)
        if stored is None:
            continue
        if not isinstance(stored, list) or len(stored) != config.num_layers:
            raise UserError(
                f"{where}: {name} is {stored}; it must have one number for each of the "
                f"{config.num_layers} layers."
            )
        for i, (theirs, shape) in enumerate(zip(stored, shapes, strict=True)):
            if theirs != (ours := getattr(shape, name)):
                raise UserError(
                    f"{where}: {name} says {theirs} for layer {i}, but qkv_multipliers and "
                    f"num_gqa_groups make it {ours}; correct one of them."
                )

"""Apple's Hugging Face layout, which mlx-lm shares: config.json and safetensors.

bfloat16 goes through ml_dtypes, bit for bit, without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.model.scaling import expand_multipliers, layer_shapes
from openelm_jax.tokenizer import Tokenizer
from openelm_jax.weights.names import Params, from_reference, to_reference
from openelm_jax.weights.new_directory import new_directory
from openelm_jax.weights.vocabulary import resize_vocabulary

ExportDType = Literal["float32", "bfloat16", "float16"]

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
NUMPY_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ACTIVATIONS = {"swish": "swish", "silu": "swish", "gelu": "gelu"}
NORMALIZATIONS = {"rms_norm": "rms_norm", "layer_norm": "layer_norm"}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_huggingface(
    directory: str | Path, vocab_size: int | None = None
) -> tuple[ModelConfig, Params]:
    """Return configuration and float32 parameters of a Hugging Face or MLX directory.

    One weight file or several with an index, in float32, bfloat16 or float16. `vocab_size` gives
    the model more (or fewer) rows than the file has: see `resize_vocabulary`. Raises UserError
    for anything that this model is not, and for each tensor missing, unexpected or misshapen.
    """
    directory = Path(directory)
    config = config_from_fields(
        _read_json(directory / "config.json"), str(directory / "config.json")
    )
    with _open_tensors(directory) as tensors:

        def read(name: str) -> np.ndarray:
            if (dtype := tensors[name].get_dtype()) not in DTYPES:
                raise UserError(
                    f"{directory}: {name} is stored as {dtype}; "
                    f"known are {', '.join(DTYPES.values())}."
                )
            return tensors[name][:]

        shapes = {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
        params = from_reference(config, shapes, read, str(directory))
    return resize_vocabulary(config, params, vocab_size or config.vocab_size)


def write_huggingface(
    directory: str | Path,
    config: ModelConfig,
    params: Params,
    *,
    dtype: ExportDType = "float32",
    tokenizer: Tokenizer | None = None,
    tokenizer_vocab_size: int | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a directory that Apple's code and mlx-lm load; it appears complete or not at all.

    The vocabulary is cut to `tokenizer_vocab_size` rows, by default the tokenizer's pieces; with
    neither, all rows stay. Files larger than `max_shard_bytes` are split, with an index. Raises
    UserError for a directory that holds something and for a tokenizer larger than the model.
    """
    if dtype not in NUMPY_DTYPES:
        raise UserError(f"dtype is {dtype!r}: known are {', '.join(NUMPY_DTYPES)}.")
    rows = tokenizer_vocab_size or (tokenizer.vocab_size if tokenizer else config.vocab_size)
    if rows > config.vocab_size:
        raise UserError(
            f"the tokenizer has {rows} pieces and the model only {config.vocab_size} rows: "
            "give the tokenizer that the model was trained with."
        )
    config, params = resize_vocabulary(config, params, rows)
    fields = fields_of_config(config, dtype)
    if tokenizer is not None:
        fields |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    with new_directory(Path(directory)) as partial:
        _write_json(partial / "config.json", fields)
        _write_tensors(partial, to_reference(config, params), dtype, max_shard_bytes)
        if tokenizer is not None:
            (partial / "tokenizer.model").write_bytes(tokenizer.model_bytes)


def config_from_fields(fields: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the model that a config.json describes; `where` begins the errors' sentences.

    A missing field has the default on which Apple's code and mlx-lm agree, and where they do not
    it is asked for. The list of ffn multipliers becomes the pair it came from, if it did.
    """
    if fields.get("model_type", "openelm") != "openelm":
        raise UserError(f"{where}: model_type is {fields['model_type']!r}; known is openelm.")
    for name in ("quantization", "quantization_config"):
        if fields.get(name):
            raise UserError(f"{where}: {name} is set; give the weights before quantisation.")
    if (eps := fields.get("rms_norm_eps", 1e-6)) != 1e-6:
        raise UserError(f"{where}: rms_norm_eps is {eps}; known is 1e-06.")

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
        if value not in known:
            raise UserError(f"{where}: {name} is {value!r}; known are {', '.join(known)}.")
        return known[value]

    num_layers = required("num_transformer_layers")
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
    except UserError as mistake:
        if str(mistake).startswith(where):
            raise
        raise UserError(f"{where}: {mistake}") from None
    _check_heads(config, fields, where)
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
        "bos_token_id": 1,
        "eos_token_id": 2,
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
        "num_kv_heads": [shape.num_kv_heads for shape in shapes],
        "num_query_heads": [shape.num_query_heads for shape in shapes],
        "num_transformer_layers": config.num_layers,
        "qkv_multipliers": config.qkv_multipliers,
        "rope_freq_constant": int(base) if base == int(base) else base,
        "rope_max_length": 2 * config.context_length,
        "share_input_output_layers": config.tie_embeddings,
        "torch_dtype": dtype,
        "transformers_version": "4.39.3",
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def differing_readers(config: ModelConfig) -> list[str]:
    """Return a sentence for each thing in `config` that a published reader does not know."""
    faults = []
    if config.normalization != "rms_norm":
        faults.append("Apple's Hugging Face code and mlx-lm compute rms_norm, not layer_norm.")
    if config.activation != "swish":
        faults.append(f"mlx-lm computes swish, not {config.activation}.")
    if not config.ffn_with_glu:
        faults.append("mlx-lm loads no feed-forward without a gate.")
    return faults


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


@contextmanager
def _open_tensors(directory: Path) -> Iterator[dict[str, Any]]:
    """Give lazy slices of every tensor in the directory's weight files, by name."""
    if (directory / INDEX).is_file():
        index = _read_json(directory / INDEX)
        names = index.get("weight_map")
        if not isinstance(names, dict):
            raise UserError(f"{directory / INDEX}: weight_map is missing; take the original file.")
        files = [directory / name for name in sorted(set(names.values()))]
    else:
        files = [directory / WEIGHTS]
    with ExitStack() as stack:
        tensors: dict[str, Any] = {}
        for file in files:
            if not file.is_file():
                listed = f", which {INDEX} lists," if len(files) > 1 else ""
                raise UserError(f"{file}{listed} is missing; fetch it, or export again.")
            try:
                opened = stack.enter_context(safetensors.safe_open(file, "np"))
            except safetensors.SafetensorError as fault:
                raise UserError(
                    f"{file} is damaged or cut short ({fault}); fetch it again."
                ) from None
            tensors |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        yield tensors


def _write_tensors(
    directory: Path,
    tensors: Iterator[tuple[str, np.ndarray]],
    dtype: ExportDType,
    max_shard_bytes: int,
) -> None:
    shards: list[list[str]] = []
    shard: dict[str, np.ndarray] = {}
    shard_bytes = total_bytes = 0

    def flush() -> None:
        path = directory / f"shard-{len(shards)}"
        safetensors.numpy.save_file(shard, path, metadata={"format": "pt"})
        path.chmod(directory.stat().st_mode & 0o666)  # save_file keeps it from other users
        shards.append(list(shard))
        shard.clear()

    for name, array in tensors:
        # save_file writes an array that is not contiguous wrongly, and says nothing.
        array = np.ascontiguousarray(array.astype(NUMPY_DTYPES[dtype]))
        if shard and shard_bytes + array.nbytes > max_shard_bytes:
            flush()
            shard_bytes = 0
        shard[name] = array
        shard_bytes += array.nbytes
        total_bytes += array.nbytes
    flush()
    if len(shards) == 1:
        (directory / "shard-0").rename(directory / WEIGHTS)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        (directory / f"shard-{i}").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(directory / INDEX, index)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing; give the directory that holds it and the weights."
        ) from None
    except ValueError as fault:
        raise UserError(f"{path} is no JSON ({fault}); take the original file.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; take the original file.")
    return value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")

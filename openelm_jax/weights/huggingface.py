"""Apple's Hugging Face layout, which mlx-lm shares: directories of config.json and safetensors.

bfloat16 goes through ml_dtypes, bit for bit, without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openelm_jax.errors import UserError
from openelm_jax.weights.huggingface_config import (
    ExportDType,
    config_from_fields,
    fields_of_config,
)
from openelm_jax.weights.huggingface_tokenizer import write_tokenizer
from openelm_jax.weights.json_files import read_json, write_json
from openelm_jax.weights.mlx_quantized import (
    Quantization,
    bits_per_weight,
    dequantize,
    is_packed,
    logical_shapes,
    parts_of,
    quantization_in,
    quantized_kinds,
    quantized_tensors,
)
from openelm_jax.weights.names import from_reference, reference_shapes, to_reference
from openelm_jax.weights.safetensors_files import (
    MAX_SHARD_BYTES,
    TensorKind,
    find_tensors,
    write_tensors,
)
from openelm_jax.weights.stored import StoredWeights

READABLE = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
CODE_OF: dict[str, str] = {name: code for code, name in READABLE.items()}
CONFIG = "config.json"


@contextmanager
def open_huggingface(directory: Path) -> Iterator[StoredWeights]:
    """Give the model in a directory of config.json and one weight file or several with an index.

    Tensors are float32, bfloat16, float16, or quantised by MLX. Raises UserError for anything that
    this model is not, and for each tensor missing, unexpected or misshapen.
    """
    fields = read_json(directory / CONFIG)
    config = config_from_fields(fields, str(directory / CONFIG))
    how = quantization_in(fields, str(directory / CONFIG))
    tensors = find_tensors(directory)

    def read_plain(name: str) -> np.ndarray:
        if (code := tensors[name].code) not in READABLE:
            known = ", ".join(READABLE.values())
            raise UserError(f"{directory}: {name} is stored as {code}; known are {known}.")
        return tensors[name].read()

    def read(name: str) -> np.ndarray:
        if how is None or not is_packed(tensors[name]):
            return read_plain(name)
        scales, biases = (read_plain(part) for part in parts_of(name))
        return dequantize(tensors[name].read(), scales, biases, how)

    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if how is not None:
        shapes = logical_shapes(tensors, how, str(directory))
    yield StoredWeights(
        config=config,
        read=from_reference(config, shapes, read, str(directory)),
        source=str(directory),
    )


@dataclass(frozen=True)
class Written:
    """What became of the weights: bits of the file a parameter, matrices left unquantised."""

    bits_per_weight: float
    unquantized: tuple[str, ...]


def write_huggingface(
    directory: Path,
    stored: StoredWeights,
    *,
    dtype: ExportDType = "bfloat16",
    quantization: Quantization | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Written:
    """Write config.json, weights and tokenizer that Apple's code and mlx-lm load.

    With a quantisation they are mlx-lm's only, and matrices whose rows no group divides stay in
    `dtype`. Files larger than `max_shard_bytes` are split, with an index.
    """
    code = CODE_OF[dtype]
    unquantized: tuple[str, ...] = ()
    fields = fields_of_config(stored.config, dtype) | _ids(stored)
    if quantization is None:
        shapes = reference_shapes(stored.config)
        kinds = {name: TensorKind(code, shape) for name, shape in shapes.items()}
        tensors = to_reference(stored.config, stored.read)
    else:
        kinds, unquantized = quantized_kinds(stored, code, quantization)
        tensors = quantized_tensors(stored, dtype, quantization)
        fields |= quantization.fields()
    write_json(directory / CONFIG, fields)
    write_json(directory / "generation_config.json", _ids(stored))
    write_tensors(directory, kinds, tensors, max_shard_bytes)
    if stored.tokenizer is not None:
        write_tokenizer(directory, stored.tokenizer, stored.config)
    return Written(bits_per_weight(stored, kinds), unquantized)


def _ids(stored: StoredWeights) -> dict[str, Any]:
    """Return which tokens begin and end a text: LLaMA's unless a tokenizer says otherwise."""
    tokenizer = stored.tokenizer
    bos_id, eos_id = (1, 2) if tokenizer is None else (tokenizer.bos_id, tokenizer.eos_id)
    return {"bos_token_id": bos_id, "eos_token_id": eos_id}

"""mlx-lm's directories with weights of four or eight bits, in and out.

A row of a matrix is cut into groups; each has a scale and a bias, and a weight is
`scale * q + bias` ("affine") with q of a few bits, packed into 32-bit words from the lowest up.
MLX itself quantises, a matrix at a time; reading needs NumPy only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from openelm_jax.errors import UserError
from openelm_jax.model.scaling import parameter_count
from openelm_jax.weights.huggingface_config import ExportDType
from openelm_jax.weights.names import named_weights, to_reference
from openelm_jax.weights.safetensors_files import FileTensor, TensorKind, warn_of_overflow
from openelm_jax.weights.stored import StoredWeights

WORD_BITS = 32


@dataclass(frozen=True)
class Quantization:
    """How many bits a weight has, and how many weights share a scale and a bias."""

    bits: int
    group_size: int

    def fields(self) -> dict[str, Any]:
        """Return what config.json says of it, twice, as mlx-lm writes it."""
        fields = {"group_size": self.group_size, "bits": self.bits, "mode": "affine"}
        return {"quantization": fields, "quantization_config": fields}


def quantization_in(fields: Mapping[str, Any], where: str) -> Quantization | None:
    """Return the quantisation that a config.json names, if any; raises UserError for another."""
    given = fields.get("quantization") or fields.get("quantization_config")
    if not given:
        return None
    known = {"group_size", "bits", "mode"}
    if (
        not isinstance(given, dict)
        or given.get("mode", "affine") != "affine"
        or given.get("bits") not in (4, 8)
        or given.get("group_size") not in (32, 64, 128)
        or given.keys() - known
    ):
        raise UserError(
            f"{where}: quantization is {given}; known is MLX's affine with 4 or 8 bits in groups "
            "of 32, 64 or 128, the same for all layers: give the weights before quantisation."
        )
    return Quantization(given["bits"], given["group_size"])


def quantized_kinds(
    stored: StoredWeights, code: str, how: Quantization
) -> tuple[dict[str, TensorKind], tuple[str, ...]]:
    """Return the tensors of a quantised file in order, and which matrices stay as they are."""
    kinds: dict[str, TensorKind] = {}
    left: list[str] = []
    for weight in named_weights(stored.config):
        shape = weight.reference_shape
        if len(shape) < 2 or shape[1] % how.group_size:
            kinds[weight.name] = TensorKind(code, shape)
            left += [weight.name] if len(shape) > 1 else []
            continue
        rows, width = shape
        kinds[weight.name] = TensorKind("U32", (rows, width * how.bits // WORD_BITS))
        for part in parts_of(weight.name):
            kinds[part] = TensorKind(code, (rows, width // how.group_size))
    return kinds, tuple(left)


def quantized_tensors(
    stored: StoredWeights, dtype: ExportDType, how: Quantization
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of `quantized_kinds`; weights are cast to `dtype` before.

    Raises UserError without the package mlx, or with it but without what it computes on.
    """
    try:
        import mlx.core as mx
    except ImportError:
        raise UserError(
            "--quantize needs MLX, which is not installed: pip install 'openelm_jax[mlx]'."
        ) from None
    to = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}[dtype]
    for name, array in to_reference(stored.config, stored.read):
        if array.ndim < 2 or array.shape[1] % how.group_size:
            yield name, array
            continue
        if dtype == "float16":
            warn_of_overflow(name, array)
        matrix = mx.array(np.ascontiguousarray(array, dtype=np.float32)).astype(to)
        packed, *parts = mx.quantize(matrix, group_size=how.group_size, bits=how.bits)
        yield name, np.array(packed)
        for part, values in zip(parts_of(name), parts, strict=True):
            yield part, np.array(values.astype(mx.float32))


def bits_per_weight(stored: StoredWeights, kinds: Mapping[str, TensorKind]) -> float:
    """Return the bits of a file a parameter of the model, as mlx-lm counts them."""
    return 8 * sum(kind.num_bytes for kind in kinds.values()) / parameter_count(stored.config)


def logical_shapes(
    tensors: Mapping[str, FileTensor], how: Quantization, where: str
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a quantised file stands for.

    Raises UserError for a packed matrix without its scales and biases, or with another's.
    """
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    for name in [name for name, tensor in tensors.items() if is_packed(tensor)]:
        rows, words = shapes[name]
        width = words * WORD_BITS // how.bits
        shapes[name] = (rows, width)
        for part in parts_of(name):
            found = shapes.pop(part, None)
            if width % how.group_size or found != (rows, width // how.group_size):
                raise UserError(
                    f"{where}: {name} is quantised in groups of {how.group_size}, but {part} is "
                    f"{'missing' if found is None else list(found)}; take weights and "
                    "configuration of the same model."
                )
    return shapes


def dequantize(
    words: np.ndarray, scales: np.ndarray, biases: np.ndarray, how: Quantization
) -> np.ndarray:
    """Return in float32 the matrix that packed words, their scales and their biases stand for."""
    levels = words.view(np.uint8)  # the lowest bits of a word come first, in memory as in the row
    if how.bits == 4:
        levels = np.stack([levels & 15, levels >> 4], axis=-1)
    weights = levels.reshape(len(words), -1, how.group_size).astype(np.float32)
    weights *= scales[..., None].astype(np.float32)
    weights += biases[..., None].astype(np.float32)
    return weights.reshape(len(words), -1)


def parts_of(name: str) -> tuple[str, str]:
    """Return the names of a packed tensor's scales and biases."""
    module = name.removesuffix(".weight")
    return f"{module}.scales", f"{module}.biases"


def is_packed(tensor: FileTensor) -> bool:
    """Whether a tensor of a quantised file is a packed matrix."""
    return tensor.code == "U32" and len(tensor.shape) == 2

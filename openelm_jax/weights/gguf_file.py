"""GGUF, llama.cpp's format, in and out: a tensor at a time."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.model.scaling import layer_shapes
from openelm_jax.weights.gguf_config import (
    ARCHITECTURE,
    CONFIG_KEY,
    RMS_NORM_EPS,
    config_as_text,
    config_of,
    what_llama_cpp_lacks,
)
from openelm_jax.weights.gguf_header import StoredTensor, damaged, read_header
from openelm_jax.weights.gguf_vocabulary import puts_space_before, tokenizer_of
from openelm_jax.weights.names import NamedWeight, ParamPath, named_weights
from openelm_jax.weights.safetensors_files import warn_of_overflow
from openelm_jax.weights.stored import StoredWeights

OutType = Literal["f32", "f16", "bf16", "q8_0"]

FILE = "model.gguf"
EMBEDDING = "token_embd.weight"
NAMES = {
    "token_embeddings": ("token_embd",),
    "norm": ("output_norm",),
    "attn.qkv_proj": ("attn_qkv",),
    "attn.q_norm": ("attn_q_norm",),
    "attn.k_norm": ("attn_k_norm",),
    "attn.out_proj": ("attn_output",),
    "ffn.proj_1": ("ffn_gate", "ffn_up"),
    "ffn.proj_2": ("ffn_down",),
    "attn_norm": ("attn_norm",),
    "ffn_norm": ("ffn_norm",),
}
"""CoreNet's names without layer and `.weight`, and the tensors that their rows are."""

PLAIN: dict[int, Any] = {0: np.float32, 1: np.float16, 30: ml_dtypes.bfloat16}
"""ggml's numbers of the types that are read as they are."""
NUMBER = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}
FILE_TYPE = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
Q8_0_BLOCK = 32


@contextmanager
def open_gguf(file: Path) -> Iterator[StoredWeights]:
    """Give the OpenELM in a file, with the tokenizer made anew from its list of tokens.

    float32, bfloat16 and float16 are given as they are, quantised tensors as the float32 that they
    stand for. Raises UserError for a damaged file, for other architectures, and for each tensor
    missing, unexpected or misshapen.
    """
    header = read_header(file)
    tensors = header.tensors
    if EMBEDDING not in tensors:
        raise UserError(f"{file}: {EMBEDDING} is missing; take the complete file of a model.")
    config = config_of(header.metadata, tensors[EMBEDDING].shape[0], str(file))
    if missing := what_llama_cpp_lacks(config):
        raise UserError(
            f"{file}: {CONFIG_KEY} describes a model with {' and '.join(missing)}, which no GGUF "
            "holds; export it again."
        )
    _check(file, config, tensors)
    sizes = {name: _num_bytes(tensor, name, file) for name, tensor in tensors.items()}
    end = max(tensors[name].start + size for name, size in sizes.items())
    if end > header.file_bytes:
        raise damaged(file, f"it has {header.file_bytes} bytes of {end}")

    def read_one(name: str) -> np.ndarray:
        tensor = tensors[name]
        content = np.fromfile(file, np.uint8, sizes[name], offset=tensor.start)
        return _values(content, tensor, f"{file}: {name}")

    parts = {weight.path: (weight, names) for weight, names in _tensor_names(config)}

    def read(path: ParamPath) -> np.ndarray:
        weight, names = parts[path]
        arrays = [read_one(name) for name in names]
        array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return array.T if weight.transpose else array

    yield StoredWeights(
        config=config,
        read=read,
        source=str(file),
        file=file,
        tokenizer=tokenizer_of(header.metadata, str(file)),
    )


def write_gguf(directory: Path, stored: StoredWeights, *, outtype: OutType = "bf16") -> None:
    """Write `model.gguf`, which llama.cpp loads, with tokenizer and metadata, into `directory`.

    The vocabulary must be cut to the tokenizer's (`cut_to_tokenizer`).
    Norms stay float32; where a row is no whole number of q8_0's blocks, the tensor is float16. Says
    on stderr which these are, and which tensors have values that float16 has not. Raises UserError
    for a model or a tokenizer that llama.cpp has not. (`conversion/openelm.py` of llama.cpp.)
    """
    config = stored.config
    if missing := what_llama_cpp_lacks(config):
        raise UserError(
            f"--to gguf: llama.cpp's openelm cannot run a model with {' and '.join(missing)}; "
            "export --to hf --with-code."
        )
    if stored.tokenizer is None:
        raise UserError(
            "--to gguf: the file holds the tokenizer, and there is none; give one with "
            "--tokenizer FILE."
        )
    assert stored.tokenizer.vocab_size == config.vocab_size, "the vocabulary is not cut"
    gguf = _package()
    kinds = {}
    with closing(gguf.GGUFWriter(directory / FILE, ARCHITECTURE)) as writer:
        for weight, names in _tensor_names(stored.config):
            for name in names:
                shape = _shape(weight, names)
                kinds[name] = kind = _kind(name, shape, outtype)
                qtype = gguf.GGMLQuantizationType(NUMBER[kind])
                size = _num_bytes(StoredTensor(qtype.value, shape, 0), name, directory / FILE)
                writer.add_tensor_info(name, shape, np.dtype(np.float32), size, qtype)
        writer.add_size_label(gguf.size_label(*writer.get_total_parameter_count()))
        _add_metadata(writer, stored, outtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for weight, names in _tensor_names(stored.config):
            array = stored.read(weight.path)
            rows = np.split(array.T if weight.transpose else array, len(names))
            for name, part in zip(names, rows, strict=True):
                writer.write_tensor_data(_encode(part, kinds[name], name))


def _add_metadata(writer: Any, stored: StoredWeights, outtype: OutType) -> None:
    config, tokenizer = stored.config, stored.tokenizer
    assert tokenizer is not None
    space_before = puts_space_before(tokenizer)
    shapes = layer_shapes(config)
    writer.add_type("model")
    writer.add_name(stored.name)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.model_dim)
    writer.add_feed_forward_length([shape.ffn_dim for shape in shapes])
    writer.add_head_count([shape.num_query_heads for shape in shapes])
    writer.add_head_count_kv([shape.num_kv_heads for shape in shapes])
    writer.add_rope_freq_base(config.rope_base)
    writer.add_layer_norm_rms_eps(RMS_NORM_EPS)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_file_type(FILE_TYPE[outtype])
    writer.add_quantization_version(2)
    writer.add_string(CONFIG_KEY, config_as_text(config))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece.text.encode() for piece in tokenizer.pieces])
    writer.add_token_scores([piece.score for piece in tokenizer.pieces])
    writer.add_token_types([piece.kind for piece in tokenizer.pieces])
    writer.add_bos_token_id(tokenizer.bos_id)
    writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_unk_token_id(tokenizer.unknown_id)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(space_before)


def _tensor_names(config: ModelConfig) -> Iterator[tuple[NamedWeight, tuple[str, ...]]]:
    """Yield each parameter with the tensors whose rows are its own, in the reference's layout."""
    for weight in named_weights(config, "corenet"):
        name = weight.name.removesuffix(".weight")
        block = ""
        if name.startswith("layers."):
            _, layer, name = name.split(".", 2)
            block = f"blk.{layer}."
        yield weight, tuple(f"{block}{part}.weight" for part in NAMES[name])


def _shape(weight: NamedWeight, names: tuple[str, ...]) -> tuple[int, ...]:
    rows, *rest = weight.reference_shape
    return (rows // len(names), *rest)


def _check(file: Path, config: ModelConfig, tensors: dict[str, StoredTensor]) -> None:
    expected = {
        name: _shape(weight, names) for weight, names in _tensor_names(config) for name in names
    }
    for fault, names in (
        ("is missing", expected.keys() - tensors.keys()),
        ("belongs to no OpenELM of its metadata", tensors.keys() - expected.keys()),
    ):
        if names:
            more = f" ({len(names)} such)" if len(names) > 1 else ""
            raise UserError(f"{file}: {min(names)} {fault}{more}; take the complete file.")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise UserError(
                f"{file}: {name} is {list(tensors[name].shape)}, but its metadata makes it "
                f"{list(shape)}; convert the model again."
            )


def _kind(name: str, shape: tuple[int, ...], outtype: OutType) -> OutType:
    """Return the type of a tensor: what llama.cpp's converter takes."""
    if len(shape) == 1:
        return "f32"
    if outtype == "q8_0" and shape[-1] % Q8_0_BLOCK:
        _warn(f"{name} is written as f16: its rows of {shape[-1]} are no multiple of {Q8_0_BLOCK}.")
        return "f16"
    return outtype


def _encode(array: np.ndarray, kind: OutType, name: str) -> np.ndarray:
    if kind == "f16":
        warn_of_overflow(name, array)
    if kind == "q8_0":
        gguf = _package()
        return gguf.quants.quantize(
            np.ascontiguousarray(array, np.float32), gguf.GGMLQuantizationType.Q8_0
        )
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, PLAIN[NUMBER[kind]]).view(np.uint8)


def _num_bytes(tensor: StoredTensor, name: str, file: Path) -> int:
    if tensor.kind in PLAIN:
        return math.prod(tensor.shape) * np.dtype(PLAIN[tensor.kind]).itemsize
    gguf = _package()
    try:
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.kind)]
    except (KeyError, ValueError):
        raise UserError(
            f"{file}: {name} is of ggml's type {tensor.kind}, which the installed package gguf "
            "does not know; give the model as bf16 or q8_0."
        ) from None
    if tensor.shape[-1] % block:
        raise damaged(file, f"{name} has rows of {tensor.shape[-1]} in blocks of {block}")
    return math.prod(tensor.shape) // block * block_bytes


def _values(content: np.ndarray, tensor: StoredTensor, where: str) -> np.ndarray:
    if tensor.kind in PLAIN:
        return content.view(PLAIN[tensor.kind]).reshape(tensor.shape)
    gguf = _package()
    kind = gguf.GGMLQuantizationType(tensor.kind)
    try:
        rows = content.reshape(math.prod(tensor.shape[:-1]), -1)
        return gguf.quants.dequantize(rows, kind).reshape(tensor.shape)
    except NotImplementedError:
        raise UserError(
            f"{where} is stored as {kind.name}, which the package gguf cannot read; give the "
            "model as bf16 or q8_0."
        ) from None


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise UserError("GGUF needs the package gguf: pip install 'openelm_jax[gguf]'.") from None
    return gguf

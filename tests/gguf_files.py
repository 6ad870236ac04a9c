"""GGUF files for tests: written from parameters in memory, read, and rewritten otherwise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from corpora import tokenizer
from small_models import random_params

from openelm_jax.config import ModelConfig
from openelm_jax.model.decoder import Params
from openelm_jax.tokenizer import Tokenizer
from openelm_jax.weights.gguf_file import open_gguf, write_gguf
from openelm_jax.weights.stored import in_memory, read_params
from openelm_jax.weights.vocabulary import cut_to_tokenizer

gguf = pytest.importorskip("gguf")
PIECES = 380
"""Of `corpora.tokenizer()`."""


def write(
    folder: Path,
    config: ModelConfig,
    params: Params | None = None,
    outtype: str = "f32",
    tok: Tokenizer | None = None,
) -> Path:
    """Write a model, by default of random weights, and return its file."""
    folder.mkdir(exist_ok=True)
    params = random_params(config) if params is None else params
    stored = cut_to_tokenizer(in_memory(config, params, tok or tokenizer()))
    write_gguf(folder, stored, outtype=outtype)
    return folder / "model.gguf"


def read(file: Path) -> tuple[ModelConfig, Params, Tokenizer | None]:
    """Return configuration, parameters as they are stored, and tokenizer."""
    with open_gguf(file) as stored:
        return stored.config, read_params(stored, dtype=None), stored.tokenizer


def fields_of(file: Path) -> dict:
    return {key: field.contents() for key, field in gguf.GGUFReader(file).fields.items()}


def rewrite(file: Path, changes=None, tensors=None) -> Path:
    """Return a copy with other metadata and other tensors; None leaves a key or a tensor out."""
    reader = gguf.GGUFReader(file)
    changes, tensors = changes or {}, tensors or {}
    writer = gguf.GGUFWriter(
        file.with_name("changed.gguf"), changes.pop("general.architecture", "openelm")
    )
    for key, field in reader.fields.items():
        value = changes.pop(key, field.contents())
        if key.startswith("GGUF.") or key == "general.architecture" or value is None:
            continue
        sub_type = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(key, value, field.types[0], sub_type)
    for key, value in changes.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        if tensor.name not in tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    for name, array in tensors.items():
        if array is not None:
            array, kind = array if isinstance(array, tuple) else (array, None)
            writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.with_name("changed.gguf")

"""Hugging Face directories of whole models, for tests that have their parameters in memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from openelm_jax.config import ModelConfig
from openelm_jax.model.decoder import Params
from openelm_jax.tokenizer import Tokenizer
from openelm_jax.weights import huggingface
from openelm_jax.weights.new_directory import new_directory
from openelm_jax.weights.stored import in_memory, read_params
from openelm_jax.weights.vocabulary import cut_to_tokenizer, resize_vocabulary


def read_huggingface(directory: Path, vocab_size: int | None = None) -> tuple[ModelConfig, Params]:
    """Return configuration and float32 parameters, with `vocab_size` rows if it is given."""
    with huggingface.open_huggingface(directory) as stored:
        stored = resize_vocabulary(stored, vocab_size or stored.config.vocab_size)
        return stored.config, read_params(stored)


def write_huggingface(
    directory: Path,
    config: ModelConfig,
    params: Params,
    *,
    dtype: str = "float32",
    tokenizer: Tokenizer | None = None,
    **options,
) -> None:
    """Write a directory with as many rows of vocabulary as the tokenizer has pieces."""
    stored = cut_to_tokenizer(in_memory(config, params, tokenizer))
    with new_directory(directory) as partial:
        huggingface.write_huggingface(partial, stored, dtype=dtype, **options)


def with_rows(config: ModelConfig, params: Params, rows: int) -> tuple[ModelConfig, Params]:
    """Return the model with so many rows of vocabulary."""
    stored = resize_vocabulary(in_memory(config, params), rows)
    return dataclasses.replace(config, vocab_size=rows), read_params(stored)

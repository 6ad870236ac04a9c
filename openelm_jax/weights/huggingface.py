"""Apple's Hugging Face layout, which mlx-lm shares: directories of config.json and safetensors.

bfloat16 goes through ml_dtypes, bit for bit, without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.tokenizer import Tokenizer
from openelm_jax.weights.huggingface_config import (
    ExportDType,
    config_from_fields,
    fields_of_config,
)
from openelm_jax.weights.names import Params, from_reference, to_reference
from openelm_jax.weights.new_directory import new_directory
from openelm_jax.weights.vocabulary import resize_vocabulary

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
NUMPY_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
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

"""Safetensors files, one or several with an index: read and written a tensor at a time.

The writer is our own, since the library's wants all tensors of a file in memory at once. A file is
eight bytes with the length of the header, the header as JSON (each tensor's type, shape, and where
its bytes begin and end), and the bytes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import safetensors

from openelm_jax.errors import UserError
from openelm_jax.weights.json_files import read_json, write_json

CODES: dict[str, Any] = {
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "U32": np.uint32,
}
"""The format's names of the types that we write."""

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
FLOAT16_MOST = 65504.0
FLOAT16_INFINITE = 65520.0
"""The least number that rounds to infinity in float16; between the two they round down."""


@dataclass(frozen=True)
class TensorKind:
    """Type, by its code in the format, and shape of a tensor that will be written."""

    code: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(CODES[self.code]).itemsize


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file, its code and its shape; read with `read()`."""

    file: Path
    name: str
    code: str
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        # The file is mapped anew: a mapping that stays keeps in memory all that was ever read.
        with safetensors.safe_open(self.file, "np") as opened:
            return opened.get_tensor(self.name)


def find_tensors(directory: Path) -> dict[str, FileTensor]:
    """Return every tensor in the directory's weight files, by name.

    With an index each file must hold what the index has there, and nothing else. Raises UserError
    for a file that is missing, damaged or cut short.
    """
    if not (directory / INDEX).is_file():
        return tensors_in(directory / WEIGHTS)
    tensors: dict[str, FileTensor] = {}
    for file_name, names in _names_by_file(directory / INDEX).items():
        found = tensors_in(directory / file_name)
        if differing := sorted(names ^ found.keys()):
            there = "lacks" if differing[0] in names else "holds"
            raise UserError(
                f"{directory / file_name} {there} {differing[0]}, but {INDEX} says otherwise; take "
                "the files of one model and their index."
            )
        tensors |= found
    return tensors


def _names_by_file(index: Path) -> dict[str, set[str]]:
    """Return the tensors of each file that an index lists: files beside it, and nowhere else."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index}: weight_map is missing; take the original file.")
    names_by_file: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
            raise UserError(
                f"{index}: weight_map has {name} in {file!r}, which is no name of a file beside "
                "it; take the original file."
            )
        names_by_file.setdefault(file, set()).add(name)
    return names_by_file


def tensors_in(file: Path) -> dict[str, FileTensor]:
    """Return every tensor in a file, by name; raises UserError for one missing or damaged."""
    if not file.is_file():
        raise UserError(f"{file} is missing; fetch it, or export again.")
    try:
        with safetensors.safe_open(file, "np") as opened:
            return {
                name: FileTensor(file, name, found.get_dtype(), tuple(found.get_shape()))
                for name in opened.keys()  # noqa: SIM118
                for found in [opened.get_slice(name)]
            }
    except safetensors.SafetensorError as fault:
        raise UserError(f"{file} is damaged or cut short ({fault}); fetch it again.") from None


def write_tensors(
    directory: Path,
    kinds: Mapping[str, TensorKind],
    tensors: Iterable[tuple[str, np.ndarray]],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `tensors`, which come in the order of `kinds`, into one file or several with an index.

    Each is cast to its kind's type; of one that float16 cannot hold a warning says so.
    """
    shards = _shards(kinds, max_shard_bytes)
    files = [
        WEIGHTS if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        for i in range(len(shards))
    ]
    coming = iter(tensors)
    for file, names in zip(files, shards, strict=True):
        with (directory / file).open("wb") as out:
            _write_header(out, {name: kinds[name] for name in names})
            for name in names:
                given, array = next(coming)
                assert given == name, f"{given} comes where {name} should"
                assert array.shape == kinds[name].shape, f"{name}: {array.shape}"
                if kinds[name].code == "F16":
                    warn_of_overflow(name, array)
                out.write(as_bytes(array, CODES[kinds[name].code]))
    assert next(coming, None) is None, "more tensors than kinds"
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(kind.num_bytes for kind in kinds.values())},
            "weight_map": {
                name: file for file, names in zip(files, shards, strict=True) for name in names
            },
        }
        write_json(directory / INDEX, index)


def warn_of_overflow(name: str, array: np.ndarray) -> None:
    """Say on stderr that float16 makes infinities of a tensor's largest values, if it does."""
    sizes = np.abs(array.astype(np.float32, copy=False))
    most = float(sizes.max(initial=0, where=np.isfinite(sizes)))
    if most >= FLOAT16_INFINITE:
        print(
            f"warning: {name} reaches {most:g}, which float16 cannot hold (at most "
            f"{FLOAT16_MOST:g}): its largest values become infinite; take bfloat16, the default.",
            file=sys.stderr,
        )


def as_bytes(array: np.ndarray, dtype: Any) -> memoryview:
    """Return the bytes of an array in a type, row after row, without a copy where it is so."""
    with np.errstate(over="ignore"):  # `warn_of_overflow` says it, with the tensor's name
        return np.ascontiguousarray(array, dtype=dtype).view(np.uint8).reshape(-1).data


def _shards(kinds: Mapping[str, TensorKind], max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name, kind in kinds.items():
        if shards[-1] and shard_bytes + kind.num_bytes > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += kind.num_bytes
    return shards


def _write_header(out: BinaryIO, kinds: Mapping[str, TensorKind]) -> None:
    # Without the metadata some loaders refuse the file.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, kind in kinds.items():
        end = position + kind.num_bytes
        header[name] = {
            "dtype": kind.code,
            "shape": list(kind.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the bytes begin at a multiple of eight
    out.write(len(text).to_bytes(8, "little"))
    out.write(text)

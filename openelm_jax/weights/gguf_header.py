"""What stands before the weights of a GGUF file: metadata, and where which tensor lies.

Read here, not by the package `gguf`: its reader makes several arrays of every token, and takes
bytes behind the end of a file that is cut short for empty ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openelm_jax.errors import UserError

VERSIONS = (2, 3)
SCALARS = dict(
    enumerate(["u1", "i1", "u2", "i2", "u4", "i4", "f4", "?", "str", "array", "u8", "i8", "f8"])
)
"""Types of metadata by their numbers in the file."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's type, by its number in ggml, its shape, rows first, and its first byte."""

    kind: int
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, eq=False)
class Header:
    """Metadata by key, tensors by name, and the bytes of the whole file."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    file_bytes: int


def read_header(file: Path) -> Header:
    """Return the header of a file; raises UserError for one that is damaged or no GGUF."""
    if file.stat().st_size == 0:
        raise UserError(f"{file} is empty; fetch it again.")
    content = np.memmap(file, np.uint8, mode="r")
    if content[:4].tobytes() != b"GGUF":
        raise UserError(f"{file} is no GGUF file; give one that llama.cpp loads.")
    try:
        return _parse(content)
    except (ValueError, KeyError) as fault:
        raise damaged(file, fault) from None


def damaged(file: Path, fault: object) -> UserError:
    """Return the error of a file that is not whole."""
    return UserError(f"{file} is damaged or cut short ({fault}); fetch it again.")


def _parse(content: np.ndarray) -> Header:
    position = 4

    def take(length: int) -> bytes:
        nonlocal position
        if length > content.size - position:
            raise ValueError(f"it ends at byte {content.size}, in the middle of its header")
        position += length
        return content[position - length : position].tobytes()

    def numbers(kind: str, count: int) -> list[Any]:
        dtype = np.dtype(kind).newbyteorder("<")
        return np.frombuffer(take(count * dtype.itemsize), dtype).tolist()

    def number(kind: str) -> int:
        return numbers(kind, 1)[0]

    def text() -> str:
        return take(number("u8")).decode()

    def values(kind: str, count: int) -> list[Any]:
        one: dict[str, Callable[[], Any]] = {"str": text, "array": array}
        return [one[kind]() for _ in range(count)] if kind in one else numbers(kind, count)

    def array() -> list[Any]:
        kind = SCALARS[number("u4")]
        return values(kind, number("u8"))

    if (version := number("u4")) not in VERSIONS:
        raise ValueError(f"its version is {version}, known are 2 and 3")
    num_tensors, num_keys = numbers("u8", 2)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = text()
        (metadata[key],) = values(SCALARS[number("u4")], 1)
    found = []
    for _ in range(num_tensors):
        name = text()
        shape = tuple(reversed(numbers("u8", number("u4"))))
        found.append((name, shape, number("u4"), number("u8")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its alignment is {alignment}")
    start = -(-position // alignment) * alignment
    if not all(shape for _, shape, _, _ in found):
        raise ValueError("it has a tensor without a shape")
    tensors = {name: StoredTensor(kind, shape, start + at) for name, shape, kind, at in found}
    if len(tensors) < num_tensors:
        raise ValueError("it has two tensors of a name")
    return Header(metadata, tensors, content.size)

"""What a model has answered, kept on disk by the harness, so that it is not asked again."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from openelm_jax.generation.language_model import LanguageModel

SCORING = "1"
"""Changes when the same model gives other answers."""
LARGEST_SHARE = 1 << 24
"""Bytes that one process sends the others at a time."""


def cache_file(folder: Path, model: LanguageModel, lm: Any) -> Path:
    """Return where in `folder` answers of this model are kept, whatever its weights are called.

    The name follows from weights, compute type, tokenizer, window and <s>.
    """
    how = (SCORING, model.config, model.dtype, lm.tokenizer_name, lm.max_length, lm.add_bos)
    digest = hashlib.sha256(" ".join(map(str, how)).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    return folder / digest.hexdigest()[:24]


@contextmanager
def shared(cache: Path | None) -> Iterator[Path | None]:
    """Give the file of the cache, for other processes a copy of the first one's.

    Processes compute together, so none may know an answer that another lacks.
    """
    if cache is None or jax.process_count() == 1:
        yield cache
        return
    from jax.experimental import multihost_utils

    first = jax.process_index() == 0
    file = _database(cache)
    content = file.read_bytes() if first and file.exists() else b""
    size = int(multihost_utils.broadcast_one_to_all(np.int64(len(content))))
    parts = []
    for start in range(0, size, LARGEST_SHARE):
        length = min(LARGEST_SHARE, size - start)
        part = content[start : start + length] if first else bytes(length)
        sent = multihost_utils.broadcast_one_to_all(np.frombuffer(part, np.uint8))
        parts.append(np.asarray(sent).tobytes())
    if first:
        yield cache
        return
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder, cache.name)
        if size:
            _database(own).write_bytes(b"".join(parts))
        yield own


def _database(cache: Path) -> Path:
    """Return what the harness calls the file of `use_cache`."""
    return cache.with_name(f"{cache.name}_rank0.db")

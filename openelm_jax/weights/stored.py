"""A model in files, read a parameter at a time: what every format gives and takes.

A model of three billion parameters passes through a few hundred megabytes of memory this way.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from openelm_jax.config import ModelConfig
from openelm_jax.tokenizer import Tokenizer
from openelm_jax.weights.names import ParamPath, Params, at, named_weights, put
from openelm_jax.weights.run_record import RunRecord


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredWeights:
    """A model whose parameters are read when they are asked for.

    `read` takes one of our paths and returns the array in our shape and as it is stored: float32,
    bfloat16 or float16. While a reader's `with` block is open it may be called in any order.
    """

    config: ModelConfig
    read: Callable[[ParamPath], np.ndarray]
    source: str
    """Where they are, as it was asked for: `runs/tiny@500`, `hf://apple/OpenELM-270M`."""
    tokenizer: Tokenizer | None = None
    file: Path | None = None
    """The file that holds them, if it is a single one."""
    saved: tuple[Path, int] | None = None
    """The run directory and the step whose weights they are, if they are a run's."""
    record: RunRecord | None = None
    """How they were trained, if that is known."""

    @property
    def name(self) -> str:
        """The last part of the source, for titles: `tiny@500`, `OpenELM-270M`."""
        if self.source.startswith("hf://"):
            return self.source.partition("@")[0].rpartition("/")[2]
        return os.path.basename(os.path.abspath(self.source))


def in_memory(
    config: ModelConfig,
    params: Params,
    tokenizer: Tokenizer | None = None,
    source: str = "weights in memory",
) -> StoredWeights:
    """Return parameters that are at hand, as the writers take them."""
    return StoredWeights(
        config=config,
        read=lambda path: np.asarray(at(params, path)),
        source=source,
        tokenizer=tokenizer,
    )


def read_params(stored: StoredWeights, dtype: type | np.dtype | None = np.float32) -> Params:
    """Return all parameters as a tree in one type; None keeps each as it is stored."""
    params: Params = {}
    for weight in named_weights(stored.config):
        put(params, weight.path, np.ascontiguousarray(stored.read(weight.path), dtype=dtype))
    return params

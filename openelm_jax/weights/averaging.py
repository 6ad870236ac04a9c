"""The mean of several models of the same shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from openelm_jax.errors import UserError
from openelm_jax.weights.names import ParamPath
from openelm_jax.weights.stored import StoredWeights


def average(models: Sequence[StoredWeights]) -> StoredWeights:
    """Return the mean of models, with the configuration and tokenizer of the last.

    A parameter is added up in float64 when it is read, the last model's first, divided, and
    rounded once, to the type that it is stored in. (`average_ckpts` in CoreNet's
    checkpoint_utils.py.) Reading raises UserError for a parameter that differs in shape or type.
    """
    last = models[-1]

    def read(path: ParamPath) -> np.ndarray:
        example = last.read(path)
        total = example.astype(np.float64)
        for model in models[:-1]:
            array = model.read(path)
            if (array.shape, array.dtype) != (example.shape, example.dtype):
                raise UserError(
                    f"{'.'.join(path)} is {_kind(array)} in {model.source} and {_kind(example)} "
                    f"in {last.source}: only models of one shape and type have a mean."
                )
            total += array
        total /= len(models)
        return total.astype(example.dtype)

    return dataclasses.replace(last, read=read, saved=None, record=None)


def _kind(array: np.ndarray) -> str:
    return f"{array.dtype} {list(array.shape)}"

"""The model of a training run as it is between two steps."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils

from openelm_jax.config import DType, ModelConfig
from openelm_jax.generation.language_model import LanguageModel, read_model
from openelm_jax.generation.placement import decoding_mesh
from openelm_jax.model.decoder import Params
from openelm_jax.tokenizer import Tokenizer
from openelm_jax.weights.names import ParamPath, at
from openelm_jax.weights.stored import StoredWeights


def snapshot(
    config: ModelConfig, params: Params, tokenizer: Tokenizer, dtype: DType
) -> LanguageModel:
    """Return the model of parameters that may be divided over the devices of several processes.

    Each device of this process gets all of them, in `dtype`, a parameter at a time. All processes
    must call it.
    """

    def read(path: ParamPath) -> np.ndarray:
        leaf = at(params, path)
        if leaf.is_fully_addressable:
            return np.asarray(leaf)
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))

    stored = StoredWeights(config=config, read=read, source="this run", tokenizer=tokenizer)
    return read_model(stored, dtype, mesh=decoding_mesh(jax.local_device_count(), 1))

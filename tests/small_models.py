"""A small model for the tests that need one, and random weights with norms away from 1."""

from __future__ import annotations

import jax
import numpy as np

from openelm_jax.config import ModelConfig
from openelm_jax.model.decoder import Params, init_params


def tiny(**changes) -> ModelConfig:
    """Return three layers of width 64 with `changes`."""
    fields = {
        "num_layers": 3,
        "model_dim": 64,
        "head_dim": 16,
        "vocab_size": 40,
        "num_gqa_groups": 2,
        "ffn_dim_divisor": 16,
        "context_length": 64,
    }
    return ModelConfig(**(fields | changes))


def random_params(config: ModelConfig, std: float = 0.2, seed: int = 0) -> Params:
    """Return float32 weights of standard deviation `std`: matrices around 0, vectors around 1."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: init_params(config, 0))
    return jax.tree.map(
        lambda leaf: rng.normal(leaf.ndim == 1, std, leaf.shape).astype(np.float32), shapes
    )

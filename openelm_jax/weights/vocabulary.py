"""The number of rows of embedding and head: padded for training, cut to the tokenizer elsewhere.

Legend: V vocab, D model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from openelm_jax.config import ModelConfig

Params = dict[str, Any]


def resize_vocabulary(
    config: ModelConfig, params: Params, vocab_size: int
) -> tuple[ModelConfig, Params]:
    """Return the configuration and parameters with `vocab_size` rows of embedding and head.

    Rows are cut from the end, where no token has its id. A new row is the mean of the given ones:
    its logit is then the mean of their logits, and since exp is convex its probability is at most
    the mean probability of a given row. (A row of zeros would have the logit 0 whatever the
    others have, and could take any share of the probability.)
    """
    if vocab_size == config.vocab_size:
        return config, params
    tables = ["embedding"] if config.tie_embeddings else ["embedding", "head"]
    resized = {name: _resize(np.asarray(params[name]), vocab_size) for name in tables}
    return dataclasses.replace(config, vocab_size=vocab_size), {**params, **resized}


def _resize(table_VD: np.ndarray, vocab_size: int) -> np.ndarray:
    extra = vocab_size - table_VD.shape[0]
    if extra <= 0:
        return table_VD[:vocab_size]
    mean_D = table_VD.mean(axis=0, dtype=np.float64).astype(table_VD.dtype)
    return np.concatenate([table_VD, np.broadcast_to(mean_D, (extra, mean_D.size))])

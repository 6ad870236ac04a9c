"""The number of rows of embedding and head: padded for training, cut to the tokenizer elsewhere.

Legend: V vocab, D model.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from openelm_jax.errors import UserError
from openelm_jax.weights.names import ParamPath
from openelm_jax.weights.stored import StoredWeights

TABLES = (("embedding",), ("head",))


def resize_vocabulary(stored: StoredWeights, vocab_size: int) -> StoredWeights:
    """Return the model with `vocab_size` rows of embedding and head.

    Rows are cut from the end, where no token has its id. A new row is the mean of the given ones:
    its logit is then the mean of their logits, and since exp is convex its probability is at most
    the mean probability of a given row. (A row of zeros would have the logit 0 whatever the
    others have, and could take any share of the probability.)
    """
    if vocab_size == stored.config.vocab_size:
        return stored

    def read(path: ParamPath) -> np.ndarray:
        array = stored.read(path)
        return _resize(array, vocab_size) if path in TABLES else array

    config = dataclasses.replace(stored.config, vocab_size=vocab_size)
    return dataclasses.replace(stored, config=config, read=read)


def cut_to_tokenizer(stored: StoredWeights) -> StoredWeights:
    """Return the model with as many rows as its tokenizer has pieces; all of them without one.

    Raises UserError for a tokenizer larger than the model.
    """
    if stored.tokenizer is None:
        return stored
    pieces = stored.tokenizer.vocab_size
    if pieces > stored.config.vocab_size:
        raise UserError(
            f"the tokenizer has {pieces} pieces and the model only {stored.config.vocab_size} "
            "rows: give the tokenizer that the model was trained with."
        )
    return resize_vocabulary(stored, pieces)


def _resize(table_VD: np.ndarray, vocab_size: int) -> np.ndarray:
    extra = vocab_size - table_VD.shape[0]
    if extra <= 0:
        return table_VD[:vocab_size]
    mean_D = table_VD.mean(axis=0, dtype=np.float64).astype(table_VD.dtype)
    return np.concatenate([table_VD, np.broadcast_to(mean_D, (extra, mean_D.size))])

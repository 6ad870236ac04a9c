"""What a text costs a model: mean cross-entropy a token.

Legend: T tokens predicted in a row, V vocab.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from openelm_jax.errors import UserError
from openelm_jax.generation.forward import apply
from openelm_jax.model.decoder import Decoder, Params
from openelm_jax.weights.stored import StoredWeights, read_params

MOST_TOKENS = 16_384


def text_tokens(stored: StoredWeights, text: Path) -> np.ndarray:
    """Return <s> and the first `MOST_TOKENS` tokens of a text file, by the model's tokenizer.

    Raises UserError without a tokenizer, and for a file without text.
    """
    if stored.tokenizer is None:
        raise UserError(
            f"{stored.source} has no tokenizer to read {text} with; give one with --tokenizer."
        )
    try:
        ids = stored.tokenizer.encode(text.read_text(encoding="utf-8"))[:MOST_TOKENS]
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"{text}: {fault}; give a text file in UTF-8.") from None
    if len(ids) == 0:
        raise UserError(f"{text} holds no text; give a file that does.")
    return np.concatenate([[stored.tokenizer.bos_id], ids]).astype(np.int32)


def text_loss(stored: StoredWeights, tokens: np.ndarray) -> float:
    """Return nats a token after the first, computed in float32.

    The text is one document of rows of the context's length, each predicted from its own beginning.
    """
    config = stored.config
    decoder, params = Decoder(config, dtype="float32"), read_params(stored)

    @jax.jit
    def row_loss(params: Params, tokens_1T: jax.Array, targets_1T: jax.Array) -> jax.Array:
        logits_1TV = apply(decoder, params, "__call__", tokens_1T)
        log_probability_1TV = jax.nn.log_softmax(logits_1TV)
        chosen_1T = jnp.take_along_axis(log_probability_1TV, targets_1T[..., None], -1)[..., 0]
        return -jnp.sum(chosen_1T * (targets_1T >= 0))

    length = config.context_length
    total = 0.0
    for start in range(0, len(tokens) - 1, length):
        targets = tokens[start + 1 : start + 1 + length]
        missing = (0, length - len(targets))
        row = np.pad(tokens[start : start + len(targets)], missing)
        counted = np.pad(targets, missing, constant_values=-1)
        total += float(row_loss(params, row[None], counted[None]))
    return total / (len(tokens) - 1)

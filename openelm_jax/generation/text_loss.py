"""What a text costs a model: each of its tokens scored once, in windows of the context length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from openelm_jax.errors import UserError
from openelm_jax.generation.forward import decoding_params
from openelm_jax.generation.scoring import Request, Scored, score
from openelm_jax.tokenizer import Tokenizer
from openelm_jax.weights.stored import StoredWeights, read_params

MOST_TOKENS = 16_384


def windows(tokens: np.ndarray, length: int, stride: int | None = None) -> list[Request]:
    """Return requests that score each token but the first once, reading `length` tokens at most.

    Without `stride` windows lie side by side, and each is predicted from its own first token. With
    it each window but the first scores `stride` tokens, after length - stride others that the
    window before had.
    """
    ids, stride = tokens.tolist(), stride or length
    stops = [*range(min(length + 1, len(ids)), len(ids), stride), len(ids)]
    requests, scored = [], 1
    for stop in stops:
        start = max(0, stop - 1 - length) if stride < length else scored - 1
        requests.append(Request(ids[start:scored], ids[scored:stop]))
        scored = stop
    return requests


def nats(scores: Sequence[Scored]) -> float:
    """Return what all of them cost together."""
    return -sum(scored.log_probability for scored in scores)


def read_text(path: Path) -> str:
    """Return the text of a file; UserError if it is not there, not UTF-8 or empty."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"{path}: {fault}; give a text file in UTF-8.") from None
    if not text.strip():
        raise UserError(f"{path} holds no text; give a file that does.")
    return text


def with_bos(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Return <s> and the tokens of a text, int32 [T]."""
    return np.concatenate([[tokenizer.bos_id], tokenizer.encode(text)]).astype(np.int32)


def text_tokens(stored: StoredWeights, text: Path) -> np.ndarray:
    """Return <s> and the first `MOST_TOKENS` tokens of a text file, by the model's tokenizer.

    Raises UserError without a tokenizer, and for a file without text.
    """
    if stored.tokenizer is None:
        raise UserError(
            f"{stored.source} has no tokenizer to read {text} with; give one with --tokenizer."
        )
    return with_bos(stored.tokenizer, read_text(text))[: MOST_TOKENS + 1]


def text_loss(stored: StoredWeights, tokens: np.ndarray) -> float:
    """Return nats a token after the first, computed in float32, windows side by side."""
    config, params = stored.config, decoding_params(read_params(stored), "float32")
    requests = windows(tokens, config.context_length)
    scores = score(config, params, "float32", requests, vocab_size=config.vocab_size)
    return nats(scores) / (len(tokens) - 1)

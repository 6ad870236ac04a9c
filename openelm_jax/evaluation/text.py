"""What held-out texts cost a model: nats a token, perplexity, bits per byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openelm_jax.errors import UserError
from openelm_jax.generation.language_model import LanguageModel
from openelm_jax.generation.text_loss import nats, read_text, windows, with_bos


@dataclass(frozen=True)
class TextCost:
    """A text file, the nats that it costs, its tokens, and its bytes in UTF-8."""

    text: str
    nats: float
    tokens: int
    bytes: int

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_token)

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers, unlike the other two."""
        return self.nats / math.log(2) / self.bytes


def text_costs(
    model: LanguageModel, files: Sequence[Path], stride: int | None = None
) -> list[TextCost]:
    """Return the cost of each file, one document after <s>, in windows of the context length.

    `stride` as for `windows`. Raises UserError for a file without text, before anything is scored,
    for a model without a tokenizer and for a stride longer than the window.
    """
    length = model.config.context_length
    if stride is not None and not 1 <= stride <= length:
        raise UserError(f"--stride is {stride}: give 1 to {length}, the tokens of a window.")
    if model.tokenizer is None:
        raise UserError(
            "a text needs a tokenizer and these weights come without one: "
            "give a SentencePiece file with --tokenizer FILE."
        )
    texts = [read_text(file) for file in files]
    costs = []
    for file, text in zip(files, texts, strict=True):
        tokens = with_bos(model.tokenizer, text)
        scores = model.score(windows(tokens, length, stride))
        costs.append(TextCost(str(file), nats(scores), len(tokens) - 1, len(text.encode())))
    return costs


def text_table(costs: Sequence[TextCost]) -> str:
    """Return the costs as a Markdown table."""
    lines = [
        "| text | tokens | bytes | nats a token | perplexity | bits per byte |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for cost in costs:
        figures = f"{cost.nats_per_token:.4f} | {cost.perplexity:.3f} | {cost.bits_per_byte:.4f}"
        lines.append(f"| {cost.text} | {cost.tokens:,} | {cost.bytes:,} | {figures} |")
    return "\n".join(lines)


def text_json(model: str, stride: int | None, costs: Sequence[TextCost]) -> dict[str, Any]:
    """Return the same for programs."""
    return {
        "model": model,
        "stride": stride,
        "texts": [
            {
                "text": cost.text,
                "nats": cost.nats,
                "tokens": cost.tokens,
                "bytes": cost.bytes,
                "nats_per_token": cost.nats_per_token,
                "perplexity": cost.perplexity,
                "bits_per_byte": cost.bits_per_byte,
            }
            for cost in costs
        ],
    }

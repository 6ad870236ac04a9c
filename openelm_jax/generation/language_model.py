"""A loaded model with its tokenizer: text in, text out.

Legend: B batch, T time, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import jax
import numpy as np
from jax.sharding import Mesh

from openelm_jax.config import DType, ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.generation import engine
from openelm_jax.generation.forward import apply, decoding_params, placed
from openelm_jax.generation.placement import decoding_mesh, divided, mesh_of
from openelm_jax.generation.sampling import Sampling
from openelm_jax.generation.scoring import Report, Request, Scored, score
from openelm_jax.generation.speculative import (
    Draft,
    PromptLookup,
    Speculation,
    Tally,
    proposal_count,
)
from openelm_jax.model.decoder import Decoder, Params
from openelm_jax.model.matrix import Bits
from openelm_jax.tokenizer import Tokenizer
from openelm_jax.weights.load import open_weights
from openelm_jax.weights.names import named_weights, put
from openelm_jax.weights.stored import StoredWeights


def load(
    where: str | Path,
    tokenizer: str | Path | None = None,
    dtype: DType | None = None,
    exp: str | None = None,
    quantize: Bits | None = None,
    replica: int = 1,
    tensor: int = 1,
    adapter: str | Path | None = None,
) -> LanguageModel:
    """Return the model in `where`: whatever `--from` accepts.

    `tokenizer` is a SentencePiece file that supplies or overrides the model's own; `exp` names the
    experiment that a CoreNet file is of. Computes in `dtype`, by default float32 on a CPU and
    bfloat16 on accelerators; matrices are held in it, or in `quantize` bits. Reads a parameter at a
    time, so that the host never holds the whole model in float32. On several devices of this
    process `replica` divides the rows of a batch, and `tensor` each matrix. `adapter` is a
    directory of peft's whose adapters are merged into the weights. Raises UserError for a type or a
    number of bits that there is not.
    """
    if dtype not in (None, *get_args(DType)):
        raise UserError(f"dtype is {dtype}: it must be one of {', '.join(get_args(DType))}.")
    if quantize not in (None, *get_args(Bits)):
        raise UserError(f"quantize is {quantize}: it must be 8 or 4, bits of a weight.")
    mesh = decoding_mesh(replica, tensor)
    with open_weights(where, tokenizer, exp, adapter) as stored:
        return read_model(stored, dtype, quantize, mesh)


def read_model(
    stored: StoredWeights,
    dtype: DType | None = None,
    quantize: Bits | None = None,
    mesh: Mesh | None = None,
) -> LanguageModel:
    """Return the model of opened weights, on the devices of `mesh`; otherwise as `load` does it.

    Raises UserError for a tensor axis that does not divide the model's width.
    """
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    tensor, width = 1 if mesh is None else mesh.shape["tensor"], stored.config.model_dim
    if width % tensor:
        raise UserError(
            f"mesh tensor {tensor} does not divide the width {width} of {stored.source}, along "
            "which matrices are divided: take a power of two, or divide rows with replica."
        )
    params: Params = {}
    for weight in named_weights(stored.config):
        matrix = placed(weight.path, stored.read(weight.path), dtype, quantize)
        put(params, weight.path, divided(weight.path, matrix, mesh) if mesh else matrix)
    return LanguageModel(stored.config, params, stored.tokenizer, dtype)


def language_model(
    config: ModelConfig,
    params: Params,
    tokenizer: Tokenizer | None,
    dtype: DType,
    quantize: Bits | None = None,
) -> LanguageModel:
    """Return the model of parameters that are at hand, of any type; arguments as for `load`."""
    return LanguageModel(config, decoding_params(params, dtype, quantize), tokenizer, dtype)


Prompt = str | Sequence[int]
"""A text, or token ids with <s>, as the chat template makes them."""


@dataclass(frozen=True)
class Completion:
    """A prompt as text, and the text and tokens that continue it, until </s> (`stop`) or the most
    tokens (`length`)."""

    prompt: str
    text: str
    tokens: tuple[int, ...]
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A model ready to use, and a tokenizer or None."""

    config: ModelConfig
    params: Params
    """As `decoding_params` makes them."""
    tokenizer: Tokenizer | None
    dtype: DType

    def logits(self, tokens_BT: np.ndarray) -> np.ndarray:
        """Return the float32 logits [B, T, V] of the token after each of `tokens_BT`.

        Raises UserError for what are no rows of the model's ids.
        """
        tokens_BT = np.asarray(tokens_BT, np.int32)
        known = self.config.vocab_size
        if (
            tokens_BT.ndim != 2
            or not tokens_BT.size
            or not 0 <= tokens_BT.min() <= tokens_BT.max() < known
        ):
            raise UserError(
                f"tokens are of the shape {tokens_BT.shape}: give rows of equally many ids, each "
                f"from 0 to {known - 1:,}."
            )
        return np.asarray(_logits(self.config, self.dtype, self.params, tokens_BT))

    def score(
        self,
        requests: Sequence[Request],
        *,
        batch_tokens: int | None = None,
        report: Report | None = None,
    ) -> list[Scored]:
        """Return how likely each continuation is after its context; see `scoring.score`.

        Ids that the tokenizer does not have count for nothing.
        """
        known = self.config.vocab_size if self.tokenizer is None else self.tokenizer.vocab_size
        return score(
            self.config,
            self.params,
            self.dtype,
            requests,
            vocab_size=known,
            batch_tokens=batch_tokens,
            report=report,
        )

    def generate(
        self,
        prompts: Sequence[str],
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        repetition_penalty: float = 1.0,
        prompt_lookup: int | None = None,
        draft: LanguageModel | None = None,
        draft_tokens: int | None = None,
    ) -> list[str]:
        """Return the text that continues each prompt; temperature 0 is greedy.

        `prompt_lookup` tokens from the text itself, or `draft_tokens` of the model `draft`, are
        proposed at a time: a matter of speed, not of the text.
        """
        sampling = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            repetition_penalty=repetition_penalty,
        )
        speculation = self.speculation(prompt_lookup, draft, draft_tokens)
        completions = self.complete(prompts, max_tokens, sampling, speculation)
        return [completion.text for completion in completions]

    def speculation(
        self,
        prompt_lookup: int | None = None,
        draft: LanguageModel | None = None,
        draft_tokens: int | None = None,
    ) -> Speculation | None:
        """Return how tokens are proposed to this model, None for not at all.

        Raises UserError for two ways at once, and for a draft model of another vocabulary or on
        other devices.
        """
        count = proposal_count(prompt_lookup, draft is not None, draft_tokens)
        if draft is None:
            return PromptLookup(count) if count else None
        _check_same_vocabulary(self.require_tokenizer(), draft.require_tokenizer())
        if mesh_of(self.params) != mesh_of(draft.params):
            raise UserError(
                "the draft model lies on other devices: load both with the same replica and tensor."
            )
        return Draft(draft.config, draft.params, draft.dtype, count)

    def complete(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int,
        sampling: Sampling,
        speculation: Speculation | None = None,
        tally: Tally | None = None,
        row: int = 0,
    ) -> list[Completion]:
        """Return each prompt's continuation with its tokens and the reason of its end.

        Prompt i is sampled with the seed and the number `row` + i, whatever stands beside it. What
        `speculation` comes to is added to `tally`.
        """
        if isinstance(prompts, str):
            raise UserError("prompts is one string: give a list of them.")
        if not prompts:
            return []
        tokenizer = self.require_tokenizer()
        ids = [self._prompt_ids(prompt) for prompt in prompts]
        continuations = engine.generate(
            self.config,
            self.params,
            ids,
            max_tokens=max_tokens,
            eos_id=tokenizer.eos_id,
            vocab_size=tokenizer.vocab_size,
            sampling=sampling,
            dtype=self.dtype,
            first_row=row,
            speculation=speculation,
            tally=tally,
        )
        return [
            Completion(
                prompt if isinstance(prompt, str) else tokenizer.decode(before),
                _new_text(tokenizer, before, new.tokens),
                new.tokens,
                new.finish_reason,
            )
            for prompt, before, new in zip(prompts, ids, continuations, strict=True)
        ]

    def stream(
        self,
        prompt: Prompt,
        max_tokens: int,
        sampling: Sampling,
        row: int = 0,
        speculation: Speculation | None = None,
        tally: Tally | None = None,
    ) -> Iterator[str]:
        """Yield in pieces the text that continues `prompt`, as `complete` does its prompt `row`.

        A character is held back until all its bytes are there.
        """
        tokenizer = self.require_tokenizer()
        ids = self._prompt_ids(prompt)
        blocks = engine.stream(
            self.config,
            self.params,
            [ids],
            max_tokens=max_tokens,
            eos_id=tokenizer.eos_id,
            vocab_size=tokenizer.vocab_size,
            sampling=sampling,
            dtype=self.dtype,
            first_row=row,
            block=1,
            speculation=speculation,
            tally=tally,
        )
        new: list[int] = []
        shown = ""
        for tokens_1I in blocks:
            new += [token for token in tokens_1I[0].tolist() if token != tokenizer.eos_id]
            text = _new_text(tokenizer, ids, new)
            complete = text.rstrip(_REPLACEMENT)
            if len(complete) > len(shown):
                yield complete[len(shown) :]
                shown = complete
        if len(rest := _new_text(tokenizer, ids, new)) > len(shown):
            yield rest[len(shown) :]

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        tokenizer = self.require_tokenizer()
        return [tokenizer.bos_id, *tokenizer.encode(prompt).tolist()]

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; raises UserError where there is none."""
        if self.tokenizer is None:
            raise UserError(
                "text needs a tokenizer and these weights come without one: "
                "give a SentencePiece file with --tokenizer FILE, or load(..., tokenizer=FILE)."
            )
        return self.tokenizer


_REPLACEMENT = "\ufffd"


def _new_text(tokenizer: Tokenizer, before: Sequence[int], new: Sequence[int]) -> str:
    """Return what `new` adds to the text of `before`: alone it would lose its leading space."""
    return tokenizer.decode([*before, *new])[len(tokenizer.decode(before)) :]


def _check_same_vocabulary(ours: Tokenizer, theirs: Tokenizer) -> None:
    """Raise UserError unless each id is the same piece for both."""
    if ours.sha256 == theirs.sha256:
        return
    if ours.vocab_size != theirs.vocab_size:
        difference = f"{theirs.vocab_size:,} pieces, not {ours.vocab_size:,}"
    else:
        pairs = enumerate(zip(ours.pieces, theirs.pieces, strict=True))
        differs = [
            i for i, (our, their) in pairs if (our.text, our.kind) != (their.text, their.kind)
        ]
        if not differs:
            return
        i = differs[0]
        difference = f"id {i} is {theirs.pieces[i].text!r}, not {ours.pieces[i].text!r}"
    raise UserError(
        f"the draft model has another vocabulary ({difference}): give one with the same tokenizer."
    )


@partial(jax.jit, static_argnums=(0, 1))
def _logits(config: ModelConfig, dtype: DType, params: Params, tokens_BT: jax.Array) -> jax.Array:
    return apply(Decoder(config, dtype=dtype), params, "__call__", tokens_BT)

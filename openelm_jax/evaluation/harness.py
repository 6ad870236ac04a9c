"""A model as lm-evaluation-harness wants it: text requests in, log-likelihoods and texts out.

`python -m openelm_jax.evaluation.harness ARGUMENTS` is the harness' own command line, which then
knows `--model openelm_jax --model_args from=WHERE`.

lm_eval is optional, and so the class is made when it is first asked for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from openelm_jax.command_line import run
from openelm_jax.errors import UserError
from openelm_jax.generation.sampling import Sampling
from openelm_jax.generation.scoring import Report, Request, Scored
from openelm_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from lm_eval.api.model import TemplateLM

    from openelm_jax.generation.language_model import LanguageModel

MODEL = "openelm_jax"
"""Its name in the harness."""

Score = Callable[[Sequence[Request], Report | None], list[Scored]]
Complete = Callable[[Sequence[Sequence[int]], int, Sampling], "Iterator[np.ndarray]"]
"""Prompts, the most new tokens of each, and how they are chosen -> blocks [B, I] of new tokens,
rows that have ended going on with </s>."""

GENERATION_ROWS = 32
NEW_TOKENS = 256
"""The most tokens that are generated, where a task does not say."""


def harness_model(
    model: LanguageModel,
    *,
    max_length: int | None = None,
    add_bos: bool = True,
    batch_tokens: int | None = None,
    between: Callable[[], None] = lambda: None,
    silent: bool = False,
) -> TemplateLM:
    """Return a loaded model as the harness wants it, in its compute type and on its devices.

    `max_length` is the most tokens that it reads at a time, by default those that it was trained
    to see; `add_bos` puts <s> before each text, as the paper's evaluation does. `between` is called
    after each log-likelihood or block of new tokens, and may raise; `silent` shows no progress.
    Raises UserError without a tokenizer and without lm-eval.
    """
    from openelm_jax.generation import engine

    if model.tokenizer is None:
        raise UserError(
            "evaluation needs a tokenizer and these weights come without one: "
            "give a SentencePiece file with --tokenizer FILE."
        )
    tokenizer, vocab_size = model.tokenizer, model.tokenizer.vocab_size

    def complete(
        prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sampling
    ) -> Iterator[np.ndarray]:
        blocks = engine.stream(
            model.config,
            model.params,
            prompts,
            max_tokens=max_tokens,
            eos_id=tokenizer.eos_id,
            vocab_size=vocab_size,
            sampling=sampling,
            dtype=model.dtype,
        )
        for block in blocks:
            between()
            yield block

    def score(requests: Sequence[Request], report: Report | None) -> list[Scored]:
        def hear(number: int, result: Scored) -> None:
            between()
            if report is not None:
                report(number, result)

        return model.score(requests, batch_tokens=batch_tokens, report=hear)

    return harness_class()(
        score,
        tokenizer,
        model.config.context_length if max_length is None else max_length,
        complete=complete,
        add_bos=add_bos,
        silent=silent,
    )


@functools.cache
def harness_class() -> type[TemplateLM]:
    """Return the class `HarnessModel`, registered in the harness; UserError without lm-eval."""
    base, registry, lm_utils, model_utils = _lm_eval()

    class HarnessModel(base):  # type: ignore[misc, valid-type]
        """Requests of the harness, cut and encoded as its own backend `hf` does it."""

        def __init__(
            self,
            score: Score,
            tokenizer: Tokenizer,
            max_length: int,
            *,
            complete: Complete | None = None,
            add_bos: bool = True,
            silent: bool = False,
        ) -> None:
            super().__init__()
            self._score = score
            self._complete = complete
            self._tokenizer = tokenizer
            self._bos = tokenizer.pieces[tokenizer.bos_id].text
            self._eos = tokenizer.pieces[tokenizer.eos_id].text
            self._encode = functools.lru_cache(maxsize=256)(lambda text: tokenizer.encode(text))
            self.max_length = max_length
            self.add_bos = add_bos
            self.silent = silent

        @classmethod
        def create_from_arg_string(
            cls, arg_string: str, additional_config: dict | None = None
        ) -> HarnessModel:
            """Return the model of `from=WHERE,...`; UserError for arguments that do not exist."""
            return cls.create_from_arg_obj(lm_utils.simple_parse_args_string(arg_string))

        @classmethod
        def create_from_arg_obj(
            cls, arg_dict: dict, additional_config: dict | None = None
        ) -> HarnessModel:
            """The same for arguments by name."""
            return _from_arguments(arg_dict)

        @property
        def eot_token_id(self) -> int:
            return self._tokenizer.eos_id

        @property
        def prefix_token_id(self) -> int:
            return self._tokenizer.bos_id

        @property
        def max_gen_toks(self) -> int:
            return NEW_TOKENS

        @property
        def tokenizer_name(self) -> str:
            return self._tokenizer.sha256

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
        ) -> list[int]:
            """Return the ids of a text; <s> at its beginning is the token, and never doubled."""
            add_bos = self.add_bos if add_special_tokens is None else add_special_tokens
            if string.startswith(self._bos):
                add_bos, string = True, string.removeprefix(self._bos)
            ids = self._encode(string).tolist()
            return [self._tokenizer.bos_id, *ids] if add_bos else ids

        def loglikelihood(self, requests, disable_tqdm=False):
            return super().loglikelihood(requests, disable_tqdm or self.silent)

        def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
            pieces = [
                _within(context or [self.prefix_token_id], continuation, self.max_length)
                for _, context, continuation in requests
            ]

            def keep(number: int, total: tuple[float, bool]) -> None:
                self.cache_hook.add_partial("loglikelihood", requests[number][0], total)

            return _sums(self._score, pieces, keep, "loglikelihood", disable_tqdm or self.silent)

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            """Return nats of whole texts, each token once and after as much as fits before it.

            <s> stands before the text and is not scored.
            """
            texts = [request.args[0] for request in requests]
            pieces = [
                _windows(
                    self.prefix_token_id,
                    self.tok_encode(text.removeprefix(self._bos), add_special_tokens=False),
                    self.max_length,
                )
                for text in texts
            ]

            def keep(number: int, total: tuple[float, bool]) -> None:
                self.cache_hook.add_partial("loglikelihood_rolling", (texts[number],), total[0])

            silent = disable_tqdm or self.silent
            found = _sums(self._score, pieces, keep, "loglikelihood_rolling", silent)
            return [total for total, _ in found]

        def generate_until(self, requests, disable_tqdm=False):
            """Return the text that continues each context, up to the first of its stop strings."""
            if self._complete is None:
                raise UserError(
                    "a task asks for generated text, and this model only scores: "
                    "choose tasks that compare log-likelihoods."
                )
            from tqdm import tqdm

            arguments = [request.args for request in requests]
            alike: dict[str, list[int]] = {}
            for number, (_, how) in enumerate(arguments):
                alike.setdefault(repr(sorted(how.items())), []).append(number)
            texts: list[str] = [""] * len(arguments)
            with tqdm(
                total=len(texts), desc="generate_until", disable=disable_tqdm or self.silent
            ) as bar:
                for numbers in alike.values():
                    how = arguments[numbers[0]][1]
                    limits = model_utils.normalize_gen_kwargs(dict(how), self.max_gen_toks)
                    stops = model_utils.handle_stop_sequences(limits["until"], eos=self._eos)
                    most = limits["max_gen_toks"]
                    prompts = {
                        number: self._prompt(arguments[number][0], most) for number in numbers
                    }
                    numbers.sort(key=lambda number: len(prompts[number]))
                    for start in range(0, len(numbers), GENERATION_ROWS):
                        batch = numbers[start : start + GENERATION_ROWS]
                        some = [prompts[number] for number in batch]
                        blocks = self._complete(some, most, _sampling(limits))
                        continued = _until(blocks, stops, self._tokenizer)
                        for number, text in zip(batch, continued, strict=True):
                            texts[number] = text
                            self.cache_hook.add_partial("generate_until", arguments[number], text)
                        bar.update(len(batch))
            return texts

        def _prompt(self, context: str, most: int) -> list[int]:
            """Return the context's last tokens that leave room for `most` new ones."""
            room = self.max_length - most
            if room < 1:
                raise UserError(
                    f"a task asks for {most} new tokens, and the model's context has "
                    f"{self.max_length}: ask for fewer with --gen_kwargs max_gen_toks=N of "
                    "python -m openelm_jax.evaluation.harness."
                )
            return (self.tok_encode(context) or [self.prefix_token_id])[-room:]

    if MODEL not in registry:
        registry.register(MODEL, target=HarnessModel)
    return HarnessModel


def __getattr__(name: str) -> Any:
    if name == "HarnessModel":
        return harness_class()
    raise AttributeError(name)


def _lm_eval() -> tuple[Any, ...]:
    try:
        import lm_eval.models.utils as model_utils
        from lm_eval import utils
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import model_registry
    except ImportError as missing:
        raise UserError(
            f"evaluation on tasks needs lm-eval ({missing}): pip install 'openelm_jax[eval]'."
        ) from None
    return TemplateLM, model_registry, utils, model_utils


def _within(context: Sequence[int], continuation: Sequence[int], max_length: int) -> list[Request]:
    """Return what is scored: the last tokens that fit, or windows of a longer continuation.

    The model reads `max_length` tokens, which the last of the continuation is not among.
    """
    if len(continuation) > max_length:
        return _windows(context[-1], continuation, max_length)
    room = max_length + 1 - len(continuation)
    return [Request(context[-room:], continuation)]


def _windows(first: int, tokens: Sequence[int], max_length: int) -> list[Request]:
    """Return requests that score each token once, `first` standing before them.

    Each reads `max_length` tokens as far as there are so many, the last ones some that were read
    before. (`get_rolling_token_windows` of the harness with context_len 1.)
    """
    text = [first, *tokens]
    requests = []
    for start in range(1, len(text), max_length):
        stop = min(start + max_length, len(text))
        requests.append(Request(text[max(0, stop - 1 - max_length) : start], text[start:stop]))
    return requests


def _sums(
    score: Score,
    pieces: Sequence[Sequence[Request]],
    keep: Callable[[int, tuple[float, bool]], None],
    what: str,
    silent: bool,
) -> list[tuple[float, bool]]:
    """Return the sum of each item's requests, and whether all are greedy; `keep` has each early."""
    from tqdm import tqdm

    owner = [number for number, requests in enumerate(pieces) for _ in requests]
    waiting = [len(requests) for requests in pieces]
    totals = [(0.0, True)] * len(pieces)

    with tqdm(total=len(owner), desc=what, disable=silent) as bar:

        def report(number: int, result: Scored) -> None:
            item = owner[number]
            nats, is_greedy = totals[item]
            totals[item] = (nats + result.log_probability, is_greedy and result.is_greedy)
            waiting[item] -= 1
            if waiting[item] == 0:
                keep(item, totals[item])
            bar.update()

        score([request for requests in pieces for request in requests], report)
    return totals


def _sampling(limits: Mapping[str, Any]) -> Sampling:
    if not limits.get("do_sample"):
        return Sampling(temperature=0.0)
    return Sampling(
        temperature=float(limits.get("temperature", 1.0)),
        top_k=int(limits.get("top_k", 0)),
        top_p=float(limits.get("top_p", 1.0)),
        seed=int(limits.get("seed", 0)),
    )


def _until(blocks: Iterable[np.ndarray], stops: Sequence[str], tokenizer: Tokenizer) -> list[str]:
    """Return the text of each row before any of `stops`; asks for no more than that needs."""
    rows: list[list[int]] = []
    texts: list[str] = []
    for tokens_BI in blocks:
        rows = rows or [[] for _ in tokens_BI]
        for row, new in zip(rows, tokens_BI.tolist(), strict=True):
            row += new
        ended = [tokenizer.eos_id in row for row in rows]
        texts = [
            tokenizer.decode(row[: row.index(tokenizer.eos_id)] if end else row)
            for row, end in zip(rows, ended, strict=True)
        ]
        if all(
            end or any(stop and stop in text for stop in stops)
            for text, end in zip(texts, ended, strict=True)
        ):
            break
    for stop in filter(None, stops):
        texts = [text.split(stop)[0] for text in texts]
    return texts


ARGUMENTS = (
    *("from", "tokenizer", "dtype", "exp", "quantize", "replica", "tensor", "adapter"),
    *("max_length", "add_bos_token", "batch_tokens"),
)


def _from_arguments(arguments: Mapping[str, Any]) -> Any:
    """Return the model that `--model_args` describes."""
    from openelm_jax.generation.language_model import load

    unknown = [name for name in arguments if name not in ARGUMENTS]
    if unknown or "from" not in arguments:
        trouble = f"no argument {unknown[0]}" if unknown else "from=WHERE is missing"
        raise UserError(f"--model_args: {trouble}; known are {', '.join(ARGUMENTS)}.")
    how = {
        name: arguments[name]
        for name in ("tokenizer", "dtype", "exp", "quantize", "replica", "tensor", "adapter")
        if name in arguments
    }
    return harness_model(
        load(str(arguments["from"]), **how),
        max_length=arguments.get("max_length"),
        add_bos=bool(arguments.get("add_bos_token", True)),
        batch_tokens=arguments.get("batch_tokens"),
    )


def main(argv: list[str]) -> None:
    """Run the harness' own command line, with our model known to it."""
    harness_class()
    from lm_eval.__main__ import cli_evaluate

    sys.argv[1:] = argv
    cli_evaluate()


if __name__ == "__main__":
    from openelm_jax.evaluation.harness import main as registered_main

    run(registered_main)

"""Preference pairs by rejection sampling: `python -m openelm_jax.sample_pairs --from W ...`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from openelm_jax.command_line import command_parser, run
from openelm_jax.errors import UserError

EXAMPLES = """
python -m openelm_jax.sample_pairs --from runs/tiny --prompts prompts.txt --out candidates.jsonl
python -m openelm_jax.sample_pairs --scores scored.jsonl --out pairs.jsonl
python -m openelm_jax.sample_pairs --from W --prompts P.jsonl --scores judge:score --out pairs.jsonl
"""

Prompt = str | list[dict[str, str]]
Score = Callable[[Prompt, list[str]], Sequence[float]]


class Candidates(NamedTuple):
    """A prompt, a text or messages, what may answer it, and how good each answer is if known."""

    prompt: Prompt
    responses: list[str]
    scores: list[float] | None
    where: str


def main(argv: list[str]) -> None:
    """Write candidates, or pairs of those that were accepted, one JSON object a line."""
    arguments = _parse(argv)

    from openelm_jax.generation.rejection_sampling import REASONS, check_settings, ranked_pairs

    check_settings(arguments.num_candidates, arguments.keep, arguments.beta)
    score = None
    if arguments.scores and not _is_file(arguments.scores):
        score = _function(arguments.scores)
    if arguments.scores and score is None:
        if arguments.where or arguments.prompts:
            print(
                f"note: the candidates are those of {arguments.scores}: none are sampled.",
                file=sys.stderr,
            )
        candidates = _read_candidates(arguments.scores)
    else:
        candidates = _sample(arguments)

    prompts, pairs, told = 0, 0, Counter(dict.fromkeys(REASONS, 0))
    with _replacing(arguments.out) as write:
        for number, each in enumerate(candidates):
            prompts += 1
            if arguments.scores is None:
                write({"prompt": each.prompt, "responses": each.responses})
                continue
            scores = each.scores if score is None else _scores_by(score, arguments.scores, each)
            assert scores is not None
            key = (arguments.seed, number)
            ranked, missing = ranked_pairs(
                each.responses, scores, arguments.keep, arguments.beta, key
            )
            told += missing
            pairs += len(ranked)
            for pair in ranked:
                write(_record(each.prompt, pair._asdict()))
        if not prompts:
            raise UserError(f"{arguments.scores or arguments.prompts} holds no prompt.")
    _report(arguments, prompts, pairs, told)


def _report(arguments: argparse.Namespace, prompts: int, pairs: int, told: Counter) -> None:
    if arguments.scores is None:
        print(
            f"{prompts:,} prompts with {arguments.num_candidates:,} candidates each in "
            f"{arguments.out}: add to each line its scores, one a response, and give the file to "
            "--scores.",
            file=sys.stderr,
        )
        return
    print(f"{pairs:,} pairs of {prompts:,} prompts in {arguments.out}", file=sys.stderr)
    for reason, count in told.items():
        if count:
            print(f"note: {count:,} {reason}", file=sys.stderr)


def _record(prompt: Prompt, ranked: dict[str, Any]) -> dict[str, Any]:
    """Return a pair as `finetune` reads it: an answer to messages is a message."""
    if not isinstance(prompt, str):
        for name in ("chosen", "rejected"):
            ranked[name] = [{"role": "assistant", "content": ranked[name]}]
    return {"prompt": prompt, **ranked}


def _sample(arguments: argparse.Namespace) -> Iterator[Candidates]:
    from openelm_jax.data.chat import ChatForm, Message, encode_prompt
    from openelm_jax.generation.language_model import load
    from openelm_jax.generation.rejection_sampling import sample_candidates
    from openelm_jax.generation.sampling import Sampling

    prompts = list(_read_prompts(arguments.prompts, arguments.chat))
    if not prompts:
        return
    sampling = Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    model = load(arguments.where, arguments.tokenizer, arguments.dtype, adapter=arguments.adapter)
    form = ChatForm(empty_system=not arguments.no_system)

    def asked(prompt: Prompt) -> str | list[int]:
        if isinstance(prompt, str):
            return prompt
        messages = [Message(turn["role"], turn["content"]) for turn in prompt]
        return encode_prompt(model.require_tokenizer(), messages, form).tolist()

    sampled = sample_candidates(
        model,
        [asked(prompt) for prompt, _ in prompts],
        arguments.num_candidates,
        arguments.max_tokens,
        sampling,
        arguments.batch_size,
    )
    unfinished = total = 0
    for (prompt, where), completions in zip(prompts, sampled, strict=True):
        total += len(completions)
        unfinished += sum(each.finish_reason == "length" for each in completions)
        yield Candidates(prompt, [each.text for each in completions], None, where)
    if unfinished:
        print(
            f"warning: {unfinished:,} of {total:,} candidates end with --max-tokens "
            f"{arguments.max_tokens}, not with </s>.",
            file=sys.stderr,
        )


def _read_prompts(path: str, chat: bool) -> Iterator[tuple[Prompt, str]]:
    """Yield each prompt with its place: lines of a text, or the `prompt` of records."""
    from openelm_jax.data.conversations import messages_of, require_turns
    from openelm_jax.data.objects import ENDINGS, read_objects

    if not path.endswith(ENDINGS):
        try:
            lines = Path(path).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as fault:
            raise UserError(f"--prompts {path}: {fault}; give a text file in UTF-8.") from None
        for number, line in enumerate(lines, start=1):
            if line:
                yield _as_asked(line, chat), f"{path}:{number}"
        return
    for fields, where in read_objects(path):
        prompt = fields.get("prompt")
        if isinstance(prompt, str):
            yield _as_asked(prompt, chat), where
        else:
            messages = messages_of(prompt, where, "prompt")
            require_turns(messages, where, "prompt", last="user")
            yield [message._asdict() for message in messages], where


def _as_asked(text: str, chat: bool) -> Prompt:
    return [{"role": "user", "content": text}] if chat else text


def _read_candidates(path: str) -> Iterator[Candidates]:
    from openelm_jax.data.conversations import messages_of, require_turns
    from openelm_jax.data.objects import read_objects

    for fields, where in read_objects(path):
        prompt, responses, scores = (fields.get(name) for name in ("prompt", "responses", "scores"))
        if not isinstance(prompt, str):
            messages = messages_of(prompt, where, "prompt")
            require_turns(messages, where, "prompt", last="user")
            prompt = [message._asdict() for message in messages]
        if not isinstance(responses, list) or not all(isinstance(each, str) for each in responses):
            raise UserError(f"{where}: responses must be a list of texts.")
        yield Candidates(prompt, responses, _checked(scores, len(responses), where), where)


def _checked(scores: Any, count: int, where: str) -> list[float]:
    """Return scores as numbers, null as one that is none."""
    try:
        values = [float("nan") if value is None else float(value) for value in scores]
    except (TypeError, ValueError):
        raise UserError(f"{where}: scores must be a list of numbers, one a response.") from None
    if len(values) != count:
        raise UserError(
            f"{where}: there are {len(values)} scores for {count} responses: one each is needed."
        )
    return values


def _is_file(scores: str) -> bool:
    from openelm_jax.data.objects import ENDINGS

    return scores.endswith(ENDINGS)


def _function(name: str) -> Score:
    """Return the function MODULE:FUNCTION, of a module in the working directory or installed."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise UserError(
            f"--scores {name}: give a file of candidates with scores (.jsonl), or MODULE:FUNCTION."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as fault:
        raise UserError(f"--scores {name}: {fault}; give a module that can be imported.") from None
    except AttributeError:
        raise UserError(f"--scores {name}: {module} has no {attribute}.") from None


def _scores_by(score: Score, name: str, candidates: Candidates) -> list[float]:
    scores = score(candidates.prompt, candidates.responses)
    return _checked(scores, len(candidates.responses), f"{name} of {candidates.where}")


class _replacing:
    """A file of JSON lines that appears when it is whole."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._partial = self._path.with_name(f"{self._path.name}.{os.getpid()}.partial")

    def __enter__(self) -> Callable[[dict[str, Any]], None]:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial.open("w", encoding="utf-8")
        except OSError as fault:
            raise UserError(f"--out {self._path}: {fault.strerror}; give another file.") from None
        return lambda record: self._write(record)

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._file.close()
        if kind is None:
            self._partial.replace(self._path)
        else:
            self._partial.unlink()


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(
        "sample_pairs",
        "Preference pairs by statistical rejection sampling (arXiv 2309.06657).",
        EXAMPLES,
        "--out FILE [--from WHERE --prompts FILE] [--scores FILE|MODULE:FUNCTION]",
    )
    flag = parser.add_argument
    flag("--out", required=True, metavar="FILE", help="pairs; without --scores candidates (.jsonl)")
    flag("--from", dest="where", metavar="WHERE", help="the model that answers, as for generate")
    flag("--prompts", metavar="FILE", help="one a line, or the prompt of each record of .jsonl")
    flag(
        "--scores",
        metavar="S",
        help="candidates with scores (.jsonl: prompt, responses, scores), which need no model; or "
        "MODULE:FUNCTION, called with a prompt and its responses, that returns their scores",
    )
    flag("--num-candidates", type=int, default=64, metavar="N", help="answers to each prompt (64)")
    flag(
        "--keep", type=int, default=8, metavar="N", help="of them accepted; half as many pairs (8)"
    )
    flag(
        "--beta", type=float, default=0.5, metavar="X", help="0 accepts the best scores only (0.5)"
    )
    flag("--seed", type=int, default=0, metavar="N", help="same seed, same pairs (0)")
    flag("--temperature", type=float, default=0.7, metavar="X", help="of sampling (0.7)")
    flag("--top-k", type=int, default=40, metavar="K", help="only the K likeliest tokens (40)")
    flag("--top-p", type=float, default=1.0, metavar="P", help="only the top share P (1)")
    flag("--max-tokens", type=int, default=512, metavar="N", help="of an answer at most (512)")
    flag("--batch-size", type=int, default=64, metavar="N", help="answers written at a time (64)")
    flag("--chat", action="store_true", help="a prompt that is a text is a user's turn")
    flag("--no-system", action="store_true", help="no empty system turn in front of messages")
    flag("--dtype", choices=("float32", "bfloat16"), help="float32 on a CPU, bfloat16 elsewhere")
    flag("--tokenizer", metavar="FILE", help="SentencePiece file, if WHERE has none or another")
    flag("--adapter", metavar="DIR", help="merge the LoRA or DoRA that peft saved there")
    arguments = parser.parse_args(argv)
    has_candidates = arguments.scores and _is_file(arguments.scores)
    if not has_candidates and not (arguments.where and arguments.prompts):
        parser.error("give --from WHERE and --prompts FILE, or --scores FILE with candidates")
    if arguments.batch_size < 1:
        parser.error("--batch-size must be at least 1")
    if arguments.seed < 0:
        parser.error("--seed must be 0 or above")
    return arguments


if __name__ == "__main__":
    run(main)

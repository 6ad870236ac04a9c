"""The eight commonsense sets of LLM-Adapters, asked as for the paper's Table 6.

A record's answer is one of a few words that its instruction names ("Answer format: true/false").
By likelihood, as in the paper (`main_eval_llmadapters.py` of CoreNet), the likeliest continuation
"the correct answer is WORD" is the model's; by generation the first word that it writes.
"""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from openelm_jax.data.instructions import Instruction, PromptForm, instruction_of, prompt
from openelm_jax.data.objects import Object, read_objects
from openelm_jax.errors import UserError
from openelm_jax.evaluation.suites import COMMONSENSE, Results, Task, Value
from openelm_jax.generation.language_model import LanguageModel
from openelm_jax.generation.scoring import Request
from openelm_jax.tokenizer import Tokenizer

Way = Literal["likelihood", "generation"]
FORMS: dict[Way, PromptForm] = {"likelihood": "corenet", "generation": "llm-adapters"}
"""The form of the prompt that each way has in its source."""

WORDS = {
    "boolq": ("true", "false"),
    "piqa": ("solution1", "solution2"),
    "social_i_qa": ("answer1", "answer2", "answer3", "answer4", "answer5"),
    "hellaswag": ("ending1", "ending2", "ending3", "ending4"),
    "winogrande": ("option1", "option2"),
    "ARC-Easy": ("answer1", "answer2", "answer3", "answer4", "answer5"),
    "ARC-Challenge": ("answer1", "answer2", "answer3", "answer4", "answer5"),
    "openbookqa": ("answer1", "answer2", "answer3", "answer4", "answer5"),
}
"""What may be an answer in a generated text of a set."""
SHUFFLE_SEED = 83652
"""CoreNet's: the first N records are then a sample of all."""
NEW_TOKENS = 32
ROWS = 32
"""Prompts that are continued together."""


def open_sets(data: Path, names: Sequence[str]) -> dict[Task, list[Instruction]]:
    """Return the records of sets by LLM-Adapters' names, in the order of the paper's table.

    `data` has dataset/NAME/test.json or NAME/test.json, gzipped or not. Raises UserError naming
    whatever is not there, before anything is read.
    """
    tasks = {task.name: task for task in COMMONSENSE}
    for name in names:
        if name not in tasks:
            raise UserError(f"--sets {name}: there is no such set; known are {', '.join(tasks)}.")
    files = {name: _file(data, name) for name in tasks if name in names}
    if missing := [name for name, file in files.items() if file is None]:
        raise UserError(
            f"--data {data} has no {', '.join(f'{name}/test.json' for name in missing)}: fetch "
            "LLM-Adapters' folder dataset, or name the sets that are there with --sets."
        )
    sets = {
        tasks[name]: [_answerable(record) for record in read_objects(str(file))]
        for name, file in files.items()
    }
    for task, records in sets.items():
        if not records:
            raise UserError(f"{files[task.name]} holds no record: fetch it again.")
    return sets


def _answerable(record: Object) -> Instruction:
    instruction = instruction_of(record)
    if instruction.answer not in (words := answer_words(instruction.instruction)):
        raise UserError(
            f"{record.where}: the answer {instruction.answer!r} is none of "
            f"{', '.join(words) or 'the words that its last line should name'}."
        )
    return instruction


def _file(data: Path, name: str) -> Path | None:
    places = [
        data / folder / name / file
        for folder in ("", "dataset")
        for file in ("test.json", "test.json.gz")
    ]
    return next((place for place in places if place.is_file()), None)


def answer_words(instruction: str) -> list[str]:
    """Return what may be the answer, from the last line of an instruction; none if it says none."""
    last = instruction.split("\n")[-1]
    if re.search(r"Answer format: true/false", last):
        return ["true", "false"]
    match = re.search(r"Answer format: .*(answer|ending|option|solution)(\d)$", last)
    return [f"{match[1]}{i}" for i in range(1, int(match[2]) + 1)] if match else []


def run_commonsense(
    model: LanguageModel,
    sets: Mapping[Task, Sequence[Instruction]],
    *,
    way: Way = "likelihood",
    form: PromptForm | None = None,
    limit: int | None = None,
) -> Results:
    """Return the share of right answers of each set, of `limit` records of each at most.

    All processes must call it. Raises UserError for a model without a tokenizer.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise UserError(
            "evaluation needs a tokenizer and these weights come without one: "
            "give a SentencePiece file with --tokenizer FILE."
        )
    values = []
    for task, records in sets.items():
        some = list(records)
        random.Random(SHUFFLE_SEED).shuffle(some)
        some = some[:limit]
        prompts = [prompt(record.instruction, form=form or FORMS[way]) for record in some]
        if way == "likelihood":
            found = _by_likelihood(model, tokenizer, some, prompts, task.label)
        else:
            found = {"acc": _by_generation(model, some, prompts, task)}
        metrics = {name: right / len(some) for name, right in found.items()}
        share = metrics["acc"]
        error = math.sqrt(share * (1 - share) / (len(some) - 1)) if len(some) > 1 else None
        values.append(Value(task, share, error, "acc", len(some), metrics))
    return Results(tuple(values), limit)


def _by_likelihood(
    model: LanguageModel,
    tokenizer: Tokenizer,
    records: Sequence[Instruction],
    prompts: Sequence[str],
    what: str,
) -> dict[str, int]:
    """Return how many are right by log-likelihood, and by that for a character."""
    continuations = [
        [f"the correct answer is {word}" for word in answer_words(record.instruction)]
        for record in records
    ]
    requests = [
        _request(tokenizer, context, continuation, model.config.context_length)
        for context, some in zip(prompts, continuations, strict=True)
        for continuation in some
    ]
    with _progress(len(requests), what) as step:
        scored = iter(model.score(requests, report=lambda number, result: step()))
    right = {"acc": 0, "acc_norm": 0}
    for record, some in zip(records, continuations, strict=True):
        nats = [next(scored).log_probability for _ in some]
        by_character = [total / len(text) for total, text in zip(nats, some, strict=True)]
        for name, scores in (("acc", nats), ("acc_norm", by_character)):
            best = some[scores.index(max(scores))]
            right[name] += best.rpartition(" ")[2] == record.answer
    return right


def _by_generation(
    model: LanguageModel, records: Sequence[Instruction], prompts: Sequence[str], task: Task
) -> int:
    """Return of how many the first word in a greedy continuation is right.

    (LLM-Adapters searches with four beams.)
    """
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    right = 0
    with _progress(len(prompts), task.label) as step:
        for start in range(0, len(order), ROWS):
            numbers = order[start : start + ROWS]
            texts = model.generate([prompts[number] for number in numbers], NEW_TOKENS)
            for number, text in zip(numbers, texts, strict=True):
                right += first_word(text, WORDS[task.name]) == records[number].answer
                step()
    return right


def first_word(text: str, words: Sequence[str]) -> str | None:
    """Return which of the words a response has first, None for none of them."""
    match = re.search("|".join(words), text.partition("### Response:")[0])
    return match[0] if match else None


def _request(tokenizer: Tokenizer, context: str, continuation: str, length: int) -> Request:
    """Return the request of two texts, cut as lm-eval does: spaces between them are of the second.

    Of what is longer than the model's context the first tokens are left out.
    """
    before = tokenizer.encode(context.rstrip()).tolist()
    scored = tokenizer.encode(context + continuation).tolist()[len(before) :]
    room = max(1, length + 1 - len(scored))
    return Request([tokenizer.bos_id, *before][-room:], scored)


@contextmanager
def _progress(total: int, what: str) -> Iterator[Callable[[], None]]:
    """Show a bar on stderr, if that is a terminal, which each call of what is given moves on."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)

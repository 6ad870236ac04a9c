"""How many items of a task are scored in a second, by us and by the harness' backend `hf`.

Both get the same requests, those that lm-evaluation-harness makes of the tasks, and have the same
float32 weights: ours as they are loaded, theirs as we export them for transformers. Each is a
process of its own, and they take turns; a turn is from texts to log-likelihoods. `hf` scores with
the batch size that suits it best, found before. What is compared is also whether they agree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from openelm_jax.benchmarks.generation_models import model_of, write_random
from openelm_jax.benchmarks.processes import ON_THE_CPU, process, questions
from openelm_jax.benchmarks.report import Figure, median_figure
from openelm_jax.errors import UserError
from openelm_jax.evaluation.harness_tasks import open_tasks, quiet
from openelm_jax.evaluation.suites import Task
from openelm_jax.tokenizer import Tokenizer, load_tokenizer
from openelm_jax.weights.huggingface import write_huggingface
from openelm_jax.weights.load import open_weights
from openelm_jax.weights.torch_model import write_code
from openelm_jax.weights.vocabulary import cut_to_tokenizer

BENCHMARK = "benchmark evaluate"
CURE = "if memory ran out, take a smaller --size"
RATIO = 1.5
"""Target: our items a second over theirs."""
DIFFERENCE = 1e-3
"""Target: nats of a request between them."""
THEIR_BATCHES = (1, 4, 16, 64)
TRIED = 64
"""Requests that the batch sizes are tried with."""
PACKAGES = ("lm_eval", "torch", "transformers")
OFFLINE = ON_THE_CPU | {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "true",
}

Pair = tuple[str, str]
"""Context and continuation."""
Answer = tuple[float, bool]


class TaskRequests(NamedTuple):
    """The requests of some items of a task."""

    task: str
    items: int
    pairs: list[Pair]


class Turn(NamedTuple):
    """What a side answers: how long it took, and what it found."""

    seconds: float
    answers: list[Answer]


def measure_evaluation(
    where: str | None,
    size: str,
    tasks: Sequence[str],
    data: Path | None,
    *,
    shots: int | None,
    limit: int,
    rounds: int,
    tokenizer: str | None,
    say: Callable[[str], None],
) -> list[Figure]:
    """Return items a second of both, their ratio and their differences, for each task.

    The weights are those in `where`, or random ones of `size` with `tokenizer`. `data` is a folder
    of copies as for `evaluate`; without one the Hub is asked. Raises UserError for what is not
    at hand.
    """
    _require_packages()
    if data is not None and not data.is_dir():
        raise UserError(f"--data {data}: there is no such directory.")
    with tempfile.TemporaryDirectory() as folder:
        export = Path(folder) / "export"
        if where is not None:
            _write_stored(export, where, tokenizer)
        elif tokenizer is None:
            raise UserError("random weights have no tokenizer: give --tokenizer FILE, or --from.")
        else:
            _write_random(export, size, load_tokenizer(tokenizer))
        write_code(export)
        with open_weights(export) as stored:
            length = stored.config.context_length
        return _compare(export, length, _gather(tasks, data, shots, limit), rounds, say)


def _require_packages() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"{BENCHMARK} needs {' and '.join(missing)}: pip install 'openelm_jax[eval,torch]'."
        )


def _compare(
    export: Path,
    length: int,
    gathered: Sequence[TaskRequests],
    rounds: int,
    say: Callable[[str], None],
) -> list[Figure]:
    figures: list[Figure] = []
    with (
        process(serve_ours, str(export), benchmark=BENCHMARK, cure=CURE) as ours,
        process(
            serve_theirs, str(export), length, benchmark=BENCHMARK, cure=CURE, environment=OFFLINE
        ) as theirs,
    ):
        for task, items, pairs in gathered:
            say(f"{task}: {items} items, {len(pairs)} requests")
            batch = _best_batch(theirs, pairs, say)
            # Compiles, and fills caches.
            before, found = ours(pairs), theirs((batch, pairs))
            say(f"  first turns: {before.seconds:.1f} s, {found.seconds:.1f} s")
            our_seconds, their_seconds = [], []
            for turn in range(rounds):
                for side in ("ours", "theirs") if turn % 2 == 0 else ("theirs", "ours"):
                    if side == "ours":
                        our_seconds.append(ours(pairs).seconds)
                    else:
                        their_seconds.append(theirs((batch, pairs)).seconds)
                say(f"  turn {turn + 1}: {our_seconds[-1]:.1f} s, {their_seconds[-1]:.1f} s")
            figures += _figures(
                task, items, batch, our_seconds, their_seconds, before.answers, found.answers
            )
    return figures


def _best_batch(ask: Callable[[Any], Turn], pairs: list[Pair], say: Callable[[str], None]) -> int:
    """Return the batch size with which a part of the requests takes least."""
    # Neighbours share contexts, which hf makes use of where a continuation is one token.
    step = max(1, len(pairs) // TRIED)
    some = [pair for i, pair in enumerate(pairs) if i // 8 % step == 0]
    ask((THEIR_BATCHES[0], some))
    seconds = {batch: ask((batch, some)).seconds for batch in THEIR_BATCHES}
    best = min(seconds, key=lambda batch: seconds[batch])
    say(f"  hf: batch {best} of {', '.join(map(str, THEIR_BATCHES))}")
    return best


def _figures(
    task: str,
    items: int,
    batch: int,
    ours: Sequence[float],
    theirs: Sequence[float],
    our_answers: Sequence[Answer],
    their_answers: Sequence[Answer],
) -> list[Figure]:
    pairs = list(zip(our_answers, their_answers, strict=True))
    difference = max(abs(our[0] - their[0]) for our, their in pairs)
    unequal = sum(our[1] != their[1] for our, their in pairs)
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    return [
        median_figure(
            task, "ours", [items / s for s in ours], "items/s", f"ours, of {items} items"
        ),
        median_figure(task, "hf", [items / s for s in theirs], "items/s", f"hf, {batch} at a time"),
        median_figure(task, "ratio", ratios, "x", "ours over hf", least=RATIO),
        Figure(
            part=task,
            name="difference",
            value=difference,
            unit="nats",
            meaning=f"largest difference of {len(pairs)} log-likelihoods",
            most=DIFFERENCE,
        ),
        Figure(
            part=task,
            name="unequal_flags",
            value=unequal,
            unit="",
            meaning="greedy flags that differ",
            most=0,
        ),
    ]


def _gather(
    tasks: Sequence[str], data: Path | None, shots: int | None, limit: int
) -> list[TaskRequests]:
    """Return the harness' requests of each task; raises UserError where its data is missing."""
    with process(
        serve_requests,
        data,
        benchmark=BENCHMARK,
        cure="give the tasks' data with --data DIR",
        environment=ON_THE_CPU if data is None else OFFLINE,
    ) as ask:
        answers = [ask((Task(task, shots), limit)) for task in tasks]
    for answer in answers:
        if isinstance(answer, str):
            raise UserError(answer)
    return answers


def serve_requests(connection: Connection, data: Path | None) -> None:
    """Answer (task, limit) with `TaskRequests`, or with what is missing in a sentence."""
    quiet()
    for task, limit in questions(connection):
        try:
            connection.send(_requests_of(task, data, limit))
        except UserError as missing:
            connection.send(str(missing))


def _requests_of(task: Task, data: Path | None, limit: int) -> TaskRequests:
    """Return what the harness asks of a model that is evaluated on a task."""
    import lm_eval
    from lm_eval.api.model import LM

    pairs: list[Pair] = []

    class Listener(LM):
        def loglikelihood(self, requests):
            pairs.extend(request.args for request in requests)
            return [(0.0, False)] * len(requests)

        def loglikelihood_rolling(self, requests):
            raise UserError(f"{task.name} asks for texts as a whole: choose tasks with answers.")

        def generate_until(self, requests):
            raise UserError(f"{task.name} asks for generated text: choose tasks with answers.")

    (opened,) = open_tasks([task], data)
    results = lm_eval.simple_evaluate(
        Listener(),
        tasks=list(opened.objects),
        num_fewshot=task.shots,
        limit=limit,
        bootstrap_iters=0,
    )
    items = sum(counts["effective"] for counts in results["n-samples"].values())
    return TaskRequests(task.name, items, pairs)


def serve_ours(connection: Connection, export: str) -> None:
    """Answer pairs with a `Turn` of our model."""
    from openelm_jax.evaluation.harness import harness_model
    from openelm_jax.generation.language_model import load

    model = harness_model(load(export, dtype="float32"))
    for pairs in questions(connection):
        connection.send(_turn(model, pairs))


def serve_theirs(connection: Connection, export: str, max_length: int) -> None:
    """Answer (batch size, pairs) with a `Turn` of the harness' backend `hf`."""
    from lm_eval.models.huggingface import HFLM

    model = HFLM(
        pretrained=export,
        trust_remote_code=True,
        dtype="float32",
        device="cpu",
        batch_size=1,
        max_length=max_length,
        add_bos_token=True,
    )
    for batch, pairs in questions(connection):
        model.batch_size_per_gpu = batch
        connection.send(_turn(model, pairs))


def _turn(model: Any, pairs: Sequence[Pair]) -> Turn:
    from lm_eval.api.instance import Instance

    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        begun = time.perf_counter()
        answers = model.loglikelihood(requests, disable_tqdm=True)
        seconds = time.perf_counter() - begun
    return Turn(seconds, [(float(nats), bool(is_greedy)) for nats, is_greedy in answers])


def _write_random(directory: Path, size: str, tokenizer: Tokenizer) -> None:
    config = dataclasses.replace(model_of(size), vocab_size=tokenizer.vocab_size)
    write_random(directory, config, "float32", tokenizer)


def _write_stored(directory: Path, where: str, tokenizer: str | None) -> None:
    with open_weights(where, tokenizer) as stored:
        if stored.tokenizer is None:
            raise UserError(f"{where} has no tokenizer; give one with --tokenizer FILE.")
        directory.mkdir()
        write_huggingface(directory, cut_to_tokenizer(stored), dtype="float32")

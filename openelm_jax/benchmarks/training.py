"""Our training step beside PyTorch's, and our loop beside our bare step: `benchmark train`.

Each side is a process of its own, with the same initial weights, tokens, optimiser and number of
threads. They take turns of a few steps, never at the same time, and each turn begins with a step
that is not counted, so that the caches are its own. A ratio compares two neighbouring turns: other
programs on the machine slow both, and what is quoted is the median of the pairs with its range.

Legend: B batch, L = T + 1 tokens of a row, T time, V vocab.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from openelm_jax.benchmarks.processes import Ask, process, questions
from openelm_jax.benchmarks.report import Figure, median_figure
from openelm_jax.config import DType, Experiment
from openelm_jax.errors import UserError
from openelm_jax.model.scaling import parameter_count

TURN_STEPS = 2
LOOP_STEPS = 8
FEWEST_PAIRS = 5
# Of the two sides' losses before the first update, relative: they are of the same model.
SAME_LOSS = {"float32": 1e-4, "bfloat16": 1e-2}
LARGE = 100_000_000


def measure_training(
    experiment: Experiment, parts: Iterable[str], *, dtypes: Iterable[DType], seconds: float
) -> list[Figure]:
    """Return the figures of some parts, each of which takes about `seconds` a compute type.

    Raises UserError without PyTorch, for the part that needs it.
    """
    measures = {"step": measure_steps, "loop": measure_loop}
    return [
        figure
        for part in parts
        for dtype in dtypes
        for figure in measures[part](_with_dtype(experiment, dtype), seconds)
    ]


def measure_steps(experiment: Experiment, seconds: float) -> list[Figure]:
    """Compare forward, backward, clipping and AdamW of ours with PyTorch eager on the CPU."""
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            "benchmark train compares with PyTorch, which is not installed: "
            "pip install 'openelm_jax[torch]', or leave it out with --part loop."
        )
    dtype = experiment.training.dtype
    tokens_per_step = experiment.training.global_batch_size * experiment.model.context_length
    with (
        _side(_serve_steps, "ours", experiment) as ours,
        _side(_serve_steps, "torch", experiment) as theirs,
    ):
        losses = [side("loss") for side in (ours, theirs)]
        distance = abs(losses[0] / losses[1] - 1)
        assert distance < SAME_LOSS[dtype], f"losses {losses}: the sides train different models"
        pairs = _alternate(lambda: ours(TURN_STEPS), lambda: theirs(TURN_STEPS), seconds)
    return [
        median_figure(
            "step",
            f"ratio_{dtype}",
            [their_seconds / our_seconds for our_seconds, their_seconds in pairs],
            "x",
            f"tokens a second in {dtype}, ours to PyTorch eager's",
            least=_least_ratio(experiment) if dtype == "float32" else None,
        ),
        *(
            median_figure(
                "step",
                f"rate_{dtype}_{name}",
                [tokens_per_step / pair[side] for pair in pairs],
                "tokens/s",
                f"{dtype}, {words}",
            )
            for side, (name, words) in enumerate((("ours", "ours"), ("torch", "PyTorch eager")))
        ),
    ]


def measure_loop(experiment: Experiment, seconds: float) -> list[Figure]:
    """Compare the trainer's loop and feed with calling the same compiled step in a row."""
    with _side(_serve_loop, experiment) as turn:
        pairs = _alternate(lambda: turn("loop"), lambda: turn("bare"), seconds)
    return [
        median_figure(
            "loop",
            f"overhead_{experiment.training.dtype}",
            [100 * (loop_seconds / bare_seconds - 1) for loop_seconds, bare_seconds in pairs],
            "%",
            f"that loop and feed add to the bare step, {experiment.training.dtype}",
            most=2,
        )
    ]


def _alternate(
    first: Callable[[], float], second: Callable[[], float], seconds: float
) -> list[tuple[float, float]]:
    """Return seconds of both by turns: A B, B A, A B, ... so that neither is always the later."""
    pairs: list[tuple[float, float]] = []
    end = time.monotonic() + seconds
    while len(pairs) < FEWEST_PAIRS or time.monotonic() < end:
        if len(pairs) % 2 == 0:
            one = first()
            pairs.append((one, second()))
        else:
            two = second()
            pairs.append((first(), two))
    return pairs


def _least_ratio(experiment: Experiment) -> float:
    return 1.3 if parameter_count(experiment.model) > LARGE else 1.05


def _with_dtype(experiment: Experiment, dtype: DType) -> Experiment:
    training = dataclasses.replace(experiment.training, dtype=dtype)
    return dataclasses.replace(experiment, training=training)


def _rows(experiment: Experiment) -> Iterator[np.ndarray]:
    """Yield batches of random tokens without end, the same for every caller."""
    random = np.random.default_rng(0)
    shape = (experiment.training.global_batch_size, experiment.model.context_length + 1)
    while True:
        yield random.integers(0, experiment.model.vocab_size, shape, dtype=np.int32)


def _side(serve: Callable[..., None], *arguments: Any) -> AbstractContextManager[Ask]:
    return process(
        serve,
        *arguments,
        benchmark="benchmark train",
        cure="if memory ran out, take fewer rows with --training.global-batch-size or tokens with "
        "--model.context-length",
    )


def _serve_steps(connection: Connection, side: str, experiment: Experiment) -> None:
    """Answer "loss" with that before the first update, a number with the seconds of a step in so
    many."""
    from openelm_jax.benchmarks.training_step import our_step, torch_step

    step = {"ours": our_step, "torch": torch_step}[side](experiment)
    rows = _rows(experiment)
    first_loss = step(next(rows))
    for count in questions(connection):
        if count == "loss":
            connection.send(first_loss)
            continue
        step(next(rows))
        batches = list(itertools.islice(rows, count))
        begin = time.perf_counter()
        for batch in batches:
            step(batch)
        connection.send((time.perf_counter() - begin) / count)


def _serve_loop(connection: Connection, experiment: Experiment) -> None:
    """Answer "loop" and "bare" with the seconds of a step in the one and by the other."""
    from openelm_jax.benchmarks.training_step import LEARNING_RATE, compiled_program
    from openelm_jax.training.feed import feed, to_batch
    from openelm_jax.training.loop import Logged, train_loop

    program, step, state = compiled_program(experiment)
    mesh, rate = program.mesh, program.place_rate(LEARNING_RATE)
    rows = list(itertools.islice(_rows(experiment), LOOP_STEPS))

    def log(logged: Logged) -> None:
        float(logged.metrics.loss)

    def bare() -> float:
        nonlocal state
        batches = [to_batch(tokens_BL, mesh=mesh) for tokens_BL in rows]
        begin = time.perf_counter()
        for batch in batches:
            state, metrics = step(state, batch, rate)
        metrics.loss.block_until_ready()
        return time.perf_counter() - begin

    def loop() -> float:
        nonlocal state
        with feed(((row, None) for row in rows), experiment.data.prefetch, mesh=mesh) as batches:
            begin = time.perf_counter()
            state, _ = train_loop(
                state,
                train_step=step,
                batches=batches,
                learning_rate=lambda step: LEARNING_RATE,
                start=0,
                steps=len(rows),
                log=log,
                log_every=experiment.training.log_every,
                save=lambda step, state, position: None,
                save_every=len(rows),
                place=program.place_rate,
            )
            return time.perf_counter() - begin

    kinds = {"loop": loop, "bare": bare}
    for kind in questions(connection):
        connection.send(kinds[kind]() / len(rows))

"""The sides of `benchmark train`: each in a process of its own, answering one question at a time.

Legend: B batch, L = T + 1 tokens of a row.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from openelm_jax.benchmarks.processes import questions
from openelm_jax.config import Experiment

if TYPE_CHECKING:
    from openelm_jax.data.pipeline import DataIterator
    from openelm_jax.tokenizer import Tokenizer

LOOP_STEPS = 8


def rows_of(experiment: Experiment) -> Iterator[np.ndarray]:
    """Yield batches of random tokens without end, the same for every caller."""
    random = np.random.default_rng(0)
    shape = (experiment.training.global_batch_size, experiment.model.context_length + 1)
    while True:
        yield random.integers(0, experiment.model.vocab_size, shape, dtype=np.int32)


def serve_steps(connection: Connection, side: str, experiment: Experiment) -> None:
    """Answer "loss" with that before the first update, "device" with the kind of JAX's, a number
    with the seconds of a step in so many."""
    import jax

    from openelm_jax.benchmarks.training_step import our_step, torch_step

    step = {"ours": our_step, "torch": torch_step}[side](experiment)
    rows = rows_of(experiment)
    first_loss = step(next(rows))
    for count in questions(connection):
        if count == "loss":
            connection.send(first_loss)
            continue
        if count == "device":
            connection.send(jax.devices()[0].device_kind)
            continue
        step(next(rows))
        batches = list(itertools.islice(rows, count))
        begin = time.perf_counter()
        for batch in batches:
            step(batch)
        connection.send((time.perf_counter() - begin) / count)


def serve_loop(connection: Connection, experiment: Experiment) -> None:
    """Answer "loop" and "bare" with the seconds of a step in the one and by the other."""
    from openelm_jax.benchmarks.training_step import LEARNING_RATE, compiled_program
    from openelm_jax.training.feed import feed, to_batch

    program, step, state = compiled_program(experiment)
    mesh, rate = program.mesh, program.place_rate(LEARNING_RATE)
    rows = list(itertools.islice(rows_of(experiment), LOOP_STEPS))

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
            state, seconds = _looped(experiment, program, step, state, batches)
        return seconds

    kinds = {"loop": loop, "bare": bare}
    for kind in questions(connection):
        connection.send(kinds[kind]() / LOOP_STEPS)


def serve_text(connection: Connection, experiment: Experiment, tokenizer_file: Path) -> None:
    """Answer "text" and "rows" with the seconds of a step of the loop on either."""
    from openelm_jax.benchmarks.training_step import compiled_program
    from openelm_jax.tokenizer import load_tokenizer
    from openelm_jax.training.feed import feed

    config = experiment.data
    tokenizer = load_tokenizer(tokenizer_file, experiment.model.vocab_size)
    bos_id = tokenizer.bos_id if config.isolate_documents else None
    program, step, state = compiled_program(experiment, bos_id)
    data = open_text(experiment, tokenizer)
    ahead, mesh = config.prefetch, program.mesh
    at_hand = ((row, None) for row in rows_of(experiment))
    with (
        closing(data),
        feed(data, ahead, mesh=mesh, pad_id=data.pad_id, bos_id=bos_id) as text,
        feed(at_hand, ahead, mesh=mesh, bos_id=bos_id) as rows,
    ):
        sources = {"text": text, "rows": rows}
        for kind in questions(connection):
            # The first steps take what was made ahead while the other had its turn.
            state, _ = _looped(experiment, program, step, state, sources[kind])
            state, seconds = _looped(experiment, program, step, state, sources[kind])
            connection.send(seconds / LOOP_STEPS)


def open_text(experiment: Experiment, tokenizer: Tokenizer) -> DataIterator:
    from openelm_jax.data.pipeline import open_data

    return open_data(
        experiment.data,
        tokenizer,
        row_length=experiment.model.context_length + 1,
        global_batch_size=experiment.training.global_batch_size,
    )


def serve_program(connection: Connection, experiment: Experiment) -> None:
    """Answer with the seconds that compiling takes, and the bytes that the program needs."""
    from openelm_jax.benchmarks.training_step import compile_program

    for _ in questions(connection):
        _, compiled = compile_program(experiment)
        assert compiled.cache == "miss"
        connection.send((compiled.seconds, compiled.bytes_held))


def _looped(experiment, program, step, state, batches) -> tuple[Any, float]:
    """Return the state after a few steps of the trainer's loop, and the seconds they took."""
    from openelm_jax.benchmarks.training_step import LEARNING_RATE
    from openelm_jax.training.loop import Logged, train_loop

    def log(logged: Logged) -> None:
        float(logged.metrics.loss)

    begin = time.perf_counter()
    state, _ = train_loop(
        state,
        train_step=step,
        batches=batches,
        learning_rate=lambda step: LEARNING_RATE,
        start=0,
        steps=LOOP_STEPS,
        log=log,
        log_every=experiment.training.log_every,
        save=lambda step, state, position: None,
        save_every=LOOP_STEPS,
        place=program.place_rate,
    )
    return state, time.perf_counter() - begin

"""Our training step beside PyTorch's, our loop beside our bare step and on an experiment's own text
beside rows at hand, and what the step takes to compile and to run: `benchmark train`.

Each side is a process of its own, with the same initial weights, tokens, optimiser and number of
threads. They take turns of a few steps, never at the same time, and each turn begins with a step
that is not counted, so that the caches are its own. A ratio compares two neighbouring turns: other
programs on the machine slow both, and what is quoted is the median of the pairs with its range.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from openelm_jax.benchmarks.processes import ON_THE_CPU, Ask, process
from openelm_jax.benchmarks.report import Figure, median_figure
from openelm_jax.benchmarks.training_sides import (
    open_text,
    serve_loop,
    serve_program,
    serve_steps,
    serve_text,
)
from openelm_jax.config import DType, Experiment
from openelm_jax.errors import UserError
from openelm_jax.model.scaling import flops_per_token, parameter_count
from openelm_jax.parallel.devices import peak_flops
from openelm_jax.training.metrics import speed_figures

TURN_STEPS = 2
FEWEST_PAIRS = 5
# Of the two sides' losses before the first update, relative: they are of the same model.
SAME_LOSS = {"float32": 1e-4, "bfloat16": 1e-2}
LARGE = 100_000_000


def measure_training(
    experiment: Experiment, parts: Iterable[str], *, dtypes: Iterable[DType], seconds: float
) -> list[Figure]:
    """Return the figures of some parts, each of which takes about `seconds` a compute type.

    Raises UserError, before anything is measured, without PyTorch and without text or tokenizer
    for the parts that need them.
    """
    parts = list(parts)
    if "step" in parts:
        _require_torch()
    measures: dict[str, Callable[[Experiment, float], list[Figure]]] = {
        "step": measure_steps,
        "loop": measure_loop,
        "program": measure_program,
    }
    with ExitStack() as stack:
        if "text" in parts:
            tokenizer_file = stack.enter_context(text_at_hand(experiment))
            measures["text"] = partial(measure_text, tokenizer_file=tokenizer_file)
        return [
            figure
            for part in parts
            for dtype in dtypes
            for figure in measures[part](_with_dtype(experiment, dtype), seconds)
        ]


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            "benchmark train compares with PyTorch, which is not installed: "
            "pip install 'openelm_jax[torch]', or leave it out with --part loop."
        )


@contextmanager
def text_at_hand(experiment: Experiment) -> Iterator[Path]:
    """Give the file of the experiment's tokenizer, once its text can be read with it.

    Raises UserError where text or tokenizer are missing.
    """
    from openelm_jax.training.run_directory import TOKENIZER, open_tokenizer

    if not (experiment.tokenizer.path or experiment.tokenizer.vocab_size):
        raise UserError(
            f"--exp {experiment.name} has no tokenizer: give a SentencePiece model with "
            "--tokenizer.path FILE."
        )
    with tempfile.TemporaryDirectory() as directory:
        tokenizer, _ = open_tokenizer(Path(directory), experiment)
        open_text(experiment, tokenizer).close()
        yield Path(directory, TOKENIZER)


def measure_steps(experiment: Experiment, seconds: float) -> list[Figure]:
    """Compare forward, backward, clipping and AdamW of ours with PyTorch eager on the CPU."""
    dtype = experiment.training.dtype
    tokens_per_step = experiment.training.global_batch_size * experiment.model.context_length
    with (
        _side(serve_steps, "ours", experiment) as ours,
        _side(serve_steps, "torch", experiment) as theirs,
    ):
        losses, device = [side("loss") for side in (ours, theirs)], ours("device")
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
        *_flops_figures(experiment, device, [tokens_per_step / pair[0] for pair in pairs]),
    ]


def measure_loop(experiment: Experiment, seconds: float) -> list[Figure]:
    """Compare the trainer's loop and feed with calling the same compiled step in a row."""
    with _side(serve_loop, experiment) as turn:
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


def measure_text(experiment: Experiment, seconds: float, tokenizer_file: Path) -> list[Figure]:
    """Compare the loop on the experiment's own text, read and tokenised as it goes, with rows that
    are at hand."""
    with _side(serve_text, experiment, tokenizer_file) as turn:
        pairs = _alternate(lambda: turn("text"), lambda: turn("rows"), seconds)
    dtype, training = experiment.training.dtype, experiment.training
    tokens_per_step = training.global_batch_size * experiment.model.context_length
    return [
        median_figure(
            "text",
            f"text_{dtype}",
            [tokens_per_step / text for text, _ in pairs],
            "tokens/s",
            f"{dtype}, of the experiment's own text",
        ),
        median_figure(
            "text",
            f"text_to_rows_{dtype}",
            [rows / text for text, rows in pairs],
            "x",
            f"of the speed with rows at hand, {dtype}",
            least=0.98,
        ),
    ]


def measure_program(experiment: Experiment, seconds: float) -> list[Figure]:
    """Return the seconds that the step takes to compile, with no cache, and the memory it needs."""
    with (
        tempfile.TemporaryDirectory() as cache,
        _side(serve_program, experiment, environment={"JAX_COMPILATION_CACHE_DIR": cache}) as ask,
    ):
        compile_seconds, needed = ask("program")
    dtype = experiment.training.dtype
    return [
        Figure(
            part="program",
            name=f"compile_{dtype}",
            value=compile_seconds,
            unit="s",
            meaning=f"to trace and compile the step, {dtype}, nothing cached",
        ),
        Figure(
            part="program",
            name=f"memory_{dtype}",
            value=needed / 2**30,
            unit="GiB",
            meaning=f"of a device at most, state and batch included, {dtype} (XLA's count)",
        ),
    ]


def _flops_figures(experiment: Experiment, device: str, rates: list[float]) -> list[Figure]:
    """Return FLOPs a second at rates of tokens a second, and MFU where the device's peak is known.

    FLOPs are the model's, as train logs them.
    """
    dtype = experiment.training.dtype
    speeds = [
        speed_figures(rate, 3 * flops_per_token(experiment.model), 1, peak_flops(device))
        for rate in rates
    ]
    known = {
        "speed/tflops_per_device": ("tflops", "TFLOP/s", "of the model, forward and backward"),
        "speed/mfu": ("mfu", "", "share of the device's bfloat16 peak"),
    }
    return [
        median_figure(
            "step", f"{name}_{dtype}", [speed[key] for speed in speeds], unit, f"{dtype}, {words}"
        )
        for key, (name, unit, words) in known.items()
        if key in speeds[0]
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


def _side(
    serve: Callable[..., None], *arguments: Any, environment: Mapping[str, str] | None = None
) -> AbstractContextManager[Ask]:
    return process(
        serve,
        *arguments,
        benchmark="benchmark train",
        environment={**ON_THE_CPU, **(environment or {})},
        cure="if memory ran out, take fewer rows with --training.global-batch-size or tokens with "
        "--model.context-length",
    )

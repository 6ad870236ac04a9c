"""The loop: dispatch a step, then look at the one before it.

The device never waits for the host: the metrics of step n - 1 are read while step n runs. Only
what needs a finished step (a checkpoint, a hook) waits for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from openelm_jax.errors import UserError
from openelm_jax.model.decoder import Params
from openelm_jax.training.feed import Fed
from openelm_jax.training.state import TrainState
from openelm_jax.training.step import StepMetrics, TrainStep

Hook = tuple[int, Callable[[int, Params], None]]
"""(every, function(step, params)); called after each step that `every` divides."""


@dataclass(frozen=True, kw_only=True)
class Logged:
    """What is known of a finished step; `seconds` and `tokens` are of the steps since the last."""

    step: int
    metrics: StepMetrics
    learning_rate: float
    position: Any
    seconds: float
    tokens: int


def train_loop(
    state: TrainState,
    *,
    train_step: TrainStep,
    batches: Iterator[Fed],
    learning_rate: Callable[[int], float],
    start: int,
    steps: int,
    log: Callable[[Logged], None],
    log_every: int,
    save: Callable[[int, TrainState, Any], None],
    save_every: int,
    hooks: tuple[Hook, ...] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[TrainState, int]:
    """Run updates `start` to `steps` and return the last state and the updates done.

    The last state is saved, whether the run is complete, was told to stop, or has no more data.
    Raises UserError naming the step when a loss or gradient is not finite; that state is not
    saved.
    """
    done = start
    pending: Logged | None = None
    clock, tokens = time.perf_counter(), 0

    def finish(pending: Logged) -> None:
        """Read a step's metrics (this waits for it) and log them if they are due."""
        nonlocal clock, tokens
        if not (math.isfinite(pending.metrics.loss) and math.isfinite(pending.metrics.grad_norm)):
            raise UserError(
                f"step {pending.step}: the loss is {float(pending.metrics.loss)} and the gradient "
                f"norm {float(pending.metrics.grad_norm)}; nothing of this step was saved. Begin "
                "another --run with a lower optimizer.peak_lr or other data; --from THIS_RUN "
                "starts it with the weights of the last checkpoint."
            )
        tokens += pending.tokens
        if pending.step % log_every == 0 or pending.step in (start + 1, steps):
            now = time.perf_counter()
            log(replace(pending, seconds=now - clock, tokens=tokens))
            clock, tokens = time.perf_counter(), 0

    while done < steps:
        try:
            batch, position = next(batches)
        except UserError:
            if pending is not None:
                finish(pending)
            if done > start:
                save(done, state, position)
            raise
        rate = learning_rate(done)
        state, metrics = train_step(state, batch, jnp.float32(rate))
        if pending is not None:
            finish(pending)
        done += 1
        pending = Logged(
            step=done,
            metrics=metrics,
            learning_rate=rate,
            position=position,
            seconds=0.0,
            tokens=batch.counted_BT.size,
        )
        stopping = should_stop()
        due = [function for every, function in hooks if every and done % every == 0]
        saving = stopping or done == steps or done % save_every == 0
        if saving or due:
            finish(pending)
            pause = time.perf_counter()
            if saving:
                save(done, state, position)
            for function in due if not stopping else []:
                function(done, state.params)
            if not saving and should_stop():  # told so while a hook ran
                stopping = True
                save(done, state, position)
            clock += time.perf_counter() - pause
            pending = None
        if stopping:
            break
    return state, done

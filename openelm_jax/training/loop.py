"""The loop: dispatch a step, then look at the one before it.

The device never waits for the host: the metrics of step n - 1 are read while step n runs. Only
what needs a finished step (a checkpoint, a hook, a profile) waits for it. Nothing moves between
host and device unless it is said so here: the learning rate, the metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from openelm_jax.errors import UserError
from openelm_jax.model.decoder import Params
from openelm_jax.training.clock import Clock
from openelm_jax.training.feed import Fed
from openelm_jax.training.profile import Profile
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
    place: Callable[[np.float32], jax.Array] = jax.device_put,
    clock: Clock | None = None,
    profile: Profile | None = None,
) -> tuple[TrainState, int]:
    """Run updates `start` to `steps` and return the last state and the updates done.

    The last state is saved, whether the run is complete, was told to stop, or has no more data.
    `place` puts the learning rate where `train_step` wants it. Raises UserError naming the step
    when a loss or gradient is not finite; that state is not saved.
    """
    clock = clock or Clock()
    clock.steps_begin()
    done = start
    pending: Logged | None = None
    since, tokens = clock.now(), 0

    def finish(pending: Logged) -> None:
        """Read a step's metrics (this waits for it) and log them if they are due."""
        nonlocal since, tokens
        metrics = pending.metrics
        loss, grad_norm = jax.device_get((metrics.loss, metrics.grad_norm))
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise UserError(
                f"step {pending.step}: the loss is {float(loss)} and the gradient "
                f"norm {float(grad_norm)}; nothing of this step was saved. Begin "
                "another --run with a lower optimizer.peak_lr or other data; --from THIS_RUN "
                "starts it with the weights of the last checkpoint."
            )
        tokens += pending.tokens
        if pending.step % log_every == 0 or pending.step in (start + 1, steps):
            now = clock.now()
            read = jax.device_get(metrics)
            log(replace(pending, metrics=read, seconds=now - since, tokens=tokens))
            since, tokens = clock.now(), 0

    try:
        while done < steps:
            asked = clock.now()
            try:
                batch, position = next(batches)
            except UserError:
                if jax.process_count() > 1:
                    raise  # the others are in the next step: nothing can be done together
                if pending is not None:
                    finish(pending)
                if done > start:
                    save(done, state, position)
                raise
            if pending is None or _is_done(pending.metrics):  # else the device had work
                clock.lose("data", clock.now() - asked)
            if profile is not None and profile.starts(done + 1):
                if pending is not None:
                    finish(pending)
                    pending = None
                profile.start(done + 1)
            rate = learning_rate(done)
            rate_on_device = place(np.float32(rate))
            if profile is None:
                state, metrics = train_step(state, batch, rate_on_device)
            else:
                with profile.annotated(done + 1):
                    state, metrics = train_step(state, batch, rate_on_device)
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
            recorded = profile if profile is not None and profile.ends(done) else None
            if saving or due or recorded:
                finish(pending)
                pending = None
                pause = clock.now()
                if recorded is not None:
                    with clock.losing("hooks"):
                        recorded.stop(done)
                if saving:
                    with clock.losing("save"):
                        save(done, state, position)
                for function in due if not stopping else []:
                    with clock.losing("hooks"):
                        function(done, state.params)
                if not saving and should_stop():  # told so while a hook ran
                    stopping = True
                    with clock.losing("save"):
                        save(done, state, position)
                since += clock.now() - pause
            if stopping:
                break
    finally:
        if profile is not None:
            profile.stop(done)
    return state, done


def _is_done(metrics: StepMetrics) -> bool:
    return metrics.loss.is_ready()  # type: ignore[attr-defined]

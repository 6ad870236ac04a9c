"""The loop logs, saves and calls at the right steps, and never makes the device wait.

The model is left out: a pretended step counts, and its metrics remember when they are read.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openelm_jax.errors import UserError
from openelm_jax.training.clock import Clock
from openelm_jax.training.feed import feed
from openelm_jax.training.loop import train_loop
from openelm_jax.training.state import TrainState
from openelm_jax.training.step import StepMetrics

TOKENS = 8  # of a batch


class Scalar:
    """A number on a pretended device; reading it is an event."""

    def __init__(self, run, step, value):
        self._run, self._step, self._value = run, step, value

    def __float__(self):
        self._run.note("read", self._step)
        return self._value

    def is_ready(self):
        return self._run.device_waits


class Run:
    """A loop's surroundings, pretended; `events` is what happened, in order."""

    def __init__(self, losses=None, data_ends_after=None):
        self.events = []
        self.logged = []
        self.saved = []
        self.device_waits = False
        self._losses = losses or {}
        self._data_ends_after = data_ends_after

    def note(self, *event):
        if not self.events or self.events[-1] != event:
            self.events.append(event)

    def rows(self, start):
        index = start
        while index != self._data_ends_after:
            yield np.zeros((2, TOKENS // 2 + 1), np.int32), f"after {index + 1}"
            index += 1
        raise UserError("a bad shard")

    def step(self, state, batch, learning_rate):
        done = state.step + 1
        self.note("step", done)
        loss = Scalar(self, done, self._losses.get(done, 10.0 - done))
        one = Scalar(self, done, 1.0)
        metrics = StepMetrics(loss, one, one, one)
        return TrainState(done, {"rates": [*state.params["rates"], float(learning_rate)]}, None), (
            metrics
        )

    def save(self, step, state, position):
        assert state.step == step
        self.note("save", step)
        self.saved.append((step, position))

    def log(self, logged):
        self.note("log", logged.step)
        self.logged.append(logged)

    def train(self, *, start=0, steps=6, log_every=1, save_every=100, **more):
        state = TrainState(start, {"rates": []}, None)
        with feed(self.rows(start), 0) as batches:
            return train_loop(
                state,
                train_step=self.step,
                batches=batches,
                learning_rate=lambda step: 2.0**-step,
                start=start,
                steps=steps,
                log=self.log,
                log_every=log_every,
                save=self.save,
                save_every=save_every,
                **more,
            )


def test_a_step_is_dispatched_before_the_metrics_of_the_one_before_are_read():
    run = Run()

    run.train(steps=4)

    assert [event for event in run.events if event[0] in ("step", "read")] == [
        ("step", 1),
        ("step", 2),
        ("read", 1),
        ("step", 3),
        ("read", 2),
        ("step", 4),
        ("read", 3),
        ("read", 4),
    ]


def test_each_update_has_its_own_learning_rate_and_the_last_state_is_returned():
    state, done = Run().train(start=2, steps=5)

    assert done == 5
    assert state.step == 5
    assert state.params["rates"] == [2.0**-2, 2.0**-3, 2.0**-4]


@pytest.mark.parametrize(("start", "expected"), [(0, [1, 3, 6, 7]), (3, [4, 6, 7]), (4, [5, 6, 7])])
def test_the_first_the_last_and_every_third_step_are_logged(start, expected):
    run = Run()

    run.train(start=start, steps=7, log_every=3)

    assert [logged.step for logged in run.logged] == expected


def test_a_log_line_has_its_own_step_s_figures_and_the_tokens_since_the_last():
    run = Run()

    run.train(steps=7, log_every=3)

    assert [float(logged.metrics.loss) for logged in run.logged] == [9.0, 7.0, 4.0, 3.0]
    assert [logged.learning_rate for logged in run.logged] == [1.0, 2**-2, 2**-5, 2**-6]
    assert [logged.position for logged in run.logged] == [f"after {i}" for i in (1, 3, 6, 7)]
    assert [logged.tokens for logged in run.logged] == [TOKENS, 2 * TOKENS, 3 * TOKENS, TOKENS]
    assert all(logged.seconds > 0 for logged in run.logged)


def test_states_are_saved_with_their_own_positions_and_the_last_one_always():
    run = Run()

    run.train(steps=7, save_every=3)

    assert run.saved == [(3, "after 3"), (6, "after 6"), (7, "after 7")]


def test_a_step_s_loss_is_read_before_it_is_saved():
    run = Run()

    run.train(steps=4, save_every=2)

    for step in (2, 4):
        assert run.events.index(("read", step)) < run.events.index(("save", step))


def test_hooks_get_the_parameters_of_their_steps_after_the_save():
    run, calls = Run(), []

    def hook(name):
        def call(step, params):
            run.note(name, step)
            calls.append((name, step, len(params["rates"])))

        return call

    run.train(steps=6, save_every=2, hooks=((2, hook("a")), (3, hook("b")), (0, hook("never"))))

    assert calls == [("a", 2, 2), ("b", 3, 3), ("a", 4, 4), ("a", 6, 6), ("b", 6, 6)]
    assert run.events[-3:] == [("save", 6), ("a", 6), ("b", 6)]


def test_the_time_of_saves_and_hooks_is_not_the_steps_time(now):
    """On a clock that moves in save and hook alone, steps take no time."""
    run = Run()

    def slow(step, params):
        now[0] += 100.0

    run.train(steps=4, hooks=((2, slow),))

    assert now == [200.0]
    assert [logged.seconds for logged in run.logged] == [0.0, 0.0, 0.0, 0.0]


@pytest.fixture
def now(monkeypatch):
    """Return the time in a list; it moves only where a test moves it."""
    now = [0.0]
    monkeypatch.setattr("openelm_jax.training.clock.time.perf_counter", lambda: now[0])
    return now


def test_seconds_without_steps_are_counted_by_what_they_went_into(now):
    run = Run()

    def slow(seconds, what):
        def call(*arguments):
            now[0] += seconds
            return what(*arguments)

        return call

    clock = Clock()
    now[0] += 7.0  # reading the tokenizer
    with clock.losing("compile"):
        now[0] += 20.0
    run.step = slow(4.0, run.step)
    run.save = slow(30.0, run.save)

    run.train(steps=5, save_every=5, hooks=((4, slow(10.0, lambda *_: None)),), clock=clock)

    assert clock.figures() == {
        "time/elapsed": 7 + 20 + 5 * 4 + 10 + 30,
        "time/start": 7.0,
        "time/compile": 20.0,
        "time/data": 0.0,
        "time/save": 30.0,
        "time/hooks": 10.0,
        "goodput": 20 / 87,
    }


@pytest.mark.parametrize(("device_waits", "lost"), [(True, 4 * 3.0), (False, 3.0)])
def test_waiting_for_a_batch_is_lost_only_while_the_device_has_nothing_to_do(
    now, device_waits, lost
):
    run, clock = Run(), Clock()
    run.device_waits = device_waits  # a step is done before the next batch comes
    rows = run.rows

    def slow_rows(start):
        for row in rows(start):
            now[0] += 3.0
            yield row

    run.rows = slow_rows

    run.train(steps=4, clock=clock)

    assert clock.figures()["time/data"] == lost


def train_on_device(**more):
    """Train a number on the device, with the loop's every part in this thread, and return it."""

    @jax.jit
    def step(state, batch, rate):
        params = {"x": state.params["x"] - rate * batch.tokens_BL.mean()}
        loss = params["x"] ** 2
        return TrainState(state.step + 1, params, None), StepMetrics(loss, loss, loss, loss)

    state = TrainState(jnp.int32(0), {"x": jnp.float32(1)}, None)
    rows = ((np.full((2, 3), index, np.int32), None) for index in range(1, 5))
    logged = []
    with feed(rows, 0) as batches, jax.transfer_guard("disallow"):
        train_loop(
            state,
            train_step=step,
            batches=batches,
            learning_rate=lambda step: 2.0**-step,
            start=0,
            steps=4,
            log=lambda line: logged.append(float(line.metrics.loss)),
            log_every=2,
            save=lambda step, state, position: None,
            save_every=3,
            **more,
        )
    return logged


def test_nothing_moves_between_host_and_device_unasked():
    values = 1 - np.cumsum([1 / 1, 2 / 2, 3 / 4, 4 / 8])

    assert train_on_device() == pytest.approx(list(values[[0, 1, 3]] ** 2))

    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        train_on_device(place=jnp.float32)


def test_told_to_stop_it_saves_the_step_in_progress_and_stops():
    run = Run()

    _, done = run.train(should_stop=lambda: ("step", 3) in run.events)

    assert done == 3
    assert run.saved == [(3, "after 3")]
    assert run.logged[-1].step == 3


@pytest.mark.parametrize("save_every", [2, 100])
def test_told_to_stop_where_a_hook_is_due_it_saves_and_stops_without_it(save_every):
    run, calls = Run(), []

    _, done = run.train(
        save_every=save_every,
        hooks=((2, lambda step, params: calls.append(step)),),
        should_stop=lambda: ("step", 4) in run.events,
    )

    assert done == 4
    assert calls == [2]
    assert run.saved[-1] == (4, "after 4")


def test_told_to_stop_while_a_hook_runs_it_saves_that_step_and_stops():
    run = Run()

    _, done = run.train(
        hooks=((2, lambda step, params: run.note("hook", step)),),
        should_stop=lambda: ("hook", 4) in run.events,
    )

    assert done == 4
    assert run.saved == [(4, "after 4")]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("save_every", [1, 2, 3, 100])
def test_a_loss_that_is_not_finite_stops_the_run_by_name_and_is_not_saved(bad, save_every):
    run = Run(losses={4: bad})

    with pytest.raises(UserError, match=rf"^step 4: the loss is {bad} .*optimizer\.peak_lr"):
        run.train(save_every=save_every)

    assert run.saved == [(step, f"after {step}") for step in range(save_every, 4, save_every)]
    assert run.logged[-1].step == 3


def test_a_loss_that_is_not_finite_is_not_saved_when_the_data_fails_too():
    run = Run(losses={4: math.nan}, data_ends_after=4)

    with pytest.raises(UserError, match="step 4: the loss is nan"):
        run.train()

    assert run.saved == []


@pytest.mark.parametrize("hook_every", [0, 2])
def test_what_is_done_is_saved_when_the_data_fails(hook_every):
    run = Run(data_ends_after=4)

    with pytest.raises(UserError, match="a bad shard"):
        run.train(hooks=((hook_every, lambda step, params: None),))

    assert run.saved == [(4, "after 4")]
    assert run.logged[-1].step == 4


def test_nothing_is_saved_when_the_data_fails_before_the_first_step():
    run = Run(data_ends_after=2)

    with pytest.raises(UserError, match="a bad shard"):
        run.train(start=2)

    assert run.saved == []

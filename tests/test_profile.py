"""`training.profile_steps` records these steps, whole, and nothing else."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openelm_jax.training.feed import feed
from openelm_jax.training.loop import train_loop
from openelm_jax.training.profile import Profile
from openelm_jax.training.state import TrainState
from openelm_jax.training.step import StepMetrics


@jax.jit
def step(state, batch, rate):
    loss = state.params["x"] * rate + batch.tokens_BL.sum()
    return TrainState(state.step + 1, state.params, None), StepMetrics(loss, loss, loss, loss)


def train(run: Path, profile_steps: str | None, *, start: int = 0, steps: int = 6, **more):
    """Train and return the lines that were said."""
    said: list[str] = []
    state = TrainState(jnp.int32(start), {"x": jnp.float32(1)}, None)
    rows = ((np.ones((2, 3), np.int32), None) for _ in range(100))
    with feed(rows, 0) as batches:
        train_loop(
            state,
            train_step=step,
            batches=batches,
            learning_rate=lambda step: 0.1,
            start=start,
            steps=steps,
            log=lambda logged: None,
            log_every=1,
            save=lambda step, state, position: None,
            save_every=100,
            profile=Profile(profile_steps, run, said.append),
            **more,
        )
    return said


def recorded_steps(run: Path) -> list[int]:
    """Return the numbers of the steps in the one record of `run`."""
    (record,) = run.glob("profile/plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(record.read_bytes()))["traceEvents"]
    marks = [event for event in events if event.get("name") == "train"]
    return sorted(int(mark["args"]["step_num"]) for mark in marks)


@pytest.mark.parametrize(
    ("asked", "start", "steps", "expected"),
    [
        ("2:4", 0, 6, [2, 3, 4]),
        ("2:4", 3, 6, [4]),  # a run that goes on between them
        ("5:9", 0, 6, [5, 6]),  # a run that ends between them
    ],
)
def test_the_steps_asked_for_are_recorded_and_a_line_says_where(
    tmp_path: Path, asked, start, steps, expected
) -> None:
    said = train(tmp_path, asked, start=start, steps=steps)

    assert recorded_steps(tmp_path) == expected
    (line,) = said
    assert line.startswith(
        f"profile of steps {expected[0]} to {expected[-1]}: {tmp_path / 'profile'}; open "
    )


@pytest.mark.parametrize(("asked", "start"), [(None, 0), ("2:4", 4), ("7:9", 0)])
def test_nothing_is_recorded_where_no_step_is_asked_for(tmp_path: Path, asked, start) -> None:
    assert train(tmp_path, asked, start=start) == []
    assert not (tmp_path / "profile").exists()


def test_the_record_ends_after_the_last_step_has_been_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are dispatched ahead; the record waits for the metrics of its last one."""
    events: list[str] = []
    device_get = jax.device_get
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: events.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: events.append("stop"))
    monkeypatch.setattr(jax, "device_get", lambda x: events.append("read") or device_get(x))

    train(tmp_path, "2:3", steps=5)

    assert events[: events.index("stop") + 1] == [*["read"] * 2, "start", *["read"] * 4, "stop"]


def test_the_record_is_written_when_the_run_fails_within_it(tmp_path: Path) -> None:
    def fail(step, params):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        train(tmp_path, "2:5", hooks=((3, fail),))

    assert recorded_steps(tmp_path) == [2, 3]

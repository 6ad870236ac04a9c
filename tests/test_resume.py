"""A run stopped and continued is the unbroken run, bit for bit: losses, parameters, moments.

Every piece is the real one: the data, the feed with its prefetching, the loop, the checkpoints.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from small_runs import small_experiment, write_corpus

from openelm_jax.data.pipeline import Position, open_data
from openelm_jax.model.decoder import Decoder, init_params
from openelm_jax.tokenizer import load_tokenizer
from openelm_jax.training.checkpoint import Checkpointer
from openelm_jax.training.feed import feed
from openelm_jax.training.loop import train_loop
from openelm_jax.training.optimizer import learning_rate, make_optimizer
from openelm_jax.training.state import TrainState, new_state
from openelm_jax.training.step import make_train_step

STEPS = 16


class Pieces(NamedTuple):
    """What all runs share: the experiment, its compiled step, its first state."""

    experiment: object
    step: object
    first: TrainState


class Result(NamedTuple):
    """The losses by step, the last state, and the position that belongs to it."""

    losses: dict[int, float]
    state: TrainState
    position: dict


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Pieces:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    experiment = small_experiment(folder)
    optimizer = make_optimizer(experiment.optimizer)
    step = make_train_step(Decoder(experiment.model), optimizer, experiment.training)
    first = new_state(init_params(experiment.model, 0), optimizer)
    return Pieces(experiment, jax.jit(step, donate_argnums=0), first)


def train(pieces: Pieces, run: Path, *, stop_at: int = STEPS, prefetch: int = 0) -> Result:
    """Begin or continue a run as the command does, up to a step."""
    experiment = pieces.experiment
    data = open_data(
        experiment.data,
        load_tokenizer(experiment.tokenizer.path),
        row_length=experiment.model.context_length + 1,
        global_batch_size=experiment.training.global_batch_size,
    )
    checkpointer = Checkpointer(run, experiment.checkpoint)
    like = pieces.first
    restored = checkpointer.restore(like.params, {"step": like.step, "moments": like.moments})
    if restored is None:
        start, state = 0, jax.tree.map(jnp.copy, like)  # the step gives its state's memory away
    else:
        start, state = restored.step, TrainState(params=restored.params, **restored.optimizer)
        data.set_state(Position.from_json(restored.data))
    losses, saved, steps_begun = {}, {}, []

    def step(*arguments):
        steps_begun.append(None)
        return pieces.step(*arguments)

    def save(step, state, position):
        item = {"step": state.step, "moments": state.moments}
        saved[step] = position.to_json()
        checkpointer.save(step, params=state.params, optimizer=item, data=saved[step])

    with closing(checkpointer), closing(data), feed(data, prefetch) as batches:
        state, done = train_loop(
            state,
            train_step=step,
            batches=batches,
            learning_rate=lambda step: learning_rate(experiment.optimizer, STEPS, step),
            start=start,
            steps=STEPS,
            log=lambda logged: losses.update({logged.step: float(logged.metrics.loss)}),
            log_every=1,
            save=save,
            save_every=experiment.checkpoint.every,
            should_stop=lambda: start + len(steps_begun) == stop_at,
        )
    assert done == stop_at
    return Result(losses, state, saved[done])


@pytest.fixture(scope="module")
def unbroken(pieces: Pieces, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(pieces, tmp_path_factory.mktemp("unbroken"))


def assert_same_end(result: Result, expected: Result) -> None:
    assert result.position == expected.position
    ours, theirs = (jax.tree_util.tree_leaves_with_path(r.state) for r in (result, expected))
    for (path, a), (_, b) in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert jax.device_get(a).tobytes() == jax.device_get(b).tobytes(), path


def epochs(position: dict) -> list[int]:
    column = position["columns"].index("epoch")
    return [lane[0][column] for lane in position["table"]]


def test_the_unbroken_run_learns_and_crosses_the_end_of_an_epoch(unbroken: Result) -> None:
    assert list(unbroken.losses) == list(range(1, STEPS + 1))
    assert unbroken.losses[STEPS] < unbroken.losses[1] - 0.5
    assert min(epochs(unbroken.position)) >= 1


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_stopped_and_continued_it_is_the_unbroken_run(
    pieces: Pieces, unbroken: Result, tmp_path: Path, prefetch: int
) -> None:
    before = train(pieces, tmp_path, stop_at=5, prefetch=prefetch)
    after = train(pieces, tmp_path, prefetch=prefetch)

    assert max(epochs(before.position)) == 0  # the end of an epoch comes after the stop
    assert before.losses | after.losses == unbroken.losses
    assert_same_end(after, unbroken)


def test_stopped_twice_and_continued_with_another_prefetch_it_still_is(
    pieces: Pieces, unbroken: Result, tmp_path: Path
) -> None:
    stops = [(3, 4), (4, 0), (11, 1), (STEPS, 4)]
    results = [train(pieces, tmp_path, stop_at=stop, prefetch=depth) for stop, depth in stops]

    assert results[0].losses.keys() == {1, 2, 3}
    assert results[1].losses.keys() == {4}
    losses = {step: loss for result in results for step, loss in result.losses.items()}
    assert losses == unbroken.losses
    assert_same_end(results[-1], unbroken)


def test_what_was_done_after_the_last_checkpoint_is_done_again(
    pieces: Pieces, unbroken: Result, tmp_path: Path
) -> None:
    """A run killed at step 9 has step 6 on disk, whatever it had prefetched."""

    class Killed(BaseException):
        pass

    def killed(state, *arguments):
        if int(state.step) == 9:
            raise Killed
        return pieces.step(state, *arguments)

    with pytest.raises(Killed):
        train(pieces._replace(step=killed), tmp_path, prefetch=4)
    after = train(pieces, tmp_path, prefetch=4)

    assert after.losses == {step: unbroken.losses[step] for step in range(7, STEPS + 1)}
    assert_same_end(after, unbroken)

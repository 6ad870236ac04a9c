"""`python -m openelm_jax.train`, whole: it trains, saves, stops when told, goes on to the bit."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from small_runs import (
    assert_equal_bits,
    assert_one_sentence,
    call,
    environment,
    params_of,
    read_metrics,
    train_command,
    write_corpus,
)

from openelm_jax.experiment_file import load_experiment
from openelm_jax.weights.orbax import saved_steps

STEPS = 60
FLAGS = ("--training.steps", str(STEPS), "--training.validate-every", "24")


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def unbroken(experiment: Path, tmp_path_factory: pytest.TempPathFactory, compiled_code: Path):
    """Return a run that nothing interrupted, and what it said."""
    run = tmp_path_factory.mktemp("unbroken") / "run"
    return run, call(train_command(experiment, run, *FLAGS), compiled_code)


def figures(run: Path, name: str) -> dict[int, float]:
    return {line["step"]: line[name] for line in read_metrics(run) if name in line}


def test_it_trains_and_the_loss_falls(unbroken) -> None:
    run, _ = unbroken

    losses = figures(run, "train/loss")

    assert list(losses) == [1, *range(4, STEPS + 1, 4)]
    assert losses[1] == pytest.approx(np.log(384), rel=0.1)  # nothing is known yet
    assert losses[STEPS] < losses[1] - 1


def test_a_line_of_metrics_says_what_was_done(unbroken) -> None:
    run, _ = unbroken

    last = [line for line in read_metrics(run) if "train/loss" in line][-1]

    assert last["train/tokens"] == STEPS * 4 * 32
    rate = 0.001 + 0.0045 * (1 + np.cos(np.pi * 55 / 57))  # peak 0.01, warm-up 4, period 57
    assert last["train/learning_rate"] == pytest.approx(rate, abs=1e-8)
    assert last["train/grad_norm"] > 0
    assert last["speed/tokens_per_second"] > 0
    assert last["data/text/rows"] == STEPS * 4
    assert last["data/text/least_epochs"] >= 1


def test_it_validates_on_the_held_out_text_when_due_and_at_the_end(unbroken) -> None:
    run, said = unbroken

    losses, bits = (figures(run, f"validation/{name}") for name in ("loss", "bits_per_byte"))

    assert list(losses) == list(bits) == [24, 48, STEPS]
    assert losses[STEPS] < np.log(384)
    assert "held out: 3 documents" in said
    assert f"step {STEPS}: {losses[STEPS]:.4f} nats a token, {bits[STEPS]:.4f} bits a byte" in said


def test_it_saves_when_due_and_at_the_end_and_keeps_the_last_three(unbroken) -> None:
    run, said = unbroken

    assert saved_steps(run) == [48, 54, 60]
    assert f"step {STEPS} saved" in said


def test_the_same_command_again_says_that_the_run_is_complete(
    experiment: Path, unbroken, compiled_code: Path
) -> None:
    run, _ = unbroken
    before = read_metrics(run)

    said = call(train_command(experiment, run, *FLAGS), compiled_code)

    assert f"{run} is complete: {STEPS} of {STEPS} steps" in said
    assert read_metrics(run) == before


def interrupt(command: list[str], run: Path, compiled_code: Path, number: int) -> tuple[int, str]:
    """Start a command, send it a signal when it has logged a step, return its code and stderr."""
    size = metrics_size(run)
    process = subprocess.Popen(
        command, env=environment(compiled_code), stderr=subprocess.PIPE, text=True
    )
    try:
        while metrics_size(run) <= size:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.005)
        process.send_signal(number)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, said


def metrics_size(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.stat().st_size if path.is_file() else 0


@pytest.mark.heavy
def test_stopped_by_sigterm_and_sigint_it_saves_and_goes_on_to_the_very_same_end(
    experiment: Path, unbroken, tmp_path: Path, compiled_code: Path
) -> None:
    run = tmp_path / "run"
    # A checkpoint at every step makes steps slow enough to be interrupted.
    slowly = train_command(experiment, run, *FLAGS, "--checkpoint.every", "1")

    code, said = interrupt(slowly, run, compiled_code, signal.SIGTERM)

    assert code == 143
    assert "SIGTERM: saving, then stopping" in said
    first = saved_steps(run)[-1]
    assert 0 < first < STEPS
    assert f"step {first} saved" in said

    code, said = interrupt(slowly, run, compiled_code, signal.SIGINT)

    assert code == 130
    assert f"resumed at step {first} of" in said
    second = saved_steps(run)[-1]
    assert first < second < STEPS

    said = call(train_command(experiment, run, *FLAGS), compiled_code)

    assert f"resumed at step {second} of" in said
    assert_equal_bits(params_of(run, STEPS), params_of(unbroken[0], STEPS))
    for name in ("train/loss", "train/grad_norm", "validation/loss", "data/text/kept_tokens"):
        ours, expected = figures(run, name), figures(unbroken[0], name)
        assert ours[STEPS] == expected[STEPS]
        assert expected.items() <= ours.items()  # a restart logs its first step besides
    steps = [line["step"] for line in read_metrics(run) if "train/loss" in line]
    assert steps == sorted(set(steps))


def test_from_starts_from_weights_at_step_zero(
    experiment: Path, unbroken, tmp_path: Path, compiled_code: Path
) -> None:
    """One update with a learning rate that rounds to nothing leaves the weights as they were."""
    run, _ = unbroken
    still = ("--optimizer.peak-lr", "1e-12", "--optimizer.initial-lr", "0")
    flags = ("--training.steps", "1", *still, "--from", f"{run}@54")

    call(train_command(experiment, tmp_path, *flags), compiled_code)

    assert_equal_bits(params_of(tmp_path, 1), params_of(run, 54))
    assert list(figures(tmp_path, "train/loss")) == [1]
    assert figures(tmp_path, "train/tokens") == {1: 128}


def test_a_run_of_another_experiment_is_refused_by_the_fields_that_differ(
    experiment: Path, unbroken, train_here
) -> None:
    run, _ = unbroken
    flags = ("--optimizer.peak-lr", "0.5", "--model.num-layers", "3")

    said = train_here(experiment, run, *FLAGS, *flags, code=1)

    assert_one_sentence(
        said,
        f"{run} was made by another experiment",
        "model.num_layers: 2, 3; optimizer.peak_lr: 0.01, 0.5",
        "Choose another --run",
    )


def test_weights_of_another_shape_are_refused_by_the_fields_that_differ(
    experiment: Path, unbroken, tmp_path: Path, train_here
) -> None:
    flags = ("--model.num-layers", "3", "--from", str(unbroken[0]))

    said = train_here(experiment, tmp_path, *flags, code=1)

    assert_one_sentence(said, "is another model", "model.num_layers: 2, 3")


def test_an_experiment_without_data_names_both_flags_in_one_sentence(
    tmp_path: Path, compiled_code: Path
) -> None:
    run = tmp_path / "run"
    command = train_command(Path("3b"), run)

    said = call(command, compiled_code, code=1)

    assert_one_sentence(said, "--data.root DIR", "--tokenizer FILE")
    assert len(said.splitlines()) == 1
    assert not run.exists()
    assert load_experiment("3b").tokenizer.path is None

"""`train --from` a training checkpoint of CoreNet's goes on at its step, on any mesh."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import numpy as np
import pytest
from corenet_files import corenet_names, save_training_checkpoint
from small_models import random_params
from small_runs import (
    assert_one_sentence,
    environment,
    params_of,
    read_metrics,
    small_experiment,
    train_command,
    write_corpus,
)

from openelm_jax.training.optimizer import learning_rate
from openelm_jax.training.start import read_start
from openelm_jax.weights.names import to_reference
from openelm_jax.weights.orbax import open_params, saved_steps, step_directory
from openelm_jax.weights.stored import in_memory

torch = pytest.importorskip("torch")

STEP, UPDATES, STEPS, ROWS = 9, 7, 12, 380


@pytest.fixture(scope="module")
def experiment(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def checkpoint(experiment) -> Path:
    """A checkpoint without a YAML, of fewer rows than the experiment has, resumed twice before."""
    config = dataclasses.replace(small_experiment(experiment.parent).model, vocab_size=ROWS)
    weights, first = (
        {
            name: torch.tensor(np.array(array * scale))
            for name, array in to_reference(
                config, in_memory(config, random_params(config, std)).read, "corenet"
            )
        }
        for scale, std in ((1.0, 0.1), (1e-3, 1.0))
    )
    names = corenet_names(config.num_layers)
    order = [n for n in names if weights[n].ndim == 2] + [n for n in names if weights[n].ndim == 1]
    states = {
        number: {
            "step": torch.tensor(float(UPDATES)),
            "exp_avg": first[name],
            "exp_avg_sq": first[name].square(),
        }
        for number, name in enumerate(order)
    }
    num_matrices = sum(weights[name].ndim == 2 for name in names)
    groups = [
        {"params": list(range(num_matrices))},
        {"params": list(range(num_matrices, len(names)))},
    ]
    file = experiment.parent / "training_checkpoint_epoch_0_iter_9.pt"
    save_training_checkpoint(file, weights, {"state": states, "param_groups": groups}, STEP)
    return file


def flags(checkpoint: Path) -> list[str]:
    return ["--from", str(checkpoint), "--training.steps", str(STEPS)]


@pytest.fixture
def run(experiment, checkpoint, tmp_path, train_here) -> tuple[Path, str]:
    """Return a run that went on for three updates, and what it said."""
    said = train_here(experiment, tmp_path / "run", *flags(checkpoint))
    return tmp_path / "run", said


def test_it_goes_on_at_the_step_with_the_moments(experiment, checkpoint, run, train_here):
    directory, said = run

    assert f"{checkpoint}: 4 rows added to its vocabulary of 380" in said
    assert "going on at step 9 with its moments; the data begins anew" in said
    assert saved_steps(directory) == [STEPS]
    figures = {line["step"]: line for line in read_metrics(directory) if "train/loss" in line}
    optimizer = small_experiment(experiment.parent).optimizer
    assert figures[STEP + 1]["train/learning_rate"] == learning_rate(optimizer, STEPS, STEP)
    read = open_params(step_directory(directory, STEPS), "optimizer")
    assert read(("step",)) == STEPS
    assert read(("moments", "0", "count")) == UPDATES + STEPS - STEP
    assert "resumed at step 12" in train_here(experiment, directory, *flags(checkpoint))


@pytest.mark.heavy
def test_it_goes_on_alike_on_a_mesh(experiment, checkpoint, run, tmp_path, compiled_code):
    mesh = ["--mesh.fsdp", "2", "--mesh.tensor", "2"]
    command = train_command(experiment, tmp_path / "mesh", *flags(checkpoint), *mesh)
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}

    subprocess.run(command, env=environment(compiled_code) | devices, check=True)

    ours, meshed = params_of(run[0], STEPS), params_of(tmp_path / "mesh", STEPS)
    for name, array in ours.items():
        np.testing.assert_allclose(meshed[name], array, atol=1e-5, err_msg=name)


def test_new_rows_have_had_no_gradient(experiment, checkpoint):
    wanted = small_experiment(experiment.parent)

    start = read_start(str(checkpoint), wanted, str(experiment), print)

    for moment in (start.moments.first, start.moments.second):
        assert moment["embedding"].shape == (384, 32)
        assert not moment["embedding"][ROWS:].any()
        assert moment["embedding"][:ROWS].any()


def test_a_step_after_the_last_is_refused(experiment, checkpoint, tmp_path, train_here):
    flags = ("--from", str(checkpoint), "--training.steps", "9")

    said = train_here(experiment, tmp_path / "run", *flags, code=1)

    assert_one_sentence(said, "has had 9 updates and training.steps is 9")

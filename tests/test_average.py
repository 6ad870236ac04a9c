"""The mean of a run's checkpoints: exact, in the type of the run, and taken by every verb."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from saved_params import saved_params
from small_models import random_params, tiny

from openelm_jax import average, export
from openelm_jax.config import (
    CheckpointConfig,
    Experiment,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import to_json
from openelm_jax.tokenizer import train_tokenizer
from openelm_jax.training.checkpoint import Checkpointer
from openelm_jax.weights import averaging
from openelm_jax.weights.load import open_weights
from openelm_jax.weights.stored import in_memory, read_params

MODEL = ModelConfig(
    num_layers=2, model_dim=32, head_dim=8, vocab_size=320, num_gqa_groups=2, ffn_dim_divisor=16
)
STEPS = (0, 10, 20, 30)


def params_of_step(step: int) -> dict:
    """Return weights on which float32 loses what float64 keeps."""
    rng = np.random.default_rng(step)
    return jax.tree.map(
        lambda leaf: (leaf * 10.0 ** rng.uniform(-4, 4, leaf.shape)).astype(np.float32),
        random_params(MODEL),
    )


def save(directory: Path, step: int, params: dict) -> None:
    checkpointer = Checkpointer(directory, CheckpointConfig(keep_every=10))
    checkpointer.save(step, params=params, optimizer={"step": np.array(step)}, data={})
    checkpointer.close()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    lines = [f"the {a} and the {b} are {a}{b}" for a in "abcdefgh" for b in "ijklmnop"]
    return train_tokenizer(lines, 300, tmp_path_factory.mktemp("tokenizer") / "t.model")


def write_run(directory: Path, tokenizer) -> Path:
    experiment = Experiment(
        name="small",
        model=MODEL,
        optimizer=OptimizerConfig(peak_lr=1e-3),
        training=TrainingConfig(steps=30, global_batch_size=4),
    )
    directory.mkdir()
    (directory / "experiment.json").write_text(to_json(experiment))
    (directory / "tokenizer.model").write_bytes(tokenizer.model_bytes)
    return directory


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer) -> Path:
    directory = write_run(tmp_path_factory.mktemp("runs") / "small", tokenizer)
    for step in STEPS:
        save(directory, step, params_of_step(step))
    return directory


def exact_mean(arrays: list[np.ndarray]) -> np.ndarray:
    """Return the mean in fractions, rounded to float64."""
    flat = zip(*(array.ravel().tolist() for array in arrays), strict=True)
    means = [float(sum(map(Fraction, numbers)) / len(arrays)) for numbers in flat]
    return np.array(means).reshape(arrays[0].shape)


def averaged(run: Path, out: Path, *flags: str) -> dict:
    average.main(["--run", str(run), "--out", str(out), *flags])
    return saved_params(out)


@pytest.mark.parametrize(
    ("flags", "steps"),
    [(("--last", "2"), (20, 30)), (("--last", "3"), (10, 20, 30)), (("--steps", "30,0"), (0, 30))],
)
def test_the_mean_is_that_of_exact_arithmetic_rounded_once(run, tmp_path, capsys, flags, steps):
    mean = averaged(run, tmp_path / "mean", *flags)

    every = [params_of_step(step) for step in steps]
    expected = jax.tree.map(lambda *arrays: exact_mean(arrays).astype(np.float32), *every)
    jax.tree.map(np.testing.assert_array_equal, mean, expected)
    assert f"the mean of steps {', '.join(map(str, steps))}" in capsys.readouterr().err


def test_a_mean_in_float32_would_be_another(run, tmp_path):
    """What the test above expects is not what a careless sum gives."""
    mean = averaged(run, tmp_path / "mean", "--last", "3")

    careless = sum(params_of_step(step)["embedding"] for step in (10, 20, 30)) / np.float32(3)
    assert (careless != mean["embedding"]).any()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_the_type_is_kept_and_rounded_to_once(dtype):
    models = [
        jax.tree.map(lambda x, shift=shift: (x + shift).astype(dtype), random_params(tiny()))
        for shift in (0.0, 0.1, 0.3)
    ]

    mean = averaging.average([in_memory(tiny(), params) for params in models])

    expected = jax.tree.map(lambda *arrays: exact_mean(arrays).astype(dtype), *models)
    jax.tree.map(np.testing.assert_array_equal, read_params(mean, dtype=None), expected)
    assert mean.read(("final_norm", "scale")).dtype == dtype


def test_a_parameter_at_a_time_is_read():
    """Nothing is read before it is asked for, and then of each model what is asked for."""
    asked = []

    def model(number):
        stored = in_memory(tiny(), random_params(tiny()))
        read = stored.read
        object.__setattr__(stored, "read", lambda path: asked.append((number, path)) or read(path))
        return stored

    mean = averaging.average([model(0), model(1), model(2)])
    assert asked == []
    mean.read(("embedding",))
    assert set(asked) == {(number, ("embedding",)) for number in range(3)}


def test_the_mean_is_a_source_like_any_other(run, tmp_path, tokenizer):
    averaged(run, tmp_path / "mean", "--last", "2")

    with open_weights(tmp_path / "mean") as stored:
        assert stored.config == MODEL
        assert stored.tokenizer.sha256 == tokenizer.sha256
    export.main(f"--from {tmp_path}/mean --to hf --out {tmp_path}/hf --dtype float32".split())
    with open_weights(tmp_path / "hf") as stored:
        assert stored.config.vocab_size == 300
    card = (tmp_path / "mean" / "README.md").read_text()
    assert "small, the mean of steps 20, 30" in card
    for directory in ("mean", "hf"):
        card = (tmp_path / directory / "README.md").read_text()
        assert card.splitlines().count("# small") == 1
        assert "30 of 30 updates" in card
        assert "the mean of the weights after 20, 30 updates" in card
        assert "No loss on held-out text is recorded" in card


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--last", "5"], "has 3 saved steps .10, 20, 30., not 5"),
        (["--steps", "10,15,30,40"], "holds no step 15, 40; saved are 0, 10, 20, 30"),
    ],
)
def test_steps_that_are_not_there_are_refused_by_those_that_are(run, tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        averaged(run, tmp_path / "mean", *flags)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps 10,20,10", "step 10 is given twice"),
        ("--steps 10", "two steps or more"),
        ("--steps ten,20", "ten,20 is no list of steps"),
        ("--last 1", "two steps or more"),
        ("--last five", "argument --last: five is no number of steps"),
        ("--last 2 --steps 10,20", "not allowed with"),
        ("", "one of the arguments --last --steps is required"),
    ],
)
def test_what_is_no_mean_is_usage(capsys, flags, message):
    with pytest.raises(SystemExit, match="2"):
        average.main(["--run", "somewhere", "--out", "elsewhere", *flags.split()])
    assert message in capsys.readouterr().err


def test_steps_of_different_shapes_have_no_mean(tmp_path, tokenizer):
    directory = write_run(tmp_path / "mixed", tokenizer)
    save(directory, 10, params_of_step(10))
    wide = params_of_step(20)
    wide["layers_1"]["ffn"]["up"] = np.zeros((32, 8), np.float32)
    save(directory, 20, wide)

    with pytest.raises(UserError, match=r"layers_1\.ffn\.up is float32 \[32, .*mixed@10 and .*8\]"):
        averaged(directory, tmp_path / "mean", "--last", "2")
    assert [path.name for path in tmp_path.iterdir()] == ["mixed"]


def test_a_damaged_step_is_named(run, tmp_path, tokenizer):
    directory = write_run(tmp_path / "damaged", tokenizer)
    for step in (10, 20):
        save(directory, step, params_of_step(step))
    file = max((directory / "checkpoints" / "000010" / "params").rglob("d/*"))
    file.write_bytes(file.read_bytes()[:-1])

    with pytest.raises(UserError, match=f"000010: .*{file.name} is damaged"):
        averaged(directory, tmp_path / "mean", "--last", "2")


def test_only_runs_have_steps(run, tmp_path):
    averaged(run, tmp_path / "mean", "--last", "2")

    with pytest.raises(UserError, match=r"mean is no run directory"):
        averaged(tmp_path / "mean", tmp_path / "again", "--last", "2")


def test_a_directory_that_holds_something_is_left_alone(run):
    with pytest.raises(UserError, match="is not empty"):
        averaged(run, run, "--last", "2")

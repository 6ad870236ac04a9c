"""`--from`: what a run directory holds, at its latest step or at another."""

import dataclasses

import numpy as np
import pytest
from huggingface_directories import write_huggingface
from small_models import random_params

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
from openelm_jax.weights.load import load_weights

EXPERIMENT = Experiment(
    name="small",
    model=ModelConfig(num_layers=1, model_dim=64, head_dim=16, vocab_size=320),
    optimizer=OptimizerConfig(peak_lr=1e-3),
    training=TrainingConfig(steps=20, global_batch_size=1),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with the steps 10 and 20; a parameter tells which."""
    directory = tmp_path_factory.mktemp("runs") / "small"
    directory.mkdir()
    (directory / "experiment.json").write_text(to_json(EXPERIMENT))
    lines = [f"the {a} and the {b} are {a}{b}" for a in "abcdefgh" for b in "ijklmnop"]
    train_tokenizer(lines, 300, directory / "tokenizer.model")
    checkpointer = Checkpointer(directory, CheckpointConfig())
    for step in (10, 20):
        params = random_params(EXPERIMENT.model)
        params["final_norm"]["scale"] = np.full(64, step, np.float32)
        checkpointer.save(step, params=params, optimizer={"step": np.array(step)}, data={})
    checkpointer.close()
    return directory


@pytest.mark.parametrize(("suffix", "step"), [("", 20), ("@10", 10), ("@000020", 20)])
def test_a_run_gives_its_latest_step_or_the_one_asked_for(run, suffix, step):
    weights = load_weights(f"{run}{suffix}")

    assert weights.config == EXPERIMENT.model
    np.testing.assert_array_equal(weights.params["final_norm"]["scale"], np.full(64, step))
    assert weights.source == f"{run}@{step}"
    assert weights.tokenizer.vocab_size == 300


def test_a_tokenizer_can_be_given_in_place_of_the_runs(run, tmp_path):
    given = train_tokenizer(
        [f"{a}{b} {b}" for a in "uvwx" for b in "yz"], 275, tmp_path / "t.model"
    )

    assert load_weights(run, tmp_path / "t.model").tokenizer.sha256 == given.sha256


def test_weights_alone_are_enough(run):
    """The optimiser's files may be deleted: only continuing needs them."""
    for file in sorted((run / "checkpoints" / "000010" / "optimizer").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()

    assert load_weights(f"{run}@10").params["final_norm"]["scale"][0] == 10


def test_a_step_that_is_not_there_is_refused_with_those_that_are(run):
    with pytest.raises(UserError, match="holds no step 15; it has 10, 20"):
        load_weights(f"{run}@15")


def test_a_run_without_a_checkpoint_is_refused(tmp_path):
    small = dataclasses.replace(EXPERIMENT, name="empty")
    (tmp_path / "experiment.json").write_text(to_json(small))

    with pytest.raises(UserError, match="holds no finished checkpoint"):
        load_weights(tmp_path)


def test_a_damaged_experiment_is_named_with_its_file(tmp_path):
    file = tmp_path / "experiment.json"
    file.write_text(to_json(EXPERIMENT)[:100])

    with pytest.raises(UserError) as refusal:
        load_weights(tmp_path)

    assert str(refusal.value).startswith(f"{file} is no JSON (")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nowhere", "there is no .*nowhere; accepted are"),
        ("empty", "no weights are recognised in .*empty; accepted are"),
        ("model/model.safetensors", "which model it is: give its directory, with its config.json"),
        ("two", "two holds a.gguf, b.gguf: give one of these files"),
        ("two@5", "two is no run directory and has no steps: leave @5 out"),
        ("two/a.gguf@5", "a.gguf is no run directory and has no steps: leave @5 out"),
        ("lost", "lost is a run whose experiment.json is lost: restore it"),
        ("lost@20", "lost is a run whose experiment.json is lost: restore it"),
        ("lost/checkpoints/000020", "000020 is a step of a run: give .*/lost@20"),
        ("model", "model has no config.json, which says which model the weights are: put it there"),
        ("exports", "no weights are recognised in .*exports; accepted are"),
    ],
)
def test_what_is_no_source_is_refused_with_what_to_do(tmp_path, where, message):
    (tmp_path / "lost" / "checkpoints" / "000020").mkdir(parents=True)
    (tmp_path / "exports" / "tiny.gguf").mkdir(parents=True)
    for file in ("empty/notes", "model/model.safetensors", "two/a.gguf", "two/b.gguf"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()

    with pytest.raises(UserError, match=f"--from .*{where}: .*{message}"):
        load_weights(tmp_path / where)


@pytest.mark.parametrize("revision", ["", "@main"])
def test_a_name_on_the_hub_is_answered_with_how_it_is_written(tmp_path, monkeypatch, revision):
    monkeypatch.chdir(tmp_path)
    name = f"apple/OpenELM-1_1B{revision}"
    with pytest.raises(UserError, match=f"there is no {name}, or hf://{name} if"):
        load_weights(name)


def test_a_tokenizer_json_alone_is_named(run, tmp_path, capsys):
    """As `save_pretrained` and `mlx_lm convert` leave it."""
    write_huggingface(tmp_path / "saved", EXPERIMENT.model, random_params(EXPERIMENT.model))
    (tmp_path / "saved" / "tokenizer.json").write_text("{}")

    assert load_weights(tmp_path / "saved").tokenizer is None
    assert "its tokenizer.json is not read: give" in capsys.readouterr().err
    assert load_weights(tmp_path / "saved", run / "tokenizer.model").tokenizer is not None
    assert capsys.readouterr().err == ""

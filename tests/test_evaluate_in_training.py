"""`training.evaluate_every`: figures of tasks among the metrics, and the same training to the bit.

The rows of SciQ are written here, in the Hub's columns.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from corpora import tokenizer
from hub_folder import write_set
from small_models import random_params, tiny
from small_runs import (
    assert_equal_bits,
    assert_one_sentence,
    call,
    params_of,
    read_metrics,
    train_command,
    write_corpus,
)

from openelm_jax import evaluate
from openelm_jax.config import TrainingConfig
from openelm_jax.errors import UserError
from openelm_jax.evaluation.in_training import evaluate_chosen, open_chosen
from openelm_jax.generation.language_model import language_model

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.usefixtures("no_hub")

EVERY = ("--training.evaluate-every", "6", "--training.evaluate-limit", "3")
TASKS = ("--training.evaluate-tasks", "sciq")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {
            "support": "",
            "question": f"{i}?",
            "correct_answer": "no",
            **{f"distractor{k}": f"so {k}" for k in (1, 2, 3)},
        }
        for i in range(4)
    ]
    write_set(folder, "allenai/sciq", None, {"test": rows})
    return folder


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def evaluated(experiment: Path, data: Path, tmp_path_factory, compiled_code: Path):
    """Return a run of 16 steps that is evaluated at 6, 12 and the end, and what it said."""
    run = tmp_path_factory.mktemp("evaluated") / "run"
    flags = (*EVERY, *TASKS, "--training.evaluate-data", str(data))
    flags += ("--checkpoint.keep-every", "6")
    return run, call(train_command(experiment, run, *flags), compiled_code)


@pytest.mark.heavy
def test_figures_are_among_the_metrics_when_due_and_at_the_end(evaluated):
    run, said = evaluated
    lines = [line for line in read_metrics(run) if "evaluation/sciq" in line]
    assert [line["step"] for line in lines] == [6, 12, 16]
    assert f"step 16: sciq {lines[-1]['evaluation/sciq']:.4f}" in said


@pytest.mark.heavy
def test_they_are_what_evaluate_finds_at_that_step(evaluated, data, capsys):
    run, _ = evaluated
    found = {line["step"]: line.get("evaluation/sciq") for line in read_metrics(run)}
    for step in (6, 16):
        command = f"--from {run}@{step} --tasks sciq --limit 3 --data {data} --json"
        evaluate.main(command.split())
        value = json.loads(capsys.readouterr().out)["tasks"]["sciq"]["value"]
        assert found[step] == value


@pytest.mark.heavy
def test_the_training_is_that_without_them_to_the_bit(
    evaluated, experiment, tmp_path, compiled_code
):
    run, _ = evaluated
    call(train_command(experiment, tmp_path / "run"), compiled_code)
    assert_equal_bits(params_of(run, 16), params_of(tmp_path / "run", 16))


@pytest.mark.heavy
def test_data_that_is_not_there_is_named_before_the_first_step(
    experiment, data, tmp_path, compiled_code
):
    run = tmp_path / "run"
    flags = (*EVERY, "--training.evaluate-tasks", "piqa", "--training.evaluate-data", str(data))
    said = call(train_command(experiment, run, *flags), compiled_code, code=1)
    assert_one_sentence(said, "no data of piqa", str(data))
    assert "compiling" not in said
    assert not (run / "experiment.json").exists()


def chosen(data: Path, *tasks: str, every: int = 1) -> TrainingConfig:
    return TrainingConfig(
        steps=1,
        global_batch_size=1,
        evaluate_every=every,
        evaluate_tasks=tasks,
        evaluate_data=str(data),
    )


def test_a_run_that_is_told_to_stop_is_not_kept_waiting(data):
    """The third question whether to stop is answered yes: the first is before any answer."""
    asked = []

    def should_stop() -> bool:
        asked.append(True)
        return len(asked) == 3

    config = tiny(num_layers=1, vocab_size=384, context_length=32)
    model = language_model(config, random_params(config), tokenizer(), "float32")
    tasks = open_chosen(chosen(data, "sciq"))
    assert evaluate_chosen(model, tasks, 3, should_stop) is None
    assert len(asked) == 3
    assert list(evaluate_chosen(model, tasks, 3) or {}) == ["evaluation/sciq"]


def test_what_cannot_be_meant_is_refused_by_its_field(data):
    with pytest.raises(UserError, match=r"training.evaluate_tasks piqa:few: few is no number"):
        open_chosen(chosen(data, "sciq", "piqa:few"))
    with pytest.raises(UserError, match=r"training.evaluate_tasks names no task"):
        open_chosen(chosen(data))
    assert open_chosen(chosen(data, "piqa:few", every=0)) == ()

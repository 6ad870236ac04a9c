"""Figure 1: each saved step of a run and the mean of the last ones, found, written and drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from corpora import tokenizer
from hub_folder import write_set
from small_models import random_params, tiny

from openelm_jax import average, evaluate
from openelm_jax.config import CheckpointConfig, Experiment, OptimizerConfig, TrainingConfig
from openelm_jax.errors import UserError
from openelm_jax.evaluation.curves import Point, write_curves
from openelm_jax.evaluation.suites import Results, Task, Value
from openelm_jax.experiment_file import to_json
from openelm_jax.training.checkpoint import Checkpointer

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.usefixtures("no_hub")
pytest.importorskip("matplotlib")

MODEL = tiny(num_layers=1, vocab_size=384, context_length=64)
STEPS = (0, 10, 20, 30)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    words = ["water", "stone", "air", "fire", "wood", "iron", "milk", "salt"]
    rows = [
        {
            "support": "",
            "question": f"Which ({i})?",
            "correct_answer": words[i % 8],
            **{f"distractor{k}": words[(i + k) % 8] for k in (1, 2, 3)},
        }
        for i in range(24)
    ]
    write_set(folder, "allenai/sciq", None, {"test": rows})
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of four steps whose weights have nothing in common."""
    directory = tmp_path_factory.mktemp("runs") / "small"
    directory.mkdir()
    experiment = Experiment(
        name="small",
        model=MODEL,
        optimizer=OptimizerConfig(peak_lr=1e-3),
        training=TrainingConfig(steps=30, global_batch_size=4),
    )
    (directory / "experiment.json").write_text(to_json(experiment))
    (directory / "tokenizer.model").write_bytes(tokenizer().model_bytes)
    for step in STEPS:
        checkpointer = Checkpointer(directory, CheckpointConfig(keep_every=10))
        params = random_params(MODEL, std=0.5, seed=step)
        checkpointer.save(step, params=params, optimizer={"step": np.array(step)}, data={})
        checkpointer.close()
    return directory


@pytest.mark.heavy
def test_each_step_and_the_mean_are_what_evaluate_finds_of_them(run, data, tmp_path, capsys):
    task = f"--tasks sciq --data {data} --json"
    evaluate.main(f"--run {run} --all-checkpoints --average-last 2 {task}".split())
    found = json.loads(capsys.readouterr().out)

    assert found == json.loads((run / "evaluation/curves.json").read_text())
    assert [point["steps"] for point in found["points"]] == [[0], [10], [20], [30], [20, 30]]
    values = [point["tasks"]["sciq"]["value"] for point in found["points"]]
    assert len(set(values)) > 2  # else equal figures would prove nothing

    mean = tmp_path / "mean"
    average.main(["--run", str(run), "--last", "2", "--out", str(mean)])
    for where, value in zip([*(f"{run}@{step}" for step in STEPS), mean], values, strict=True):
        evaluate.main(f"--from {where} {task}".split())
        assert json.loads(capsys.readouterr().out)["tasks"]["sciq"]["value"] == value


def point(steps: tuple[int, ...], *shares: float) -> Point:
    tasks = [Task(name, 0, "acc", name.upper()) for name in ("piqa", "sciq", "race")]
    values = tuple(
        Value(task, share, 0.02, "acc", 100, {}) for task, share in zip(tasks, shares, strict=False)
    )
    return Point(steps, Results(values, limit=100))


def test_a_picture_has_a_panel_for_each_task_and_average_and_marks_the_mean(tmp_path):
    from matplotlib.image import imread

    points = [point((1000,), 0.5, 0.25), point((2000,), 0.6, 0.35), point((1000, 2000), 0.7, 0.3)]
    paths = write_curves(tmp_path / "out", Path("runs/small"), None, points)

    assert [path.name for path in paths] == ["curves.json", "curves.png", "curves.svg"]
    height, width, _ = imread(paths[1]).shape
    assert width > height > 300
    svg = paths[2].read_text()
    # matplotlib draws letters as shapes and leaves the text in comments.
    comments = re.findall(r"<!-- (.*?) -->", svg)
    for text in ("PIQA (acc, %)", "SCIQ (acc, %)", "average (%)", "2k", "step"):
        assert text in comments
    assert "mean of the last 2" in comments
    assert "runs/small" in comments


def test_the_same_points_give_the_same_files(tmp_path):
    points = [point((1000,), 0.5, 0.25), point((2000,), 0.6, 0.35)]
    first, second = (
        [path.read_bytes() for path in write_curves(tmp_path / name, Path("r"), None, points)]
        for name in ("a", "b")
    )
    assert first == second


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--run RUN --all-checkpoints --average-last 9 --tasks sciq", "has 3 saved steps"),
        ("--run NONE --all-checkpoints --tasks sciq", "holds no finished checkpoint"),
    ],
)
def test_runs_without_the_steps_are_refused(run, tmp_path, flags, message):
    line = flags.replace("RUN", str(run)).replace("NONE", str(tmp_path))
    with pytest.raises(UserError, match=message):
        evaluate.main(line.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--run R --tasks piqa", "--run needs --all-checkpoints"),
        ("--from W --all-checkpoints --tasks piqa", "are for runs: give --run"),
        ("--from W --average-last 5 --tasks piqa", "are for runs: give --run"),
        ("--run R --all-checkpoints --average-last 1 --tasks piqa", "2 or more"),
        ("--run R --from W --tasks piqa", "not allowed with"),
        ("--run R --all-checkpoints --text F", "--text is for weights"),
        ("--run R --all-checkpoints --suite openllm --beside M", "--beside is for weights"),
    ],
)
def test_a_command_that_cannot_be_meant_is_usage(flags, message, capsys):
    with pytest.raises(SystemExit) as end:
        evaluate.main(flags.split())
    assert end.value.code == 2
    assert message in capsys.readouterr().err

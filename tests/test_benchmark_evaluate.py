"""`benchmark evaluate` asks both sides the same by turns: how fast are they, and how alike?"""

from __future__ import annotations

import json

import pytest
from corpora import tokenizer
from hub_folder import write_set
from huggingface_directories import write_huggingface
from small_models import random_params, tiny

from openelm_jax import benchmark
from openelm_jax.benchmarks import evaluation
from openelm_jax.benchmarks.evaluation import TaskRequests, Turn
from openelm_jax.errors import UserError

PAIRS = [("A", " B"), ("A", " C"), ("D", " E"), ("D", " F")]


class Side:
    """Takes the seconds that it is told, one turn after the other."""

    def __init__(self, asked: list, name: str, seconds: list[float], answers) -> None:
        self.asked, self.name, self.seconds, self.answers = asked, name, iter(seconds), answers

    def __call__(self, question):
        self.asked.append(self.name)
        return Turn(next(self.seconds), self.answers)


def test_figures_are_medians_and_differences():
    ours = [(-1.0, True), (-2.0, False)]
    theirs = [(-1.0, True), (-2.0005, True)]
    figures = evaluation._figures("piqa", 10, 16, [1.0, 2.0, 4.0], [8.0, 8.0, 8.0], ours, theirs)
    found = {figure.name: figure for figure in figures}

    assert found["ours"].value == 5
    assert found["hf"].value == 1.25
    assert found["ratio"].value == 4
    assert found["ratio"].is_reached
    assert found["difference"].value == pytest.approx(5e-4)
    assert found["difference"].is_reached
    assert found["unequal_flags"].value == 1
    assert not found["unequal_flags"].is_reached


def test_sides_take_turns(monkeypatch, tmp_path):
    asked: list[str] = []
    answers = [(-1.0, False)] * 4
    sides = iter(
        [
            Side(asked, "ours", [9, 1, 1], answers),
            Side(asked, "hf", [3, 4, 2, 3, 5] + [6] * 3, answers),
        ]
    )

    class Process:
        def __init__(self, *arguments, **options) -> None:
            self.side = next(sides)

        def __enter__(self):
            return self.side

        def __exit__(self, *failure) -> None:
            pass

    monkeypatch.setattr(evaluation, "process", Process)
    said: list[str] = []
    gathered = [TaskRequests("piqa", 2, PAIRS)]
    figures = evaluation._compare(tmp_path, 64, gathered, 2, said.append)

    tried = ["hf"] * (1 + len(evaluation.THEIR_BATCHES))
    assert asked == [*tried, "ours", "hf", "ours", "hf", "hf", "ours"]
    assert any("hf: batch 4 of" in line for line in said)
    assert {figure.name: figure.value for figure in figures}["ratio"] == 6


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data", "/nowhere"], "--data /nowhere: there is no such directory"),
        ([], "random weights have no tokenizer: give --tokenizer FILE, or --from"),
    ],
)
def test_what_is_missing_is_said(flags, said):
    pytest.importorskip("lm_eval")
    with pytest.raises(UserError, match=said):
        benchmark.main(["evaluate", *flags])


def test_missing_packages_are_named_with_their_extras(monkeypatch):
    monkeypatch.setattr(evaluation, "PACKAGES", ("no_such_package", "torch"))
    with pytest.raises(UserError, match=r"needs no_such_package: pip install 'openelm_jax\[eval"):
        benchmark.main(["evaluate"])


@pytest.mark.heavy
def test_both_sides_find_the_same(tmp_path, capsys):
    pytest.importorskip("lm_eval")
    rows = [
        {"goal": "Open a jar", "sol1": "Turn the lid.", "sol2": "Eat the lid.", "label": 0},
        {"goal": "Boil an egg", "sol1": "Use sand.", "sol2": "Use water.", "label": 1},
    ]
    write_set(
        tmp_path / "hub", "baber/piqa", None, dict.fromkeys(("train", "validation", "test"), rows)
    )
    ours = tokenizer()
    config = tiny(num_layers=2, vocab_size=ours.vocab_size)
    write_huggingface(tmp_path / "tiny", config, random_params(config), tokenizer=ours)
    data = ["--data", str(tmp_path / "hub"), "--tasks", "piqa", "--rounds", "1", "--json"]
    benchmark.main(["evaluate", "--from", str(tmp_path / "tiny"), *data])

    found = json.loads(capsys.readouterr().out)
    figures = {figure["name"]: figure["value"] for figure in found["figures"]}
    assert figures["difference"] < 1e-3
    assert figures["unequal_flags"] == 0
    assert figures["ours"] > 0 < figures["hf"]

"""The paper's figures are whole: each average is that of its row, and rows are of our suites."""

from __future__ import annotations

from statistics import mean

import pytest

from openelm_jax.evaluation.paper_results import paper_rows
from openelm_jax.evaluation.suites import SUITES, TABLES

ROWS = [(suite, row) for suite in TABLES for row in paper_rows(suite)]
NAMES = [f"{suite} {row.model} {row.kind}" for suite, row in ROWS]


@pytest.mark.parametrize(("suite", "row"), ROWS, ids=NAMES)
def test_an_average_is_that_of_the_row_to_two_decimals(suite, row):
    if row.values:
        assert row.values.keys() == {task.name for task in TABLES[suite]}
        assert mean(row.values.values()) == pytest.approx(row.average, abs=0.0065)
    assert row.source


def test_all_sizes_stand_in_all_suites_as_they_are_and_instructed():
    for suite in SUITES:
        found = {(row.model, row.kind) for row in paper_rows(suite) if row.values}
        sizes = ("270M", "450M", "1_1B", "3B")
        assert found == {(f"OpenELM-{s}", kind) for s in sizes for kind in ("base", "instruct")}


def test_tasks_of_two_suites_with_the_same_examples_have_the_same_figures():
    both = ("arc_challenge", "hellaswag", "mmlu", "truthfulqa_mc2", "winogrande")
    llm360 = {(row.model, row.kind): row.values for row in paper_rows("llm360")}
    for row in paper_rows("openllm"):
        if row.values:
            same = llm360[row.model, row.kind]
            assert [row.values[task] for task in both] == [same[task] for task in both]

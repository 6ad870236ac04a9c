"""`evaluate` from weights on disk to tables, offline; the rows of SciQ are written here, in the
Hub's columns. Tables say exactly what was found, beside the paper."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hub_folder import write_set
from huggingface_directories import write_huggingface
from ports import free_port
from small_models import random_params, tiny
from small_runs import environment

from openelm_jax import evaluate
from openelm_jax.errors import UserError
from openelm_jax.evaluation.answers import cache_file
from openelm_jax.evaluation.harness import harness_model
from openelm_jax.evaluation.suites import SUITES, TABLES, Results, Task, Value
from openelm_jax.evaluation.tables import all_rows, choose_row, markdown, to_json
from openelm_jax.generation.language_model import load
from openelm_jax.tokenizer import load_tokenizer

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.usefixtures("no_hub")

TOKENIZER = Path(__file__).parent / "data" / "tokenizer-mistral-v1" / "tokenizer.model"


@dataclass(frozen=True)
class Row:
    model: str
    kind: str
    values: dict[str, float] = field(default_factory=dict)
    average: float = 0.0
    source: str = "a table"


def value(task: Task, share: float, stderr: float | None, metric: str, items: int, *notes: str):
    return Value(task, share, stderr, metric, items, {f"{metric},none": share}, "1.0", notes)


PIQA, CROWS = SUITES["llm360"][4], SUITES["llm360"][1]
RESULTS = Results(
    (
        value(PIQA, 0.5125, 0.03, "acc_norm", 1838),
        value(CROWS, 0.6, 0.04, "pct_stereotype", 1508, "other rows"),
        value(Task("wikitext", None, None, "wikitext"), 41.5, None, "word_perplexity", 62),
    ),
    limit=None,
)
BASE = Row("M", "base", {"piqa": 50.0, "crows_pairs_english": 63.5}, 56.75)


def test_a_table_has_figures_errors_and_the_difference_from_the_paper():
    """The error of an average of independent figures: the root of 3² + 4², halved."""
    assert (
        markdown("W", None, RESULTS, BASE)
        == """\
| task | shots | metric | items | W | M | difference |
| --- | ---: | --- | ---: | ---: | ---: | ---: |
| PIQA | 0 | acc_norm | 1,838 | 51.25 ± 3.00 | 50.00 | +1.25 |
| CrowS-Pairs | 25 | pct_stereotype | 1,508 | 60.00 ± 4.00 | 63.50 | -3.50 |
| wikitext |  | word_perplexity | 62 | 41.50 |  |  |
| average |  |  |  | 55.62 ± 2.50 | 56.75 | -1.12 |

- CrowS-Pairs: less is better, unlike the rest.
- CrowS-Pairs: other rows.
- M: a table."""
    )


def test_a_table_without_the_paper_has_no_columns_of_it():
    results = Results((value(PIQA, 0.5, 0.1, "acc_norm", 4),), limit=4)
    assert markdown("W", None, results, None).splitlines() == [
        "| task | shots | metric | items | W |",
        "| --- | ---: | --- | ---: | ---: |",
        "| PIQA | 0 | acc_norm | 4 | 50.00 ± 10.00 |",
        "",
        "- Only 4 items of each task: not to be compared with the paper.",
    ]


def test_a_limit_that_cut_nothing_is_not_told():
    few = Results((value(PIQA, 0.5, 0.1, "acc_norm", 4),), limit=99)
    assert "Only" not in markdown("W", None, few, None)


def test_all_models_of_a_suite_stand_below_ours():
    figures = dict.fromkeys((task.name for task in SUITES["zero-shot"]), 40.0) | {"sciq": 75.0}
    results = Results(
        tuple(value(task, 0.5, 0.1, "acc", 10) for task in SUITES["zero-shot"]), limit=None
    )
    rows = [Row("M", "base", figures, 45.0), Row("M", "instruct", {"piqa": 60.0}, 61.0)]
    lines = all_rows("W", "zero-shot", results, rows).splitlines()
    assert lines[0].endswith("| WinoGrande | average | average without SciQ |")
    assert [line.split(" | ") for line in lines[2:]] == [
        ["| W", *["50.00"] * 8, "50.00 |"],
        ["| M", *["40.00"] * 5, "75.00", "40.00", "45.00", "40.00 |"],
        ["| M instruct", "", "", "", "", "60.00", "", "", "61.00", " |"],
    ]


def test_json_has_every_metric_as_the_harness_gives_it():
    found = to_json("W", None, RESULTS, BASE)
    assert found["tasks"]["crows_pairs_english"] == {
        "shots": 25,
        "metric": "pct_stereotype",
        "value": 0.6,
        "stderr": 0.04,
        "items": 1508,
        "version": "1.0",
        "metrics": {"pct_stereotype,none": 0.6},
        "paper": 63.5,
        "notes": ["other rows"],
    }
    assert found["averages"] == {"average": pytest.approx(55.625)}
    assert found["paper"] == {"model": "M", "source": "a table", "averages": {"average": 56.75}}
    assert json.loads(json.dumps(found)) == found


def test_a_row_of_the_paper_is_chosen_by_its_name():
    rows = [BASE, Row("M", "instruct")]
    assert choose_row(rows, "m INSTRUCT") is rows[1]
    with pytest.raises(UserError, match=r"--beside N: .* known are M, M instruct\."):
        choose_row(rows, "N")


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """A model of two layers, as wide and deep as none of the paper's."""
    config = tiny(num_layers=2, vocab_size=32_000, context_length=128)
    directory = tmp_path_factory.mktemp("weights") / "model"
    write_huggingface(directory, config, random_params(config), tokenizer=load_tokenizer(TOKENIZER))
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {
            "support": "Water runs.",
            "question": f"What runs ({i})?",
            "correct_answer": "water",
            **{f"distractor{k}": f"stone {k}" for k in (1, 2, 3)},
        }
        for i in range(3)
    ]
    write_set(folder, "allenai/sciq", None, {"test": rows})
    return folder


def test_weights_and_local_data_become_tables_and_nothing_is_asked_twice(
    weights, data, tmp_path, capsys, monkeypatch
):
    command = f"--from {weights} --tasks sciq --data {data} --limit 2"
    evaluate.main([*command.split(), "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert re.search(r"^\| SciQ \| 0 \| acc \| 2 \| \d+\.\d\d ± \d+\.\d\d \|$", printed, re.M)
    assert (tmp_path / "out/results.md").read_text() == printed
    found = json.loads((tmp_path / "out/results.json").read_text())

    def refuse(*arguments, **options):
        raise AssertionError("asked again")

    monkeypatch.setattr("openelm_jax.generation.language_model.score", refuse)
    evaluate.main([*command.split(), "--json"])
    assert json.loads(capsys.readouterr().out) == found
    # As the weights say, and the requests of SciQ: context and " water" or " stone 1".
    monkeypatch.undo()
    lm = harness_model(load(weights))
    texts = [" stone 1", " stone 2", " stone 3", " water"]
    right = 0
    for i in range(2):
        context = f"Water runs.\nQuestion: What runs ({i})?\nAnswer:"
        scored = [nats for nats, _ in loglikelihood(lm, context, texts)]
        right += scored.index(max(scored)) == 3
    assert found["tasks"]["sciq"]["value"] == right / 2


def loglikelihood(lm, context, texts):
    from lm_eval.api.instance import Instance

    requests = [Instance("loglikelihood", {}, (context, text), i) for i, text in enumerate(texts)]
    return lm.loglikelihood(requests, disable_tqdm=True)


def test_answers_are_kept_under_the_weights_and_not_their_place(weights, tmp_path):
    other = tmp_path / "elsewhere"
    os.symlink(weights, other)

    def name(where, **how):
        model = load(where, **how)
        return cache_file(tmp_path, model, harness_model(model)).name

    def name_with(**options):
        model = load(weights)
        return cache_file(tmp_path, model, harness_model(model, **options)).name

    assert name(weights) == name(other)
    distinct = {
        name(weights),
        name(weights, dtype="bfloat16"),
        name(weights, quantize=8),
        name_with(max_length=64),
        name_with(add_bos=False),
    }
    assert len(distinct) == 5


def test_the_suites_of_the_command_line_are_those_that_there_are():
    assert set(evaluate.SUITE_NAMES) == set(TABLES)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--from W", "--suite --tasks --text is required"),
        ("--from W --suite openllm --tasks piqa", "not allowed with"),
        ("--from W --suite (b)", "invalid choice"),
        ("--from W --tasks piqa --limit 0", "--limit: give a number"),
        ("--from W --tasks piqa --beside M", "give --suite too"),
    ],
)
def test_a_command_that_cannot_be_meant_is_usage(line, message, capsys):
    with pytest.raises(SystemExit) as end:
        evaluate.main(line.split())
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_refused_before_the_weights_are_read(tmp_path):
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out"
    with pytest.raises(UserError, match=r"--out .* cannot be made .*name another folder"):
        evaluate.main(f"--from {tmp_path} --tasks piqa --out {out}".split())


def test_a_wrong_task_is_refused_before_the_weights_are_read(tmp_path):
    with pytest.raises(UserError, match="few is no number"):
        evaluate.main(f"--from {tmp_path} --tasks piqa:few".split())


@pytest.mark.heavy
def test_two_processes_share_the_work_and_what_the_first_has_kept(weights, data, tmp_path):
    """Real processes; the first remembers two items, the second, with a cache of its own, none."""
    command = [sys.executable, "-m", "openelm_jax.evaluate", "--from", str(weights)]
    command += ["--tasks", "sciq", "--data", str(data)]
    environ = environment(tmp_path / "compiled") | {"XDG_CACHE_HOME": str(tmp_path / "cache_0")}
    subprocess.run([*command, "--limit", "2"], env=environ, check=True, capture_output=True)
    where = f"localhost:{free_port()}"
    running = [
        subprocess.Popen(
            [
                *(*command, "--out", str(tmp_path / f"out_{process}")),
                *("--coordinator", where, "--processes", "2", "--process", str(process)),
            ],
            env=environ | {"XDG_CACHE_HOME": str(tmp_path / f"cache_{process}")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        ended = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], ended
    assert ["| SciQ |" in printed for printed, _ in ended] == [True, False]
    assert not (tmp_path / "out_1").exists()
    # Of twelve requests both ask the four of the third item.
    assert all("| 4/4 [" in said for _, said in ended)
    alone = subprocess.run(
        [*command, "--json"],
        env=environ | {"XDG_CACHE_HOME": str(tmp_path / "cache_2")},
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads((tmp_path / "out_0/results.json").read_text()) == json.loads(alone.stdout)

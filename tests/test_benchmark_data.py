"""`benchmark data` names every figure and its target, and counts what can be counted exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from corpora import WORDS, config, documents, source, tokenizer, write, write_shards

from openelm_jax.benchmark import DATA_PARTS, main
from openelm_jax.benchmarks.data import decompression_factors, measure_positions
from openelm_jax.benchmarks.report import Figure, format_figures
from openelm_jax.data.columns import Column
from openelm_jax.data.pipeline import DataIterator, Position, make_plan
from openelm_jax.experiment_file import load_experiment

DOCUMENT = " ".join(WORDS[:9])

EXPERIMENT = """
import dataclasses
from openelm_jax.config import DataConfig, SourceConfig, TokenizerConfig
from openelm_jax.experiment_file import load_experiment

def experiment():
    tiny = load_experiment("tiny")
    sources = (
        SourceConfig(name="web", files=("web/*",), weight=0.7),
        SourceConfig(name="code", files=("code/*",), weight=0.3),
    )
    return dataclasses.replace(
        tiny,
        name="mine",
        model=dataclasses.replace(tiny.model, context_length=32),
        tokenizer=TokenizerConfig(path={tokenizer!r}),
        data=DataConfig(root={root!r}, sources=sources, lanes=4, min_chars=0, min_tokens=0),
        training=dataclasses.replace(tiny.training, global_batch_size=16),
    )
"""


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the file of an experiment: 4 lanes, one source in jsonl and one in three .gz."""
    root = tmp_path_factory.mktemp("corpus")
    for shard in range(4):
        write(root / f"web/{shard}.jsonl", [DOCUMENT] * 40)
    write_shards(root / "code", [DOCUMENT] * 40, "jsonl.gz", 3)
    (root / "tokenizer.model").write_bytes(tokenizer().model_bytes)
    file = root / "mine.py"
    file.write_text(EXPERIMENT.format(root=str(root), tokenizer=str(root / "tokenizer.model")))
    return str(file)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    main(["data", "--json", "--seconds", "0", "--long-steps", "12", *argv])
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def figures(experiment: str, capsys: pytest.CaptureFixture[str]) -> dict[str, dict]:
    """Return the figures of the parts that start no workers, by part and name."""
    found = run(capsys, "--exp", experiment, "--part", "encode,restore,memory,mixture")
    return {f"{figure['part']} {figure['name']}": figure for figure in found["figures"]}


def test_figures_are_named_and_have_their_targets_and_exact_counts(figures: dict) -> None:
    targets = {
        name: (figure["least"], figure["most"])
        for name, figure in figures.items()
        if (figure["least"], figure["most"]) != (None, None)
    }
    assert targets == {
        "encode share": (0.93, None),
        "encode ratio": (1.2, None),
        "restore get_state": (None, 10),
        "restore first_batch_soon": (None, 1),
        "restore first_batch_late": (None, 1),
        "memory resident": (None, 4),
        "memory files": (None, 256),
        "mixture rows_drawn": (None, 1),
        "mixture rows_counted": (None, 1),
        "mixture share": (None, 0.1),
    }
    assert figures["encode document_chars"]["value"] == len(DOCUMENT)
    assert figures["encode share"]["repetitions"] >= 3
    assert figures["restore state_bytes"]["value"] == 4 * 2 * len(Column) * 8
    # To save a position is to take it and more.
    assert figures["restore to_save"]["low"] > figures["restore get_state"]["low"]
    assert "step 12" in figures["restore first_batch_late"]["meaning"]
    assert "4 lanes of 2 sources (8 streams)" in figures["memory resident"]["meaning"]
    # 16 rows of 0.7 and 0.3 are 11.2 and 4.8: 11 and 5, or 12 and 4.
    assert figures["mixture rows_drawn"]["value"] == pytest.approx(0.8)
    assert figures["mixture rows_counted"]["value"] == pytest.approx(0.8)
    # 4 lanes share 3 shards: two of them one.
    assert figures["memory decompressed_code"]["value"] == 2
    assert "memory decompressed_web" not in figures


def test_positions_are_timed_as_the_pipeline_gives_them_without_reading_data(
    experiment: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    get_state = DataIterator.get_state

    def watch(data: DataIterator) -> Position:
        asked.append(get_state(data))
        return asked[-1]

    monkeypatch.setattr(DataIterator, "get_state", watch)
    monkeypatch.setattr(DataIterator, "__next__", lambda data: pytest.fail("data is read"))
    mine = load_experiment(experiment)
    plan = make_plan(mine.data, tokenizer(), row_length=33, global_batch_size=16)
    figures = measure_positions(mine.data, plan)
    assert [figure.repetitions for figure in figures] == [100, 100, 1]
    assert len(asked) == 201  # once to set the counts, then for each of the two
    assert {position.table_NSC.shape for position in asked} == {(4, 2, len(Column))}


def test_two_workers_are_compared_with_one(
    experiment: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def iterate(group, workers, contents):  # without their processes, which take seconds to start
        asked.append(workers)
        return iter(group)

    monkeypatch.setattr("openelm_jax.data.pipeline.iterate", iterate)
    monkeypatch.setattr("openelm_jax.benchmarks.data.WORKER_WINDOW", 0.01)
    found = run(capsys, "--exp", experiment, "--part", "workers")
    targets = {figure["name"]: (figure["least"], figure["most"]) for figure in found["figures"]}
    assert asked == [1, 2] * found["figures"][0]["repetitions"]
    assert targets["ratio"] == (1.7, None)
    assert targets["core"] == (None, 0.1)
    assert found["experiment"] == "mine"
    assert {"date", "processor", "cores", "python", "sentencepiece"} <= found["machine"].keys()


@pytest.mark.parametrize(
    ("lanes", "shards", "factor"), [(1, 3, 1), (3, 3, 1), (4, 3, 2), (8, 1, 8), (8, 3, 3)]
)
@pytest.mark.parametrize("ending", ["jsonl.gz", "jsonl.zst"])
def test_a_compressed_shard_is_decompressed_once_for_each_lane_that_shares_it(
    tmp_path: Path, lanes: int, shards: int, factor: int, ending: str
) -> None:
    write_shards(tmp_path / "packed", documents(60), ending, shards)
    write_shards(tmp_path / "plain", documents(60), "jsonl", shards)
    plan = make_plan(
        config(tmp_path, source("packed"), source("plain"), lanes=lanes),
        tokenizer(),
        row_length=33,
        global_batch_size=lanes,
    )
    readers = [shard for lane in range(lanes) for shard in plan.shards_of_lane(0, lane)[0]]
    assert max(map(readers.count, range(shards))) == factor
    assert decompression_factors(plan) == {"packed": factor}


def test_people_read_each_figure_with_its_spread_and_verdict() -> None:
    figure = Figure(
        part="encode", name="share", value=0.951, unit="", meaning="in SentencePiece",
        least=0.93, low=0.94, high=0.96, repetitions=5,
    )  # fmt: skip
    missed = Figure(part="memory", name="files", value=300, unit="files", meaning="open", most=256)
    plain = Figure(part="memory", name="opening", value=12345.6, unit="s", meaning="to open")
    lines = format_figures({"cores": "2"}, [figure, missed, plain]).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "cores: 2",
        "",
        "encode",
        "0.951 in SentencePiece (median of 5: 0.94 to 0.96; target at least 0.93: reached)",
        "",
        "memory",
        "300 files open (target at most 256: MISSED)",
        "12,346 s to open",
    ]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            ["data", "--exp", "tiny", "--part", "encode,decode"],
            f"no part decode; known are {', '.join(DATA_PARTS)}",
        ),
        (["train", "--exp", "tiny", "--dtype", "float16"], "known are float32, bfloat16"),
        (["date"], "invalid choice: 'date'"),
        ([], "the following arguments are required: subject"),
    ],
)
def test_what_is_not_measured_is_refused(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert told in capsys.readouterr().err

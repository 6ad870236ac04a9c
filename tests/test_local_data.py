"""Files of the tasks' origins become the rows that the Hub has; damaged ones are named."""

from __future__ import annotations

import csv
import gzip
import json
import os
from pathlib import Path

import pytest

from openelm_jax.errors import UserError
from openelm_jax.evaluation import local_data
from openelm_jax.evaluation.local_data import find_set, splits_of

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _folders(tmp_path_factory, monkeypatch):
    for flag in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setitem(os.environ, flag, "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    cache = str(tmp_path_factory.mktemp("datasets"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)


def write_rows(path: Path, *rows: dict) -> None:
    write(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_table(path: Path, row: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, row)
        table.writeheader()
        table.writerow(row)


def rows(data: Path, dataset: str, part: str | None, split: str) -> list[dict]:
    return list(datasets.load_dataset(str(find_set(data, dataset, "task").folder), part)[split])


def test_piqa_joins_items_and_labels(tmp_path):
    items = [{"id": "x", "goal": f"goal {i}", "sol1": "a ", "sol2": "b"} for i in range(2)]
    write_rows(tmp_path / "piqa/dev.jsonl.gz", *items)
    write(tmp_path / "piqa/dev-labels.lst", "1\n0\n")
    assert rows(tmp_path, "baber/piqa", None, "validation") == [
        {"goal": "goal 0", "sol1": "a ", "sol2": "b", "label": 1},
        {"goal": "goal 1", "sol1": "a ", "sol2": "b", "label": 0},
    ]


def test_hellaswag_is_cut_behind_the_activity(tmp_path):
    endings = ["one.", "two.", "three.", "four."]
    write_rows(
        tmp_path / "hellaswag/hellaswag_validation.jsonl",
        {"ind": 0, "query": "Roof: A man: he", "label": 3, "endings": endings},
    )
    assert rows(tmp_path, "Rowan/hellaswag", None, "validation") == [
        {
            "activity_label": "Roof",
            "ctx_a": "A man: he",
            "ctx_b": "",
            "endings": endings,
            "label": "3",
        }
    ]


def test_arc_and_openbookqa_get_letters(tmp_path):
    item = {"id": "x", "question": "Which?", "choices": ["a", "b", "c", "d", "e"], "answer": 4}
    for name in ("arc_easy_test", "arc_easy_train", "arc_challenge_test", "openbookqa_test"):
        write_rows(tmp_path / f"llm_adapters_mc/{name}.jsonl.gz", item)
    choices = {"text": item["choices"], "label": ["A", "B", "C", "D", "E"]}
    for part, split in (("ARC-Easy", "test"), ("ARC-Easy", "train"), ("ARC-Challenge", "test")):
        assert rows(tmp_path, "allenai/ai2_arc", part, split) == [
            {"question": "Which?", "choices": choices, "answerKey": "E"}
        ]
    assert rows(tmp_path, "allenai/openbookqa", "main", "test") == [
        {"question_stem": "Which?", "choices": choices, "answerKey": "E"}
    ]
    found = find_set(tmp_path, "allenai/ai2_arc", "arc_challenge")
    assert splits_of(found, "ARC-Challenge", "arc_challenge", "allenai/ai2_arc") == {"test"}


def test_winogrande_and_social_iqa_count_answers_from_one(tmp_path):
    folder = tmp_path / "llm_adapters_mc"
    write_rows(
        folder / "winogrande_test.jsonl",
        {"id": "x", "question": "So _ went.", "choices": ["Ann", "Bea"], "answer": 1},
    )
    write_rows(
        folder / "social_iqa_test.jsonl",
        {"id": "x", "question": "Tracy left. Why?", "choices": ["p", "q", "r"], "answer": 2},
    )
    assert rows(tmp_path, "allenai/winogrande", "winogrande_xl", "validation") == [
        {"sentence": "So _ went.", "option1": "Ann", "option2": "Bea", "answer": "2"}
    ]
    (row,) = rows(tmp_path, "lighteval/siqa", None, "validation")
    assert f"{row['context']} {row['question']}" == "Tracy left. Why?"
    assert (row["answerA"], row["answerB"], row["answerC"], row["label"]) == ("p", "q", "r", "3")


def test_mmlu_is_a_configuration_a_subject_in_the_files_order(tmp_path):
    def item(subject, question):
        return {"question": question, "subject": subject, "choices": ["a", "b"], "answer": 1}

    dev = [item("virology", "1"), item("anatomy", "2"), item("virology", "3")]
    write_rows(tmp_path / "mmlu/mmlu_dev.jsonl.gz", *dev)
    write_rows(tmp_path / "mmlu/mmlu_test.jsonl.gz", item("virology", "4"), item("anatomy", "5"))
    assert rows(tmp_path, "cais/mmlu", "virology", "dev") == [dev[0], dev[2]]
    assert rows(tmp_path, "cais/mmlu", "anatomy", "test") == [item("anatomy", "5")]


def test_truthfulqa_has_its_answers_apart(tmp_path):
    write_table(
        tmp_path / "truthfulqa/TruthfulQA.csv",
        {
            "Question": "What, then?",
            "Best Answer": "Nothing",
            "Correct Answers": "Nothing; Not much; ",
            "Incorrect Answers": "You grow; You die",
            "Source": "https://",
        },
    )
    wrong = ["You grow", "You die"]
    assert rows(tmp_path, "truthfulqa/truthful_qa", "multiple_choice", "validation") == [
        {
            "question": "What, then?",
            "mc1_targets": {"choices": ["Nothing", *wrong], "labels": [1, 0, 0]},
            "mc2_targets": {"choices": ["Nothing", "Not much", *wrong], "labels": [1, 1, 0, 0]},
        }
    ]


def test_crows_pairs_keeps_its_sentences(tmp_path):
    row = {
        "sent_more": 'He said, "no".',
        "sent_less": "She said",
        "stereo_antistereo": "stereo",
        "bias_type": "gender",
    }
    write_table(tmp_path / "crows_pairs/crows_pairs_anonymized.csv", row | {"anon_writer": "a0"})
    assert rows(tmp_path, "jannalu/crows_pairs_multilingual", "english", "test") == [row]


def test_a_folder_of_the_hub_is_read_as_it_is_and_first(tmp_path):
    write_rows(tmp_path / "baber/piqa/validation.jsonl", {"goal": "from the Hub"})
    write_rows(tmp_path / "piqa/dev.jsonl", {"goal": "from the origin"})
    assert rows(tmp_path, "baber/piqa", None, "validation") == [{"goal": "from the Hub"}]


def test_the_hubs_cache_is_read_the_newest_snapshot(tmp_path):
    snapshots = tmp_path / "datasets--allenai--sciq/snapshots"
    for age, name in ((100, "old"), (0, "new")):
        write_rows(snapshots / name / "test.jsonl", {"question": name})
        os.utime(snapshots / name, (1_700_000_000 - age,) * 2)
    assert rows(tmp_path, "allenai/sciq", None, "test") == [{"question": "new"}]


def test_the_same_files_are_converted_once_and_others_anew(tmp_path, monkeypatch):
    path = tmp_path / "llm_adapters_mc/winogrande_test.jsonl"
    item = {"question": "So _ went.", "choices": ["Ann", "Bea"], "answer": 1}
    write_rows(path, item)
    first = find_set(tmp_path, "allenai/winogrande", "winogrande").folder
    with monkeypatch.context() as patch:
        patch.setattr(local_data, "_write", None)
        assert find_set(tmp_path, "allenai/winogrande", "winogrande").folder == first
    write_rows(path, item, item)
    assert find_set(tmp_path, "allenai/winogrande", "winogrande").folder != first
    assert len(rows(tmp_path, "allenai/winogrande", "winogrande_xl", "validation")) == 2


@pytest.mark.parametrize(
    ("file", "text", "dataset", "message"),
    [
        ("piqa/dev.jsonl", "{}", "baber/piqa", "only dev.jsonl"),
        (
            "hellaswag/hellaswag_validation.jsonl",
            '{"query": "a: b", "endings": ["\u2028"], "label": 0}\n{',
            "Rowan/hellaswag",
            "l:2: this is no JSON",
        ),
        (
            "hellaswag/hellaswag_validation.jsonl",
            "[1]",
            "Rowan/hellaswag",
            "l:1: this is no JSON o",
        ),
        ("hellaswag/hellaswag_validation.jsonl", "{}", "Rowan/hellaswag", "no column 'query'"),
        (
            "llm_adapters_mc/winogrande_test.jsonl",
            '{"question": "q", "choices": ["a"], "answer": 0}',
            "allenai/winogrande",
            "does not fit",
        ),
        ("truthfulqa/TruthfulQA.csv", "a,b\n1,2", "truthfulqa/truthful_qa", "no column"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, file, text, dataset, message):
    write(tmp_path / file, text)
    with pytest.raises(UserError, match=message) as refusal:
        find_set(tmp_path, dataset, "task")
    assert Path(file).name in str(refusal.value)


def test_half_a_compressed_file_is_named(tmp_path):
    path = tmp_path / "llm_adapters_mc/winogrande_test.jsonl.gz"
    write(path, "{}\n" * 1000)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(UserError, match=r"winogrande_test.jsonl.gz cannot be read"):
        find_set(tmp_path, "allenai/winogrande", "winogrande")


def test_labels_that_do_not_fit_are_counted(tmp_path):
    write_rows(tmp_path / "piqa/dev.jsonl", {"goal": "g", "sol1": "a", "sol2": "b"})
    write(tmp_path / "piqa/dev-labels.lst", "1\n0\n")
    with pytest.raises(UserError, match=r"1 items and .* 2 labels"):
        find_set(tmp_path, "baber/piqa", "piqa")


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere: there is no such folder"):
        find_set(tmp_path / "nowhere", "baber/piqa", "piqa")

"""Task data laid out like the Hub's, from rows of a test or from files in the origins' own formats.

`datasets.load_dataset("baber/piqa")` takes the folder ./baber/piqa where there is one.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def write_set(
    folder: Path, name: str, config: str | None, splits: Mapping[str, Iterable[Row]]
) -> None:
    """Write a data set; with `config`, add that configuration to those that are there."""
    directory = folder / name
    directory.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        prefix = "" if config is None else f"{config}-"
        with (directory / f"{prefix}{split}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    if config is None:
        return
    names = {config} | {
        line.partition(": ")[2] for line in _lines(directory / "README.md") if "config_name" in line
    }
    lines = ["---", "configs:"]
    for known in sorted(names):
        lines += [f"- config_name: {known}", "  data_files:"]
        for file in sorted(directory.glob(f"{known}-*.jsonl")):
            split = file.stem.removeprefix(f"{known}-")
            lines += [f"  - split: {split}", f"    path: {file.name}"]
    (directory / "README.md").write_text("\n".join([*lines, "---", ""]))


def write_tasks(source: Path, folder: Path, limit: int, subjects: int = 57) -> None:
    """Write at most `limit` rows a split of eight tasks whose origins' files are in `source`.

    Splits that no test scores hold what examples are drawn from, or nothing of use.
    """
    piqa = list(_json_lines(source / "piqa/dev.jsonl.gz"))[:limit]
    labels = (source / "piqa/dev-labels.lst").read_text().split()
    rows: list[Row] = [
        {"goal": row["goal"], "sol1": row["sol1"], "sol2": row["sol2"], "label": int(label)}
        for row, label in zip(piqa, labels, strict=False)
    ]
    write_set(folder, "baber/piqa", None, {"train": rows, "validation": rows, "test": rows})
    rows = [
        _hellaswag(row)
        for row in itertools.islice(
            _json_lines(source / "hellaswag/hellaswag_validation.jsonl.gz"), limit
        )
    ]
    splits = {"train": rows, "validation": rows, "test": rows}
    write_set(folder, "Rowan/hellaswag", None, splits)
    for config, name in (("ARC-Easy", "arc_easy"), ("ARC-Challenge", "arc_challenge")):
        test, train = (
            [_arc(row) for row in itertools.islice(_json_lines(file), limit)]
            for file in (
                source / f"llm_adapters_mc/{name}_test.jsonl.gz",
                source / f"llm_adapters_mc/{name}_train.jsonl.gz",
            )
        )
        splits = {"train": train, "validation": test, "test": test}
        write_set(folder, "allenai/ai2_arc", config, splits)
    rows = [
        {
            "sentence": row["question"],
            "option1": row["choices"][0],
            "option2": row["choices"][1],
            "answer": str(row["answer"] + 1),
        }
        for row in itertools.islice(
            _json_lines(source / "llm_adapters_mc/winogrande_test.jsonl.gz"), limit
        )
    ]
    splits = {"train": rows, "validation": rows, "test": rows}
    write_set(folder, "allenai/winogrande", "winogrande_xl", splits)
    rows = [
        _truthful(row)
        for row in itertools.islice(_csv(source / "truthfulqa/TruthfulQA.csv.gz"), limit)
    ]
    write_set(folder, "truthfulqa/truthful_qa", "multiple_choice", {"validation": rows})
    rows = [
        {key: row[key] for key in ("sent_more", "sent_less", "stereo_antistereo", "bias_type")}
        for row in itertools.islice(
            _csv(source / "crows_pairs/crows_pairs_anonymized.csv.gz"), limit
        )
    ]
    write_set(folder, "jannalu/crows_pairs_multilingual", "english", {"test": rows})
    by_subject: dict[str, dict[str, list[Row]]] = {}
    for split in ("dev", "test"):
        for row in _json_lines(source / f"mmlu/mmlu_{split}.jsonl.gz"):
            by_subject.setdefault(row["subject"], {}).setdefault(split, []).append(row)
    for subject, parts in sorted(by_subject.items())[:subjects]:
        splits = {"dev": parts["dev"], "test": parts["test"][: -(-limit // subjects)]}
        write_set(folder, "cais/mmlu", subject, splits)


def _hellaswag(row: Row) -> Row:
    activity, _, context = row["query"].partition(": ")
    return {
        "activity_label": activity,
        "ctx_a": context,
        "ctx_b": "",
        "endings": row["endings"],
        "label": str(row["label"]),
    }


def _arc(row: Row) -> Row:
    letters = "ABCDE"[: len(row["choices"])]
    return {
        "question": row["question"],
        "choices": {"text": row["choices"], "label": list(letters)},
        "answerKey": letters[row["answer"]],
    }


def _truthful(row: Row) -> Row:
    best, right, wrong = (
        [part.strip() for part in row[column].split(";") if part.strip()]
        for column in ("Best Answer", "Correct Answers", "Incorrect Answers")
    )
    return {
        "question": row["Question"],
        "mc1_targets": {"choices": best + wrong, "labels": [1] * len(best) + [0] * len(wrong)},
        "mc2_targets": {"choices": right + wrong, "labels": [1] * len(right) + [0] * len(wrong)},
    }


def _json_lines(path: Path) -> Iterator[Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def _csv(path: Path) -> Iterator[dict[str, str]]:
    yield from csv.DictReader(io.StringIO(gzip.decompress(path.read_bytes()).decode("utf-8")))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []

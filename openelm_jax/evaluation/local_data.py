"""Local copies of task data: folders of the Hub as they are, files of the tasks' origins in its
columns.

Found below `--data DIR`: OWNER/NAME, a folder as the Hub has it (Parquet, JSON or CSV files, with
its README.md where it has configurations); datasets--OWNER--NAME, as its cache has it; or the files
that `ORIGINS` lists, with or without .gz. How these differ from the Hub's is told in a note.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openelm_jax.errors import UserError

Row = dict[str, Any]
Parts = dict[str, dict[str, Iterable[Row]]]
"""Rows by configuration, "" for none, and split."""

LAYOUT = "1"
"""Changes when the same files become other rows."""


@dataclass(frozen=True)
class Origin:
    """The files in which a set was published first, and how they become the Hub's rows.

    `read` gets the files that are there by the names in `files`.
    """

    files: tuple[str, ...]
    read: Callable[[Mapping[str, Path]], Parts]
    note: str = ""


@dataclass(frozen=True)
class Found:
    """A folder that `datasets` can load, what it was made of, and what differs from the Hub's."""

    folder: Path
    source: Path
    note: str = ""

    @property
    def cache(self) -> Path:
        """Where `datasets` may keep what it makes of the folder.

        Its own cache takes two folders of the same name, with the same configuration, for one.
        """
        digest = hashlib.sha256(str(self.folder).encode())
        for path in sorted(self.folder.rglob("*")):
            if path.is_file():
                status = path.stat()
                digest.update(f"{path} {status.st_size} {status.st_mtime_ns}".encode())
        return cache_folder() / "arrow" / digest.hexdigest()[:24]


def find_set(data: Path, dataset: str, task: str) -> Found:
    """Return the local copy of the Hub's set `dataset`; UserError names what was looked for."""
    if not data.is_dir():
        raise UserError(f"--data {data}: there is no such folder.")
    whole = data / dataset
    if whole.is_dir():
        return Found(whole.resolve(), whole)
    cached = data / f"datasets--{dataset.replace('/', '--')}" / "snapshots"
    if snapshots := sorted(cached.glob("*"), key=lambda path: path.stat().st_mtime):
        return Found(snapshots[-1].resolve(), snapshots[-1])
    origin = ORIGINS.get(dataset)
    files = {} if origin is None else _present(data, origin.files)
    if origin is not None and files:
        folder = _converted(dataset, origin, files)
        return Found(folder, next(iter(files.values())).parent, origin.note)
    places = [str(whole), str(cached.parent)]
    if origin is not None:
        places += [f"{data / name}[.gz]" for name in origin.files]
    raise UserError(
        f"there is no data of {task} (the Hub's {dataset}): looked for {', '.join(places)}."
    )


def splits_of(found: Found, part: str | None, task: str, dataset: str) -> set[str]:
    """Return the splits of one configuration of a set; UserError if the folder has it not."""
    import datasets

    folder = found.folder
    try:
        known = datasets.get_dataset_config_names(str(folder))
        if part is not None and part not in known:
            raise UserError(
                f"{task} reads the configuration {part} of {dataset}, and {found.source} has "
                f"{', '.join(known)}: add it there, or give the Hub's folder {dataset}."
            )
        names = datasets.get_dataset_split_names(str(folder), part, cache_dir=str(found.cache))
        return set(names)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as fault:
        reason = " ".join(str(fault).split())[:300]
        raise UserError(f"{folder} holds no data of {task} that can be read ({reason}).") from fault


def cache_folder() -> Path:
    """Return where evaluation keeps what can be made again; it need not exist."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "openelm_jax", "evaluation")


def _present(data: Path, names: Iterable[str]) -> dict[str, Path]:
    places = ((name, data / f"{name}{ending}") for name in names for ending in ("", ".gz"))
    return {name: path for name, path in places if path.is_file()}


def _converted(dataset: str, origin: Origin, files: Mapping[str, Path]) -> Path:
    """Return a folder of JSON lines in the Hub's columns, made once for the same files."""
    digest = hashlib.sha256(LAYOUT.encode())
    for name, path in sorted(files.items()):
        digest.update(name.encode() + hashlib.sha256(path.read_bytes()).digest())
    final = cache_folder() / "data" / digest.hexdigest()[:24] / dataset.rpartition("/")[2]
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=final.parent))
    except OSError as fault:
        raise UserError(
            f"{final.parent} cannot be written ({fault}): set XDG_CACHE_HOME."
        ) from None
    try:
        _write(partial, origin.read(files))
        partial.rename(final)
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as fault:
        where = ", ".join(map(str, files.values()))
        what = (
            f"no column {fault}" if isinstance(fault, KeyError) else f"what does not fit ({fault})"
        )
        raise UserError(f"{where}: a row has {what}; give the origin's files.") from fault
    except OSError as fault:
        if not final.is_dir():  # where it is, another process was quicker
            raise UserError(f"{final} was not written ({fault}).") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def _write(folder: Path, parts: Parts) -> None:
    lines = ["---", "configs:"]
    for part, splits in parts.items():
        lines += [f"- config_name: {part or 'default'}", "  data_files:"]
        for split, rows in splits.items():
            name = f"{part}-{split}.jsonl".removeprefix("-")
            with (folder / name).open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            lines += [f"  - split: {split}", f"    path: {name}"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")


def _rows(path: Path) -> Iterator[Row]:
    """Yield the objects of a file of JSON lines."""
    # Not splitlines: texts may hold other ends of lines, U+2028 for one.
    for number, line in enumerate(_text(path).removesuffix("\n").split("\n"), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as fault:
            raise UserError(f"{path}:{number}: this is no JSON ({fault.msg}).") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: this is no JSON object.")
        yield row


def _table(path: Path) -> Iterator[dict[str, str]]:
    yield from csv.DictReader(io.StringIO(_text(path), newline=""))


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as fault:
        raise UserError(f"{path} cannot be read ({fault}).") from None


def _piqa(files: Mapping[str, Path]) -> Parts:
    """Items and labels in two files, line by line."""
    parts: Parts = {"": {}}
    for split, name in (("train", "train"), ("validation", "dev")):
        items, labels = (files.get(f"piqa/{name}{ending}") for ending in (".jsonl", "-labels.lst"))
        if items is None or labels is None:
            continue
        rows, answers = list(_rows(items)), _text(labels).split()
        if len(rows) != len(answers):
            raise UserError(f"{items} has {len(rows)} items and {labels} {len(answers)} labels.")
        parts[""][split] = [
            {key: row[key] for key in ("goal", "sol1", "sol2")} | {"label": int(answer)}
            for row, answer in zip(rows, answers, strict=True)
        ]
    if not parts[""]:
        names = ", ".join(path.name for path in files.values())
        raise UserError(f"PIQA needs dev.jsonl and dev-labels.lst, and there is only {names}.")
    return parts


def _hellaswag(files: Mapping[str, Path]) -> Parts:
    def row(item: Row) -> Row:
        activity, _, context = item["query"].partition(": ")
        return {
            "activity_label": activity,
            "ctx_a": context,
            "ctx_b": "",
            "endings": item["endings"],
            "label": str(item["label"]),
        }

    (path,) = files.values()
    return {"": {"validation": map(row, _rows(path))}}


def _lettered(question: str) -> Callable[[Row], Row]:
    """Return what makes a row of ARC's or OpenBookQA's columns."""

    def row(item: Row) -> Row:
        letters = [chr(ord("A") + i) for i in range(len(item["choices"]))]
        return {
            question: item["question"],
            "choices": {"text": item["choices"], "label": letters},
            "answerKey": letters[item["answer"]],
        }

    return row


def _arc(files: Mapping[str, Path]) -> Parts:
    parts: Parts = {}
    for part, name in (("ARC-Challenge", "arc_challenge"), ("ARC-Easy", "arc_easy")):
        splits: dict[str, Iterable[Row]] = {
            split: map(_lettered("question"), _rows(path))
            for split in ("train", "test")
            if (path := files.get(f"llm_adapters_mc/{name}_{split}.jsonl"))
        }
        if splits:
            parts[part] = splits
    return parts


def _openbookqa(files: Mapping[str, Path]) -> Parts:
    row = _lettered("question_stem")
    return {
        "main": {
            split: map(row, _rows(path))
            for split in ("train", "test")
            if (path := files.get(f"llm_adapters_mc/openbookqa_{split}.jsonl"))
        }
    }


def _winogrande(files: Mapping[str, Path]) -> Parts:
    def row(item: Row) -> Row:
        first, second = item["choices"]
        return {
            "sentence": item["question"],
            "option1": first,
            "option2": second,
            "answer": str(item["answer"] + 1),
        }

    (path,) = files.values()
    return {"winogrande_xl": {"validation": map(row, _rows(path))}}


def _social_iqa(files: Mapping[str, Path]) -> Parts:
    """Context and question come joined, and the task joins them: any cut makes the same prompt."""

    def row(item: Row) -> Row:
        context, _, question = item["question"].partition(" ")
        answers = dict(zip(("answerA", "answerB", "answerC"), item["choices"], strict=True))
        return {
            "context": context,
            "question": question,
            "label": str(item["answer"] + 1),
        } | answers

    (path,) = files.values()
    return {"": {"validation": map(row, _rows(path))}}


def _mmlu(files: Mapping[str, Path]) -> Parts:
    def subject(row: Row) -> str:
        return row["subject"]

    parts: Parts = {}
    for split in ("dev", "test"):
        if path := files.get(f"mmlu/mmlu_{split}.jsonl"):
            columns = ("question", "subject", "choices", "answer")
            rows = [{key: row[key] for key in columns} for row in _rows(path)]
            for name, some in itertools.groupby(sorted(rows, key=subject), subject):
                parts.setdefault(name, {})[split] = list(some)
    return parts


def _truthfulqa(files: Mapping[str, Path]) -> Parts:
    def row(item: Row) -> Row:
        best, right, wrong = (
            [answer.strip() for answer in item[column].split(";") if answer.strip()]
            for column in ("Best Answer", "Correct Answers", "Incorrect Answers")
        )
        return {
            "question": item["Question"],
            "mc1_targets": _targets(best, wrong),
            "mc2_targets": _targets(right, wrong),
        }

    (path,) = files.values()
    return {"multiple_choice": {"validation": map(row, _table(path))}}


def _targets(right: list[str], wrong: list[str]) -> Row:
    return {"choices": right + wrong, "labels": [1] * len(right) + [0] * len(wrong)}


def _crows_pairs(files: Mapping[str, Path]) -> Parts:
    columns = ("sent_more", "sent_less", "stereo_antistereo", "bias_type")
    (path,) = files.values()
    return {"english": {"test": ({key: row[key] for key in columns} for row in _table(path))}}


ORIGINS = {
    "baber/piqa": Origin(
        tuple(
            f"piqa/{name}"
            for name in ("dev.jsonl", "dev-labels.lst", "train.jsonl", "train-labels.lst")
        ),
        _piqa,
    ),
    "Rowan/hellaswag": Origin(
        ("hellaswag/hellaswag_validation.jsonl",),
        _hellaswag,
        "texts were cleaned before, so that 14 of 10,042 items differ by a double space",
    ),
    "allenai/ai2_arc": Origin(
        tuple(
            f"llm_adapters_mc/arc_{name}_{split}.jsonl"
            for name in ("challenge", "easy")
            for split in ("test", "train")
        ),
        _arc,
    ),
    "allenai/openbookqa": Origin(
        ("llm_adapters_mc/openbookqa_test.jsonl", "llm_adapters_mc/openbookqa_train.jsonl"),
        _openbookqa,
    ),
    "allenai/winogrande": Origin(("llm_adapters_mc/winogrande_test.jsonl",), _winogrande),
    "lighteval/siqa": Origin(("llm_adapters_mc/social_iqa_test.jsonl",), _social_iqa),
    "cais/mmlu": Origin(("mmlu/mmlu_dev.jsonl", "mmlu/mmlu_test.jsonl"), _mmlu),
    "truthfulqa/truthful_qa": Origin(
        ("truthfulqa/TruthfulQA.csv",),
        _truthfulqa,
        "answers are those of TruthfulQA.csv, not of the slightly different mc_task.json",
    ),
    "jannalu/crows_pairs_multilingual": Origin(
        ("crows_pairs/crows_pairs_anonymized.csv",), _crows_pairs
    ),
}

"""Instruction records are read whole or refused by their number, and asked to the letter."""

from __future__ import annotations

import gzip
import json

import pytest

from openelm_jax.data.instructions import Instruction, instruction_of, prompt
from openelm_jax.data.objects import read_objects
from openelm_jax.errors import UserError

RECORD = {"instruction": "Add.", "input": "1 2", "output": "3", "answer": "3"}
I = " " * 16


def test_the_prompts_of_corenet_end_their_first_line_and_fill_their_empty_ones_with_spaces():
    assert prompt("Add.\nNow.") == (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.  \n"
        "\n"
        f"{I}### Instruction:\n"
        f"{I}Add.\nNow.\n"
        f"{I}\n"
        f"{I}### Response:\n"
        f"{I}"
    )
    assert prompt("Add.", "1 2") == (
        "Below is an instruction that describes a task, paired with an input that provides "
        "further context. Write a response that appropriately completes the request. \n"
        "\n"
        f"{I}### Instruction:\n"
        f"{I}Add.\n"
        f"{I}\n"
        f"{I}### Input:\n"
        f"{I}1 2\n"
        f"{I}\n"
        f"{I}### Response:\n"
        f"{I}"
    )


def test_those_of_llm_adapters_have_a_space_less_and_nothing_on_empty_lines():
    assert prompt("Add.", form="llm-adapters") == (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request. \n"
        "\n"
        f"{I}### Instruction:\n"
        f"{I}Add.\n"
        "\n"
        f"{I}### Response:\n"
        f"{I}"
    )
    assert prompt("Add.", "1 2", "llm-adapters") == (
        "Below is an instruction that describes a task, paired with an input that provides "
        "further context. Write a response that appropriately completes the request.\n"
        "\n"
        f"{I}### Instruction:\n"
        f"{I}Add.\n"
        "\n"
        f"{I}### Input:\n"
        f"{I}1 2\n"
        "\n"
        f"{I}### Response:\n"
        f"{I}"
    )


def read(path):
    return [instruction_of(record) for record in read_objects(str(path))]


@pytest.mark.parametrize("name", ["train.json", "train.json.gz", "train.jsonl"])
def test_records_are_read_from_lists_and_lines(tmp_path, name):
    records = [RECORD, {"instruction": "Go.", "output": "Gone."}]
    lines = "\n".join(map(json.dumps, records))
    text = (lines if name.endswith("jsonl") else json.dumps(records)).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)

    assert read(path) == [Instruction("Add.", "3", "1 2", "3"), Instruction("Go.", "Gone.")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"train.json"),
        ("[{", r"is not JSON"),
        (json.dumps(RECORD), "is no list of records"),
        (json.dumps([RECORD, "Go."]), "record 2 is 'Go.': it must be an object"),
        (json.dumps([RECORD, {"instruction": "Go."}]), "record 2: output is None: it must be a"),
        (json.dumps([RECORD | {"instruction": " "}]), "record 1: instruction is empty"),
        (json.dumps([RECORD | {"output": ""}]), "record 1: output is empty"),
        (json.dumps([RECORD | {"input": 3}]), "record 1: input is 3: it must be a text"),
    ],
)
def test_anything_else_is_refused_by_file_and_record(tmp_path, text, message):
    path = tmp_path / "train.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message) as refusal:
        read(path)
    assert str(path) in str(refusal.value)


def test_half_a_packed_file_is_refused(tmp_path):
    path = tmp_path / "train.json.gz"
    path.write_bytes(gzip.compress(json.dumps([RECORD]).encode())[:-9])
    with pytest.raises(UserError, match="cannot be decompressed"):
        read(path)

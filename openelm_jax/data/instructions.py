"""Instruction records of LLM-Adapters (arXiv 2304.01933) and the two forms of their prompts.

A file is one JSON list of {"instruction", "input", "output", "answer"}, gzipped or not.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from openelm_jax.errors import UserError

PromptForm = Literal["corenet", "llm-adapters"]

REQUEST = "Write a response that appropriately completes the request."
INDENT = " " * 16


@dataclass(frozen=True)
class Instruction:
    """A record: what is asked, maybe about an input, and the text and the word that answer it."""

    instruction: str
    output: str
    input: str = ""
    answer: str = ""


def read_instructions(path: Path) -> list[Instruction]:
    """Return a file's records.

    Raises UserError naming the file, and the record by its number from 1, for anything else.
    """
    try:
        raw = path.read_bytes()
        records = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (OSError, EOFError, ValueError) as fault:
        raise UserError(f"{path} cannot be read as JSON ({fault}); fetch it again.") from None
    if not isinstance(records, list) or not records:
        raise UserError(f"{path} is no list of records: give a file of LLM-Adapters' form.")
    return [_record(record, f"{path}, record {number}") for number, record in enumerate(records, 1)]


def _record(record: object, where: str) -> Instruction:
    if not isinstance(record, dict):
        raise UserError(f"{where} is {str(record)[:40]!r}: it must be an object.")
    for name in ("instruction", "output"):
        if not isinstance(record.get(name), str) or not record[name].strip():
            raise UserError(f"{where}: {name} must be a text that is not empty.")
    texts = {name: record.get(name) or "" for name in ("input", "answer")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise UserError(f"{where}: {name} is {text!r}: it must be a text.")
    return Instruction(record["instruction"], record["output"], texts["input"], texts["answer"])


def prompt(instruction: str, input: str = "", form: PromptForm = "corenet") -> str:
    """Return what stands before the output: the task, a line each for its parts, all indented.

    `corenet` is how Apple trained and scored (`commonsense_170k.py`), `llm-adapters` how
    LLM-Adapters asks for generated answers (`commonsense_evaluate.py`). They differ in spaces:
    behind the first line, and on the empty lines.
    """
    about = ", paired with an input that provides further context" if input else ""
    first = f"Below is an instruction that describes a task{about}. {REQUEST}"
    behind = {"corenet": 1 if input else 2, "llm-adapters": 0 if input else 1}[form]
    empty = INDENT if form == "corenet" else ""
    lines = [first + " " * behind, "", f"{INDENT}### Instruction:", INDENT + instruction, empty]
    if input:
        lines += [f"{INDENT}### Input:", INDENT + input, empty]
    return "\n".join([*lines, f"{INDENT}### Response:", INDENT])

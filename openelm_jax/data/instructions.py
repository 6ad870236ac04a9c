"""Instruction records of LLM-Adapters (arXiv 2304.01933) and the two forms of their prompts.

A record is {"instruction", "input", "output", "answer"}; its files are lists of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from openelm_jax.data.objects import Object
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


def instruction_of(record: Object) -> Instruction:
    """Return the instruction of a record; UserError with its place for fields that are no texts."""
    fields, where = record
    texts: dict[str, str] = {}
    for name in ("instruction", "output", "input", "answer"):
        needed = name in ("instruction", "output")
        text = fields.get(name)
        if text is None and not needed:
            text = ""
        if not isinstance(text, str):
            raise UserError(f"{where}: {name} is {text!r}: it must be a text.")
        if needed and not text.strip():
            raise UserError(f"{where}: {name} is empty: there is nothing to learn.")
        texts[name] = text
    return Instruction(**texts)


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

"""Prompts of RACE in their form of April 2024, with which the paper's figures were made.

The last problem of an article is asked, after the others with their answers. Of those that end in
a blank to be filled ("  _  .") only the last five characters stand in the prompt: the blank itself
with the answer behind it, which later versions of the harness mended.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

BLANK = "  _  ."


def prompt(record: Mapping[str, Any]) -> str:
    """Return the article, its answered problems, and the question that is asked."""
    *answered, asked = _problems(record)
    lines = [f"Article: {record['article']}", ""]
    for problem in answered:
        right = problem["options"]["ABCD".index(problem["answer"])]
        if problem["question"].endswith(BLANK):
            lines.append(problem["question"][-5:] + right)
        else:
            lines += [f"Question: {problem['question']}", f"Answer: {right}"]
    return "\n".join([*lines, asked["question"]])


def options(record: Mapping[str, Any]) -> list[str]:
    """Return the four answers to the question that is asked."""
    return _problems(record)[-1]["options"][:4]


def answer(record: Mapping[str, Any]) -> int:
    """Return which of them is right."""
    return "ABCD".index(_problems(record)[-1]["answer"])


def _problems(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the problems, which the data set holds as Python's text of a list."""
    return ast.literal_eval(record["problems"])

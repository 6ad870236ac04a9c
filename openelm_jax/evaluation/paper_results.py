"""The paper's Tables 4 and 5: what it found for its models, in percent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PaperRow:
    """A row: a model's figures by the harness' names of the tasks, and their average."""

    model: str
    kind: str
    values: Mapping[str, float]
    average: float
    source: str


MODELS = ("OpenELM-270M", "OpenELM-450M", "OpenELM-1_1B", "OpenELM-3B")
AVERAGES = {
    "zero-shot": (54.37, 57.56, 63.44, 67.39),
    "openllm": (38.72, 41.50, 45.93, 48.90),
    "llm360": (45.13, 47.69, 51.68, 54.35),
}


def paper_rows(suite: str) -> list[PaperRow]:
    """Return the rows of one suite."""
    return [
        PaperRow(model, "base", {}, average, "Table 4 of the paper")
        for model, average in zip(MODELS, AVERAGES[suite], strict=True)
    ]

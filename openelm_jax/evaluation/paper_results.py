"""The paper's Tables 4 and 5: what it found for models, in percent (`paper_results.json`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class PaperRow:
    """A row: a model's figures by the harness' names of the tasks, and their average.

    Where a source has only the average there are no figures.
    """

    model: str
    kind: str
    values: Mapping[str, float]
    average: float
    source: str


def paper_rows(suite: str) -> list[PaperRow]:
    """Return the rows of one suite."""
    text = (files("openelm_jax.evaluation") / "paper_results.json").read_text(encoding="utf-8")
    table = json.loads(text)[suite]
    return [
        PaperRow(
            row["model"],
            row["kind"],
            dict(zip(table["tasks"], row["values"], strict=bool(row["values"]))),
            row["average"],
            row["source"],
        )
        for row in table["rows"]
    ]

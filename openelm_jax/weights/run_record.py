"""How weights were trained: what their card says, kept as run.json beside our own."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from openelm_jax.config import Experiment
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import from_json
from openelm_jax.weights.json_files import read_json, write_json

FILE = "run.json"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """How the weights were trained."""

    experiment: Experiment
    step: int
    data: tuple[str, ...]
    """A line a source: what of it was read."""
    validation: tuple[float, float] | None
    """Nats a token and bits a byte of the held-out text, at this step."""
    averaged: tuple[int, ...] = ()
    """The steps whose mean the weights are, if they are a mean; `step` is the last of them."""


def write_run_record(directory: Path, record: RunRecord) -> None:
    """Write the record of weights into their directory."""
    write_json(directory / FILE, dataclasses.asdict(record), sort_keys=False)


def read_run_record(directory: Path) -> RunRecord | None:
    """Return the record beside weights, None if there is none; UserError for a damaged one."""
    path = directory / FILE
    if not path.is_file():
        return None
    fields = read_json(path)
    try:
        nats, bits = fields["validation"] or (0, 0)
        return RunRecord(
            experiment=from_json(json.dumps(fields["experiment"]), str(path)),
            step=int(fields["step"]),
            data=tuple(map(str, fields["data"])),
            validation=(float(nats), float(bits)) if fields["validation"] else None,
            averaged=tuple(map(int, fields["averaged"])),
        )
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{path} is damaged; restore it, or delete it to go on without the record of the run."
        ) from None

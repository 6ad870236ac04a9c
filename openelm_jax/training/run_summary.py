"""How a run's weights were trained, for their card."""

from __future__ import annotations

import json
from pathlib import Path

from openelm_jax.data.audit import audit_position, summary_lines
from openelm_jax.data.position import Position
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import from_json
from openelm_jax.weights.orbax import load_data_position, step_directory
from openelm_jax.weights.run_record import RunRecord


def summarize_run(run: Path, step: int) -> RunRecord:
    """Return what a run directory says of a saved step; weights may be all that is left of it."""
    file = run / "experiment.json"
    return RunRecord(
        experiment=from_json(file.read_bytes(), str(file)),
        step=step,
        data=_data(step_directory(run, step)),
        validation=_validation(run / "metrics.jsonl", step),
    )


def _data(step_directory: Path) -> tuple[str, ...]:
    try:
        position = Position.from_json(load_data_position(step_directory))
    except UserError:  # deleted, or of an older version of this program
        return ("not recorded for this step",)
    return tuple(summary_lines(audit_position(position)))


def _validation(metrics: Path, step: int) -> tuple[float, float] | None:
    if not metrics.is_file():
        return None
    for line in metrics.read_bytes().splitlines():
        if b'"validation/loss"' not in line:
            continue
        try:
            figures = json.loads(line)
            if figures["step"] == step:
                return float(figures["validation/loss"]), float(figures["validation/bits_per_byte"])
        except (ValueError, KeyError, TypeError):
            continue  # cut short when the machine failed, say
    return None

"""How a run's weights were trained, for their card."""

from __future__ import annotations

import json
from pathlib import Path

from openelm_jax.data.audit import audit_position, summary_lines
from openelm_jax.data.position import Position
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import from_json
from openelm_jax.weights.model_card import RunSummary
from openelm_jax.weights.orbax import load_data_position, step_directory


def summarize_run(run: Path, step: int) -> RunSummary:
    """Return what a run directory says of a saved step; weights may be all that is left of it."""
    file = run / "experiment.json"
    return RunSummary(
        experiment=from_json(file.read_bytes(), str(file)),
        step=step,
        data=_data(step_directory(run, step)),
        validation=_validation(run / "metrics.jsonl", step),
    )


def _data(step_directory: Path) -> tuple[str, ...]:
    try:
        position = Position.from_json(load_data_position(step_directory))
    except UserError as fault:  # deleted, or of an older version of this program
        return (f"not known ({fault})",)
    return tuple(summary_lines(audit_position(position)))


def _validation(metrics: Path, step: int) -> tuple[float, float] | None:
    if not metrics.is_file():
        return None
    for line in metrics.read_text(encoding="utf-8").splitlines():
        if '"validation/loss"' in line and (figures := json.loads(line))["step"] == step:
            return figures["validation/loss"], figures["validation/bits_per_byte"]
    return None

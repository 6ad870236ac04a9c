"""What a new run starts from, if not from weights that are drawn: `train --from`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from openelm_jax.config import Experiment, ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.model.scaling import differing_widths
from openelm_jax.training.state import Moments
from openelm_jax.weights.load import Weights, open_weights
from openelm_jax.weights.names import Params
from openelm_jax.weights.stored import read_params
from openelm_jax.weights.vocabulary import TABLES, resize_vocabulary


@dataclass(frozen=True, kw_only=True, eq=False)
class Start:
    """Weights; and the moments behind them and the updates done, from a training checkpoint."""

    weights: Weights
    moments: Moments | None = None
    step: int = 0


def read_start(
    where: str,
    experiment: Experiment,
    exp: str,
    say: Callable[[str], None],
    adapter: str | None = None,
) -> Start:
    """Return what `where` holds for a run of `experiment`, which `exp` names on the command line.

    A training checkpoint of CoreNet's is gone on with, at its step; anything else gives weights to
    start from, at step 0; so does anything with the adapters of `adapter` merged. Rows are added
    up to the experiment's vocabulary. Raises UserError for another model, for more rows of
    vocabulary, and for a step after the experiment's last.
    """
    rows = experiment.model.vocab_size
    with open_weights(where, exp=exp, adapter=adapter) as stored:
        _require_same_model(where, stored.config, experiment.model)
        if (given := stored.config.vocab_size) < rows:
            say(f"{where}: {rows - given:,} rows added to its vocabulary of {given:,}")
        resized = resize_vocabulary(stored, rows)
        weights = Weights(resized.config, read_params(resized), resized.tokenizer, resized.source)
        start = _with_moments(weights, stored.file, exp)
    if start.step >= (steps := experiment.training.steps):
        raise UserError(
            f"--from {where} has had {start.step:,} updates and training.steps is {steps:,}, "
            "which counts them in; raise it."
        )
    return start


def _with_moments(weights: Weights, file: Path | None, exp: str) -> Start:
    if file is None or file.suffix != ".pt":
        return Start(weights=weights)
    from openelm_jax.weights.corenet_training import is_training_checkpoint, open_corenet_training

    if not is_training_checkpoint(file):
        return Start(weights=weights)
    training = open_corenet_training(file, exp)
    rows = weights.config.vocab_size
    moments = Moments(
        first=_with_rows(training.first_moment, rows),
        second=_with_rows(training.second_moment, rows),
        updates=training.updates,
    )
    return Start(weights=weights, moments=moments, step=training.step)


def _with_rows(moment: Params, rows: int) -> Params:
    """Return a moment of a vocabulary of so many rows: new ones have had no gradient yet."""
    added = {
        name: np.pad(table, ((0, rows - len(table)), (0, 0)))
        for (name,) in TABLES
        if (table := moment.get(name)) is not None and len(table) < rows
    }
    return moment | added


def _require_same_model(where: str, config: ModelConfig, wanted: ModelConfig) -> None:
    differences = differing_widths(config, wanted)
    if differences:
        raise UserError(
            f"--from {where} is another model (field: there, here): {'; '.join(differences)}."
        )
    if config.vocab_size > wanted.vocab_size:
        raise UserError(
            f"--from {where} has {config.vocab_size:,} rows of vocabulary and model.vocab_size is "
            f"{wanted.vocab_size:,}: rows are added, never cut; raise model.vocab_size to "
            f"{config.vocab_size}."
        )

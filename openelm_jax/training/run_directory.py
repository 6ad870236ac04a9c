"""The run directory: which experiment it belongs to, and its tokenizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from openelm_jax.config import Experiment, differing_fields, from_json, to_json
from openelm_jax.data.pipeline import training_texts
from openelm_jax.errors import UserError
from openelm_jax.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from openelm_jax.weights.orbax import saved_steps

EXPERIMENT = "experiment.json"
TOKENIZER = "tokenizer.model"


def claim_run(run: Path, experiment: Experiment) -> None:
    """Write the experiment into a new run directory, or check it against an older one's.

    Until the first checkpoint everything may change, so that a mistake can be mended; then what
    changes no result may (logging, checkpoints, prefetch, where the data lies). Raises UserError
    naming every other field that differs.
    """
    path = run / EXPERIMENT
    try:
        if path.is_file():
            before = from_json(path.read_text(encoding="utf-8"))
            differences = differing_fields(_what_counts(before), _what_counts(experiment))
            if differences and saved_steps(run):
                raise UserError(
                    f"{run} was made by another experiment (field: there, now): "
                    f"{'; '.join(differences)}. Choose another --run, or undo the difference."
                )
            if differences and experiment.tokenizer.path is None:
                (run / TOKENIZER).unlink(missing_ok=True)  # trained for what was tried before
        run.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(to_json(experiment), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise _cannot_write(run, error) from error


def open_tokenizer(run: Path, experiment: Experiment) -> tuple[Tokenizer, str]:
    """Return the run's tokenizer and where it comes from; the first time, copy or train it.

    Trained on the experiment's own training text if there is no `tokenizer.path`. Raises
    UserError when the given file is not the one that the run began with.
    """
    config, kept = experiment.tokenizer, run / TOKENIZER
    model_vocab_size = experiment.model.vocab_size
    try:
        if config.path is not None:
            tokenizer = load_tokenizer(config.path, model_vocab_size)
            if not (kept.is_file() and saved_steps(run)):
                kept.write_bytes(tokenizer.model_bytes)
            elif kept.read_bytes() != tokenizer.model_bytes:
                raise UserError(
                    f"{kept} differs from --tokenizer {config.path}: the run began with another "
                    "tokenizer; leave the flag out, or choose another --run."
                )
            return tokenizer, config.path
        if kept.is_file():
            return load_tokenizer(kept, model_vocab_size), str(kept)
        assert config.vocab_size is not None, "checked with the arguments"
        train_tokenizer(training_texts(experiment.data), config.vocab_size, kept)
        return load_tokenizer(kept, model_vocab_size), "trained on the training text"
    except OSError as error:
        raise _cannot_write(run, error) from error


def _what_counts(experiment: Experiment) -> Experiment:
    """Return the experiment with everything that changes no result set to one value."""
    return dataclasses.replace(
        experiment,
        tokenizer=dataclasses.replace(experiment.tokenizer, path=None),
        data=dataclasses.replace(experiment.data, root=None, prefetch=0),
        training=dataclasses.replace(
            experiment.training, log_every=1, validate_every=0, sample_prompts=()
        ),
        checkpoint=dataclasses.replace(experiment.checkpoint, every=1, keep_every=None),
    )


def _cannot_write(run: Path, error: OSError) -> UserError:
    return UserError(
        f"{run}: {error.strerror or error}; make the run directory writable or choose another "
        "--run."
    )

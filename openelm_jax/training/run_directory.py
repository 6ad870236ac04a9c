"""The run directory: which experiment it belongs to, its shards, its tokenizer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from openelm_jax.config import Experiment, MeshConfig
from openelm_jax.data.manifest import Manifest, describe_changes
from openelm_jax.data.pipeline import training_texts
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import differing_fields, from_json, to_json
from openelm_jax.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from openelm_jax.weights.load import Weights
from openelm_jax.weights.orbax import saved_steps

EXPERIMENT = "experiment.json"
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.model"


def check_run(run: Path, experiment: Experiment) -> None:
    """Make the run directory, or check that an older one belongs to this experiment.

    Until the first checkpoint everything may change, so that a mistake can be mended; then what
    changes no result may (logging, checkpoints, prefetch and workers, where the data lies, when it
    is too bad or read too often to go on), or its last bits only (mesh, accumulation, kernel, what
    is computed again). Raises UserError naming every other field that differs,
    but for the sources' weights: those of the checkpoint count (`position.check_fingerprint`).
    """
    path = run / EXPERIMENT
    try:
        run.mkdir(parents=True, exist_ok=True)
        if not (path.is_file() and saved_steps(run)):
            return
        before = from_json(path.read_bytes(), str(path))
    except OSError as error:
        raise _cannot_write(run, error) from error
    differences = differing_fields(_what_counts(before), _what_counts(experiment))
    if differences:
        raise UserError(
            f"{run} was made by another experiment (field: there, now): "
            f"{'; '.join(differences)}. Choose another --run, or undo the difference."
        )


def check_shards(run: Path, manifest: Manifest) -> None:
    """Raise UserError when a run with a checkpoint was begun with other shards, naming them."""
    path = run / MANIFEST
    if not (path.is_file() and saved_steps(run)):
        return
    before = Manifest.from_json(json.loads(path.read_bytes()))
    if before.sha256() != manifest.sha256():
        raise UserError(
            f"{run} was begun with other data files: {describe_changes(before, manifest)}; put "
            "them back as they were, or start a new run."
        )


def record_run(run: Path, experiment: Experiment, manifest: Manifest) -> None:
    """Write experiment and shards into the run directory, when nothing is left to be refused."""
    try:
        _write(run / EXPERIMENT, to_json(experiment))
        _write(run / MANIFEST, json.dumps(manifest.to_json(), indent=1) + "\n")
    except OSError as error:
        raise _cannot_write(run, error) from error


def open_tokenizer(
    run: Path, experiment: Experiment, start: Weights | None = None
) -> tuple[Tokenizer, str]:
    """Return the run's tokenizer and where it comes from.

    Kept in the run from its first checkpoint on. Before that it is the one of `tokenizer.path`,
    or the one that came with the weights to start from, or trained on the training text. Raises
    UserError where two that should be the same differ.
    """
    path, kept = experiment.tokenizer.path, run / TOKENIZER
    model_vocab_size = experiment.model.vocab_size
    try:
        given = None if path is None else load_tokenizer(path, model_vocab_size)
        if saved_steps(run):
            tokenizer = load_tokenizer(kept, model_vocab_size)
            if given is not None and given.sha256 != tokenizer.sha256:
                raise UserError(
                    f"{kept} differs from --tokenizer {path}: the run began with another "
                    "tokenizer; leave the flag out, or choose another --run."
                )
            return tokenizer, str(kept)
        if start is not None:
            _check_same_tokens(start, given)
        if given is not None:
            kept.write_bytes(given.model_bytes)
            return given, str(path)
        if start is not None and start.tokenizer is not None:
            kept.write_bytes(start.tokenizer.model_bytes)
            return load_tokenizer(kept, model_vocab_size), f"that of {start.source}"
        pieces = experiment.tokenizer.vocab_size
        assert pieces is not None, "checked with the arguments"
        train_tokenizer(training_texts(experiment.data), pieces, kept)
        return load_tokenizer(kept, model_vocab_size), "trained on the training text"
    except OSError as error:
        raise _cannot_write(run, error) from error


def _check_same_tokens(start: Weights, given: Tokenizer | None) -> None:
    """Refuse to give the rows of an embedding another meaning."""
    if start.tokenizer is None and given is None:
        raise UserError(
            f"--from {start.source} comes without a tokenizer: give the one that it was trained "
            "with by --tokenizer FILE."
        )
    if start.tokenizer is not None and given is not None and start.tokenizer.sha256 != given.sha256:
        raise UserError(
            f"--tokenizer differs from the tokenizer of --from {start.source}, whose embedding "
            "would get another meaning; leave the flag out."
        )


def _what_counts(experiment: Experiment) -> Experiment:
    """Return the experiment with everything that is not to be compared set to one value."""
    sources = tuple(
        dataclasses.replace(source, root=None, max_epochs=None, weight=1.0)
        for source in experiment.data.sources
    )
    return dataclasses.replace(
        experiment,
        tokenizer=dataclasses.replace(experiment.tokenizer, path=None),
        data=dataclasses.replace(
            experiment.data,
            root=None,
            sources=sources,
            prefetch=0,
            workers=0,
            max_bad_fraction=0.0,
            on_damaged_shard="raise",
        ),
        training=dataclasses.replace(
            experiment.training,
            accumulation=1,
            attention="auto",
            remat="none",
            memory_gib=None,
            loss_chunk=None,
            log_every=1,
            profile_steps=None,
            validate_every=0,
            sample_prompts=(),
            evaluate_every=0,
            evaluate_tasks=(),
            evaluate_limit=None,
            evaluate_data=None,
        ),
        mesh=MeshConfig(),
        checkpoint=dataclasses.replace(experiment.checkpoint, every=1, keep_every=None),
    )


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _cannot_write(run: Path, error: OSError) -> UserError:
    return UserError(
        f"{run}: {error.strerror or error}; make the run directory writable or choose another "
        "--run."
    )

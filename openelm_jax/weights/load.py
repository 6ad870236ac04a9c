"""`--from WHERE`: weights, whatever holds them."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import from_json
from openelm_jax.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from openelm_jax.weights.adapters import StoredAdapters, merge_adapters
from openelm_jax.weights.huggingface import CONFIG, open_huggingface
from openelm_jax.weights.names import Params
from openelm_jax.weights.orbax import (
    CHECKPOINTS,
    is_weights_directory,
    latest_step,
    open_params,
    open_weights_directory,
    saved_steps,
    step_directory,
)
from openelm_jax.weights.peft import read_peft
from openelm_jax.weights.stored import StoredWeights, read_params

ACCEPTED = (
    "a run directory, RUN@STEP, a directory of `export` or `average`, a Hugging Face or MLX "
    "directory (config.json and safetensors), a .gguf file, CoreNet's .pt with its .yaml beside it "
    "or --exp, or hf://OWNER/NAME[@REVISION]"
)
EXPERIMENT = "experiment.json"


@dataclass(frozen=True, eq=False)
class Weights:
    """A model on the host: float32 NumPy parameters, and the tokenizer if there is one."""

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer | None
    source: str
    """Where they came from, for messages: `runs/tiny@500`."""


def load_weights(
    where: str | Path,
    tokenizer: str | Path | None = None,
    exp: str | None = None,
    adapter: str | Path | None = None,
) -> Weights:
    """Return all of what `open_weights` gives."""
    with open_weights(where, tokenizer, exp, adapter) as stored:
        return Weights(stored.config, read_params(stored), stored.tokenizer, stored.source)


@contextmanager
def open_weights(
    where: str | Path,
    tokenizer: str | Path | None = None,
    exp: str | None = None,
    adapter: str | Path | None = None,
) -> Iterator[StoredWeights]:
    """Give what `where` holds, a parameter at a time: whatever `--from` accepts.

    `tokenizer` is a SentencePiece file that supplies or overrides the tokenizer; `exp` names the
    experiment whose model CoreNet's file is, if no .yaml says so. `adapter` is a directory of
    peft's whose adapters are merged into the weights. A tokenizer.json, which is not read, is named
    on stderr where nothing else is there. Raises UserError for anything else, and for a tokenizer
    larger than the model.
    """
    path = _local(str(where))
    with _open(path, str(where), exp) as stored:
        if path != str(where):  # the Hub's cache, whose directories have other names
            stored = dataclasses.replace(stored, source=str(where))
        beside = _directory_of(path) / TOKENIZER_FILE
        if tokenizer or (stored.tokenizer is None and beside.is_file()):
            given = Path(tokenizer) if tokenizer else beside
            read = load_tokenizer(given, model_vocab_size=stored.config.vocab_size)
            stored = dataclasses.replace(stored, tokenizer=read)
        elif stored.tokenizer is None and beside.with_suffix(".json").is_file():
            print(
                f"warning: {where} has no {TOKENIZER_FILE}, and its tokenizer.json is not read: "
                "give the file that it was made of with --tokenizer FILE.",
                file=sys.stderr,
            )
        yield stored if adapter is None else _with_adapters(stored, adapter)


def open_adapters(adapter: str | Path, stored: StoredWeights) -> StoredAdapters:
    """Return the adapters in a directory of peft's, which may be hf://, for opened weights."""
    pieces = None if stored.tokenizer is None else stored.tokenizer.vocab_size
    given = read_peft(Path(_local(str(adapter))), stored.config, pieces)
    return dataclasses.replace(given, source=str(adapter))


def _with_adapters(stored: StoredWeights, adapter: str | Path) -> StoredWeights:
    whole = merge_adapters(stored, open_adapters(adapter, stored))
    if whole.config.tie_embeddings != stored.config.tie_embeddings:
        print(
            f"note: {adapter} adapts the embedding for the lookup alone: merged, the model has a "
            "head of its own, the embedding as it was.",
            file=sys.stderr,
        )
    return whole


def _local(where: str) -> str:
    """Return where the files lie on this machine, fetched from the Hub for hf://."""
    if not where.startswith("hf://"):
        return where
    from openelm_jax.weights.hub import fetch

    return str(fetch(where))


def _directory_of(where: str) -> Path:
    path, _ = split_step(where)
    return path if path.is_dir() else path.parent


@contextmanager
def _open(where: str, asked: str, exp: str | None) -> Iterator[StoredWeights]:
    path, step = split_step(where)
    if (path / EXPERIMENT).is_file():
        yield _open_run(path, step)
        return
    if step is not None:
        raise _unrecognised(path, step, asked)
    if is_weights_directory(path):
        with open_weights_directory(path) as stored:
            yield stored
        return
    if (path / CONFIG).is_file():
        with open_huggingface(path) as stored:
            yield stored
        return
    file = _only_file(path)
    if file is not None and file.suffix == ".gguf":
        from openelm_jax.weights.gguf_file import open_gguf

        with open_gguf(file) as stored:
            yield stored
        return
    if file is not None and file.suffix == ".pt":
        from openelm_jax.weights.corenet import open_corenet

        with open_corenet(file, exp) as stored:
            yield stored
        return
    raise _unrecognised(path, step, asked)


def _unrecognised(path: Path, step: int | None, asked: str) -> UserError:
    if not path.exists():
        on_the_hub = not path.parent.exists() and re.fullmatch(r"[\w.-]+/[\w.@-]+", asked)
        hint = f", or hf://{asked} if you mean the Hub's" if on_the_hub else ""
        fault = f"there is no {path}{hint}; accepted are {ACCEPTED}"
    elif (path / CHECKPOINTS).is_dir():
        fault = f"{path} is a run whose {EXPERIMENT} is lost: restore it from a copy"
    elif path.parent.name == CHECKPOINTS and path.name.isdecimal():
        fault = f"{path} is a step of a run: give {path.parent.parent}@{int(path.name)}"
    elif step is not None:
        fault = f"{path} is no run directory and has no steps: leave @{step} out"
    elif path.suffix == ".safetensors":
        fault = f"{path} does not say which model it is: give its directory, with its {CONFIG}"
    elif any(path.glob("*.safetensors")):
        fault = f"{path} has no {CONFIG}, which says which model the weights are: put it there"
    elif len(files := _foreign_files(path)) > 1:
        fault = f"{path} holds {', '.join(file.name for file in files)}: give one of these files"
    else:
        fault = f"no weights are recognised in {path}; accepted are {ACCEPTED}"
    return UserError(f"--from {asked}: {fault}.")


def _open_run(run: Path, step: int | None) -> StoredWeights:
    file = run / EXPERIMENT
    experiment = from_json(file.read_bytes(), str(file))
    step = choose_step(run, step)
    return StoredWeights(
        config=experiment.model,
        read=open_params(step_directory(run, step)),
        source=f"{run}@{step}",
        saved=(run, step),
    )


def _only_file(path: Path) -> Path | None:
    """Return the file itself, or the one file of foreign weights that a directory holds."""
    if path.is_file():
        return path
    files = _foreign_files(path)
    return files[0] if len(files) == 1 else None


def _foreign_files(directory: Path) -> list[Path]:
    return [
        file
        for suffix in (".gguf", ".pt")
        for file in sorted(directory.glob(f"*{suffix}"))
        if file.is_file()
    ]


def choose_step(run: Path, step: int | None) -> int:
    """Return a saved step of a run, the latest if none is asked for; raises UserError otherwise."""
    latest = latest_step(run)
    if latest is None:
        raise UserError(
            f"{run} holds no finished checkpoint yet; train longer, or take another run."
        )
    if step is not None and step not in (steps := saved_steps(run)):
        raise UserError(f"{run} holds no step {step}; it has {', '.join(map(str, steps))}.")
    return latest if step is None else step


def split_step(where: str) -> tuple[Path, int | None]:
    """Split RUN@STEP; a path that exists as it stands has no step."""
    run, at, step = where.rpartition("@")
    if at and step.isdecimal() and not Path(where).exists():
        return Path(run), int(step)
    return Path(where), None

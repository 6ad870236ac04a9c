"""`--from WHERE`: weights, whatever holds them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import from_json
from openelm_jax.tokenizer import Tokenizer, load_tokenizer
from openelm_jax.weights.huggingface import read_huggingface
from openelm_jax.weights.names import Params
from openelm_jax.weights.orbax import latest_step, load_params, saved_steps, step_directory

ACCEPTED = (
    "a run directory, RUN@STEP, or a Hugging Face or MLX directory (config.json and safetensors)"
)


@dataclass(frozen=True, eq=False)
class Weights:
    """A model on the host: float32 NumPy parameters, and the tokenizer if there is one."""

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer | None
    source: str
    """Where they came from, for messages: `runs/tiny@500`."""


def load_weights(where: str | Path, tokenizer_path: str | Path | None = None) -> Weights:
    """Return what `where` holds: a run (its latest step), `RUN@STEP`, or a weights directory.

    `tokenizer_path` supplies or overrides the tokenizer. Raises UserError for anything else.
    """
    path, step = split_step(str(where))
    if (path / "experiment.json").is_file():
        file = path / "experiment.json"
        experiment = from_json(file.read_bytes(), str(file))
        step = choose_step(path, step)
        config, params = experiment.model, load_params(step_directory(path, step))
        source = f"{path}@{step}"
    elif step is None and (path / "config.json").is_file():
        config, params = read_huggingface(path)
        source = str(path)
    elif not path.exists():
        raise UserError(f"--from {where}: there is no {path}; accepted are {ACCEPTED}.")
    else:
        raise UserError(
            f"--from {where}: no weights are recognised there; accepted are {ACCEPTED}."
        )
    beside = path / "tokenizer.model"
    given = Path(tokenizer_path) if tokenizer_path else beside if beside.is_file() else None
    tokenizer = load_tokenizer(given, model_vocab_size=config.vocab_size) if given else None
    return Weights(config, params, tokenizer, source)


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

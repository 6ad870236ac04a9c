"""Small training runs: a corpus, an experiment file, and the command in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from corpora import documents, tokenizer, write_shards
from saved_params import saved_params

from openelm_jax.config import (
    CheckpointConfig,
    DataConfig,
    Experiment,
    ModelConfig,
    OptimizerConfig,
    SourceConfig,
    TokenizerConfig,
    TrainingConfig,
)
from openelm_jax.weights.orbax import step_directory

EXPERIMENT_FILE = '''"""A two-layer model, for the tests."""

from pathlib import Path

from small_runs import small_experiment


def experiment():
    return small_experiment(Path(__file__).parent)
'''


def small_experiment(folder: Path) -> Experiment:
    """Return 16 updates on the corpus that `write_corpus` makes in `folder`.

    An update reads 132 tokens of about 1000, so that the run crosses an end of an epoch.
    """
    return Experiment(
        name="small",
        model=ModelConfig(
            num_layers=2,
            model_dim=32,
            head_dim=8,
            vocab_size=384,
            num_gqa_groups=2,
            ffn_dim_divisor=8,
            context_length=32,
        ),
        tokenizer=TokenizerConfig(path=str(folder / "tokenizer.model")),
        data=DataConfig(
            root=str(folder),
            sources=(SourceConfig(name="text", files=("train/*.jsonl",), holdout=("held/*",)),),
            min_chars=20,
            min_tokens=10,
            lanes=2,
        ),
        optimizer=OptimizerConfig(peak_lr=1e-2, warmup_steps=4),
        training=TrainingConfig(
            steps=16, global_batch_size=4, dtype="float32", log_every=4, validate_every=8
        ),
        checkpoint=CheckpointConfig(every=6, keep_every=None),
    )


def write_corpus(folder: Path) -> Path:
    """Write documents, held-out documents, a tokenizer and an experiment file; return the last."""
    write_shards(folder / "train", documents(10, seed=1, words=(10, 60)), "jsonl", 2)
    write_shards(folder / "held", documents(3, seed=2, words=(10, 40)), "jsonl", 1)
    (folder / "tokenizer.model").write_bytes(tokenizer().model_bytes)
    path = folder / "small.py"
    path.write_text(EXPERIMENT_FILE)
    return path


def train_command(experiment: Path, run: Path, *flags: str) -> list[str]:
    arguments = ["--exp", str(experiment), "--run", str(run), *flags]
    return [sys.executable, "-m", "openelm_jax.train", *arguments]


def environment(compiled_code: Path) -> dict[str, str]:
    """Return the environment of a command; what one compiles the next one finds."""
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(compiled_code),
    }


def call(command: Sequence[str], compiled_code: Path, code: int = 0) -> str:
    """Run a command to its end, check its exit code, and return what it wrote to stderr."""
    done = subprocess.run(command, env=environment(compiled_code), capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stderr


def assert_one_sentence(stderr: str, *parts: str) -> None:
    """Check that the last line, and no other, is `error: ...`, that it has all of `parts`, and
    that there is no traceback."""
    assert "Traceback" not in stderr, stderr
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert errors == stderr.splitlines()[-1:], stderr
    for part in parts:
        assert part in errors[0], errors[0]


def read_metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def params_of(run: Path, step: int) -> dict[str, np.ndarray]:
    """Return the saved parameters by path."""

    def flatten(tree, prefix=""):
        for name, leaf in tree.items():
            if isinstance(leaf, dict):
                yield from flatten(leaf, f"{prefix}{name}/")
            else:
                yield prefix + name, leaf

    return dict(flatten(saved_params(step_directory(run, step))))


def assert_equal_bits(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        assert actual[name].tobytes() == array.tobytes(), name

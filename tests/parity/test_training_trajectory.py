"""Forty updates of a small OpenELM are those of PyTorch: losses, gradient norms, final logits.

tests/data/training-trajectory holds the tokens, a ragged mask of the targets that count, and what
PyTorch computed in float32 from the weights in tests/data/tiny-openelm.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_directories import read_huggingface

from openelm_jax.config import OptimizerConfig, TrainingConfig
from openelm_jax.model.decoder import Decoder
from openelm_jax.training.optimizer import learning_rate, make_optimizer
from openelm_jax.training.state import new_state
from openelm_jax.training.step import Batch, make_train_step

DATA = Path(__file__).parents[1] / "data"
TRAJECTORY = json.loads((DATA / "training-trajectory" / "trajectory.json").read_text())
LOG = TRAJECTORY["log"]
OPTIMIZER = OptimizerConfig(peak_lr=3e-3, warmup_steps=5)
STEPS = 40
CUTS = [(1, 37), (2, 100)]
"""(accumulation, loss_chunk); no chunk divides the 256 or 128 tokens of a part."""


def logged(name: str) -> np.ndarray:
    return np.array([line[name] for line in LOG])


@functools.cache
def train(accumulation: int, loss_chunk: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the metrics of all steps by name, and the logits after the last."""
    arrays = np.load(DATA / "training-trajectory" / "data.npz")
    config, params = read_huggingface(DATA / "tiny-openelm")
    training = TrainingConfig(
        steps=STEPS,
        global_batch_size=4,
        dtype="float32",
        accumulation=accumulation,
        loss_chunk=loss_chunk,
    )
    optimizer = make_optimizer(OPTIMIZER)
    state = new_state(jax.tree.map(jnp.asarray, params), optimizer)
    step = jax.jit(make_train_step(Decoder(config), optimizer, training), donate_argnums=0)
    metrics = []
    for index in range(STEPS):
        batch = Batch(
            jnp.asarray(arrays["tokens"][index], jnp.int32), jnp.asarray(arrays["loss_mask"][index])
        )
        rate = jnp.float32(learning_rate(OPTIMIZER, STEPS, index))
        state, metric = step(state, batch, rate)
        metrics.append(jax.tree.map(float, metric)._asdict())
    assert int(state.step) == STEPS
    logits = Decoder(config).apply({"params": state.params}, jnp.asarray(arrays["ids"]))
    by_name = {name: np.array([metric[name] for metric in metrics]) for name in metrics[0]}
    return by_name, np.asarray(logits)


def test_the_fixture_trains_as_the_paper_does():
    assert TRAJECTORY["optimizer"]["b1"] == OPTIMIZER.b1
    assert TRAJECTORY["optimizer"]["b2"] == OPTIMIZER.b2
    assert TRAJECTORY["optimizer"]["eps"] == OPTIMIZER.eps
    assert TRAJECTORY["optimizer"]["weight_decay"] == OPTIMIZER.weight_decay
    assert TRAJECTORY["clip_global_norm"] == OPTIMIZER.clip_norm
    assert len(LOG) == STEPS
    assert logged("cross_entropy")[-1] < logged("cross_entropy")[0] - 0.3  # it learns
    assert (logged("grad_norm") > OPTIMIZER.clip_norm).any()  # and is clipped


def test_learning_rates_are_the_fixture_s_rounded_to_eight_decimals():
    rates = [learning_rate(OPTIMIZER, STEPS, step) for step in range(STEPS)]

    np.testing.assert_allclose(rates, logged("lr"), rtol=0, atol=0.5000001e-8)
    assert rates == [round(rate, 8) for rate in rates]


@pytest.mark.heavy
@pytest.mark.parametrize("cut", CUTS)
def test_losses_are_those_of_pytorch(cut):
    metrics, _ = train(*cut)

    np.testing.assert_allclose(metrics["loss"], logged("cross_entropy"), rtol=1e-5)
    np.testing.assert_allclose(metrics["z_loss"], logged("z_loss"), rtol=1e-5)


@pytest.mark.parametrize("cut", CUTS)
def test_gradient_norms_before_clipping_are_those_of_pytorch(cut):
    metrics, _ = train(*cut)

    np.testing.assert_allclose(metrics["grad_norm"], logged("grad_norm"), rtol=1e-4)


@pytest.mark.parametrize("cut", CUTS)
def test_means_are_over_the_counted_tokens_of_the_whole_batch(cut):
    metrics, _ = train(*cut)

    np.testing.assert_array_equal(metrics["tokens"], logged("tokens"))


@pytest.mark.parametrize("cut", CUTS)
def test_the_last_model_gives_pytorch_s_logits(cut):
    _, logits = train(*cut)

    expected = np.load(DATA / "training-trajectory" / "data.npz")["final_logits"]
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)

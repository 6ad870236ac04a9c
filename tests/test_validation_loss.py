"""The validation loss is the summed nats of the held-out tokens, and nothing of the padding.

Legend: N rows, L tokens of a row, T = L - 1 targets, V vocab.
"""

import math

import jax
import numpy as np
import pytest

from openelm_jax.config import ModelConfig, TrainingConfig
from openelm_jax.data.validation import ValidationSet
from openelm_jax.model.decoder import Decoder, init_params
from openelm_jax.training.step import make_validation_step
from openelm_jax.training.validation import validate

CONFIG = ModelConfig(
    num_layers=1,
    model_dim=8,
    head_dim=4,
    vocab_size=37,
    num_gqa_groups=1,
    ffn_dim_divisor=8,
    context_length=6,
)
DECODER = Decoder(CONFIG)
STEP = jax.jit(
    make_validation_step(DECODER, TrainingConfig(steps=1, global_batch_size=2, dtype="float32"))
)
NUM_BYTES = 91


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, 0)


@pytest.fixture(scope="module")
def held_out():
    """Five rows, of which the second and the last end early: 6 + 2 + 6 + 6 + 1 targets."""
    rows_NL = np.random.default_rng(0).integers(0, 37, (5, 7)).astype(np.int32)
    mask_NT = np.ones((5, 6), bool)
    mask_NT[1, 2:] = mask_NT[4, 1:] = False
    return ValidationSet(
        rows_NL=rows_NL, loss_mask_NT=mask_NT, num_bytes=NUM_BYTES, num_documents=3
    )


def test_equal_logits_cost_the_logarithm_of_the_vocabulary(params, held_out):
    """A zero embedding, tied to the head, makes all logits zero: ln V nats for each of 21 tokens,
    21 log2 V bits for 91 bytes."""
    uniform = params | {"embedding": np.zeros((37, 8), np.float32)}

    loss = validate(STEP, uniform, held_out, batch_size=2)

    assert loss.nats_per_token == pytest.approx(math.log(37), rel=1e-6)
    assert loss.bits_per_byte == pytest.approx(21 * math.log2(37) / NUM_BYTES, rel=1e-6)


def test_it_is_the_mean_over_counted_tokens_of_the_model_s_own_logits(params, held_out):
    logits_NTV = jax.jit(DECODER.apply)({"params": params}, held_out.rows_NL[:, :-1])
    logits_NTV = np.asarray(logits_NTV, np.float64)
    log_partition_NT = np.log(np.exp(logits_NTV).sum(axis=-1))
    targets_NT1 = held_out.rows_NL[:, 1:, None]
    nats_NT = log_partition_NT - np.take_along_axis(logits_NTV, targets_NT1, axis=-1)[..., 0]
    nats = nats_NT[held_out.loss_mask_NT].sum()

    loss = validate(STEP, params, held_out, batch_size=2)

    assert loss.nats_per_token == pytest.approx(nats / 21, rel=1e-5)
    assert loss.bits_per_byte == pytest.approx(nats / math.log(2) / NUM_BYTES, rel=1e-5)


@pytest.mark.parametrize("batch_size", [5, 8])
def test_how_full_the_last_batch_is_changes_nothing(params, held_out, batch_size):
    loss = validate(STEP, params, held_out, batch_size=2)

    assert validate(STEP, params, held_out, batch_size) == pytest.approx(loss, rel=1e-5)

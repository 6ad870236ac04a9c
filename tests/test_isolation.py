"""A row of documents kept apart is those documents alone: logits, loss and gradient.

The documents alone go through the step that knows nothing of isolation.

Legend: B batch, T time, L = T + 1 tokens of a row, D model, V vocab.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
from small_models import random_params

from openelm_jax.config import OptimizerConfig, TrainingConfig
from openelm_jax.model.attention import segments_of
from openelm_jax.model.decoder import Decoder
from openelm_jax.training.feed import counted_targets
from openelm_jax.training.optimizer import make_optimizer
from openelm_jax.training.state import new_state
from openelm_jax.training.step import Batch, make_train_step

BOS = 1
CONFIG = small_models.tiny(num_layers=2)
SHALLOW = small_models.tiny(num_layers=1)
OPTIMIZER = make_optimizer(OptimizerConfig(peak_lr=1.0))
NO_CLIPPING = 1e9

LENGTHS = ((5, 9, 1, 6), (12, 9))
"""Tokens of the documents in each row; the first of a row may be the rest of one."""


@functools.cache
def documents_of_rows():
    rng = np.random.default_rng(0)
    rows = [[rng.integers(2, 40, length) for length in lengths] for lengths in LENGTHS]
    for document in (*rows[0][1:], *rows[1]):
        document[0] = BOS  # the first row begins within a document
    return rows


def rows_of_documents():
    return np.array([np.concatenate(row) for row in documents_of_rows()], np.int32)


@functools.cache
def params(config=CONFIG):
    return random_params(config)


def logits(decoder, *, isolated):
    def apply(params, tokens_BT):
        segments_BT = segments_of(tokens_BT, BOS) if isolated else None
        variables = {"params": params}
        hidden_BTD, _ = decoder.apply(
            variables, tokens_BT, segments_BT=segments_BT, method="hidden"
        )
        return decoder.apply(variables, hidden_BTD, method="logits")

    return jax.jit(apply)


def documents_alone():
    """Return each document as a row that begins with it, zeros behind it, and their lengths."""
    documents = [document for row in documents_of_rows() for document in row]
    rows = np.zeros((len(documents), sum(LENGTHS[0])), np.int32)
    for row, document in zip(rows, documents, strict=True):
        row[: len(document)] = document
    return rows, [len(document) for document in documents]


def gradient(bos_id):
    """Return (tokens, counted) -> (their count, summed cross-entropy and z-loss, its gradient).

    With one update and nothing clipped Adam's first moment is a tenth of the mean's gradient.
    """
    training = TrainingConfig(steps=1, global_batch_size=2, dtype="float32", z_loss=0.1)
    step = make_train_step(Decoder(SHALLOW), OPTIMIZER, training, NO_CLIPPING, bos_id)

    @jax.jit
    def sums(tokens_BL, counted_BT):
        batch = Batch(tokens_BL, counted_BT)
        state, metrics = step(new_state(params(SHALLOW), OPTIMIZER), batch, jnp.float32(0))
        total = metrics.tokens
        moments = jax.tree.map(lambda mean: 10 * total * mean, state.moments[0].mu)
        return total, metrics.loss * total, metrics.z_loss * total, moments

    return sums


def assert_as_alone(decoder):
    """Check that a decoder computes each document of the rows as it does the document alone."""
    together = logits(decoder, isolated=True)(params(decoder.config), rows_of_documents())
    rows, lengths = documents_alone()
    alone = logits(decoder, isolated=False)(params(decoder.config), rows)
    pieces = np.split(np.concatenate(together), np.cumsum(lengths)[:-1])
    for ours, row, length in zip(pieces, alone, lengths, strict=True):
        np.testing.assert_allclose(ours, row[:length], rtol=1e-5, atol=1e-5)


def test_logits_are_those_of_each_document_alone():
    assert_as_alone(Decoder(CONFIG))


def test_positions_restart_with_each_document():
    """Seen by what comes before attention: attention itself depends on distances only."""

    def show_turned_queries(query_BTNH, *_):
        return query_BTNH

    assert_as_alone(Decoder(SHALLOW, attend=show_turned_queries))


def test_losses_and_gradients_are_the_sums_over_the_documents_alone():
    rows_BL = rows_of_documents()
    counted_BT = counted_targets(rows_BL, bos_id=BOS)

    total, loss, z_loss, gradients = gradient(BOS)(rows_BL, counted_BT)

    rows, lengths = documents_alone()
    expected_total, expected_loss, expected_z_loss, expected_gradients = gradient(bos_id=None)(
        rows, np.arange(1, rows.shape[1]) < np.array(lengths)[:, None]
    )
    assert total == expected_total == sum(tokens - 1 for row in LENGTHS for tokens in row)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(z_loss, expected_z_loss, rtol=1e-5)
    for ours, wanted in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True
    ):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(("dtype", "remat"), [(jnp.float32, "none"), (jnp.bfloat16, "block")])
def test_another_document_before_it_changes_no_bit_of_a_document(dtype, remat):
    rows_BT = rows_of_documents()
    changed_BT = rows_BT.copy()
    changed_BT[:, 1:5] = 39
    apply = logits(Decoder(CONFIG, dtype=dtype, remat=remat), isolated=True)

    before, after = (np.asarray(apply(params(), tokens)) for tokens in (rows_BT, changed_BT))

    assert not np.array_equal(after[:, :5], before[:, :5])
    np.testing.assert_array_equal(after[0, 5:], before[0, 5:])
    np.testing.assert_array_equal(after[1, 12:], before[1, 12:])

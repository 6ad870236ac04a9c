"""The logits of Apple's published PyTorch code, on random weights kept in tests/data."""

from pathlib import Path

import numpy as np

import openelm_jax

FIXTURE = Path(__file__).parents[1] / "data" / "tiny-openelm"


def test_logits_are_those_of_apples_code():
    model = openelm_jax.load(FIXTURE, dtype="float32")

    logits_BTV = model.logits(np.load(FIXTURE / "ref_ids.npy"))

    expected_BTV = np.load(FIXTURE / "ref_logits.npy")
    assert np.abs(expected_BTV).max() > 1
    np.testing.assert_allclose(logits_BTV, expected_BTV, rtol=0, atol=2e-5)


def test_bfloat16_stays_near_them():
    model = openelm_jax.load(FIXTURE, dtype="bfloat16")

    logits_BTV = model.logits(np.load(FIXTURE / "ref_ids.npy"))

    expected_BTV = np.load(FIXTURE / "ref_logits.npy")
    assert logits_BTV.dtype == np.float32
    error = np.abs(logits_BTV - expected_BTV).max()
    assert 1e-4 < error < 0.05 * np.abs(expected_BTV).max()

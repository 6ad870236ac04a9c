"""Matrices in fewer bits: what their levels stand for, and the products with them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openelm_jax.generation.forward import decoding_params
from openelm_jax.generation.language_model import LanguageModel, language_model
from openelm_jax.model import matrix
from openelm_jax.model.matrix import Dense, Int4, Int8, in_bits, product, rows_of
from tests.small_models import random_params, tiny

RNG = np.random.default_rng(0)
WEIGHT_OI = RNG.standard_normal((48, 128)).astype(np.float32)
FORMS = {
    "float32": Dense(jnp.asarray(WEIGHT_OI)),
    "bfloat16": Dense(jnp.asarray(WEIGHT_OI, jnp.bfloat16)),
    "8 bits": in_bits(WEIGHT_OI, 8, "float32"),
    "4 bits": in_bits(WEIGHT_OI, 4, "float32"),
}


def test_in_eight_bits_a_weight_is_the_nearest_127th_of_its_rows_largest() -> None:
    step_O1 = np.abs(WEIGHT_OI).max(axis=1, keepdims=True) / 127
    expected_OI = np.round(WEIGHT_OI / step_O1) * step_O1
    np.testing.assert_allclose(FORMS["8 bits"].widened(), expected_OI, rtol=1e-6)


def test_in_four_bits_a_weight_is_the_nearest_of_sixteen_levels_of_its_group() -> None:
    groups_OGE = WEIGHT_OI.reshape(48, 2, 64).astype(np.float64)
    least = groups_OGE.min(axis=-1, keepdims=True)
    levels_OGEL = (
        least[..., None]
        + np.arange(16) / 15 * np.ptp(groups_OGE, axis=-1, keepdims=True)[..., None]
    )
    nearest = np.abs(levels_OGEL - groups_OGE[..., None]).argmin(axis=-1)
    expected_OGE = np.take_along_axis(levels_OGEL, nearest[..., None], -1)[..., 0]
    np.testing.assert_allclose(
        FORMS["4 bits"].widened().reshape(48, 2, 64), expected_OGE, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_and_equal_weights_keep_their_values(bits: matrix.Bits) -> None:
    even_OI = np.zeros((2, 64), np.float32)
    even_OI[1] = 0.5
    np.testing.assert_allclose(in_bits(even_OI, bits, "float32").widened(), even_OI, rtol=1e-6)


def test_a_matrix_that_no_group_divides_is_not_cut_to_four_bits() -> None:
    kept = in_bits(WEIGHT_OI[:, :100], 4, "bfloat16")
    assert isinstance(kept, Dense)
    assert kept.weight_OI.dtype == jnp.bfloat16


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_rows", [1, 3, 9])
@pytest.mark.parametrize("somewhere", ["here", "on other platforms"])
def test_a_product_is_that_of_the_weights_that_are_meant(
    form: str, num_rows: int, somewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if somewhere != "here":
        monkeypatch.setattr(matrix, "_on_cpu", matrix._anywhere)
    stored = FORMS[form]
    dtype = jnp.bfloat16 if form == "bfloat16" else jnp.float32
    x_BTI = jnp.asarray(RNG.standard_normal((1, num_rows, 128)), dtype)
    expected_BTO = np.float64(x_BTI) @ np.float64(stored.widened()).T
    found_BTO = jax.jit(lambda x, stored: product(x, stored, jnp.float32))(x_BTI, stored)
    assert found_BTO.dtype == jnp.float32
    np.testing.assert_allclose(found_BTO, expected_BTO, atol=2e-5)
    assert product(x_BTI, stored).dtype == dtype


@pytest.mark.parametrize("form", ["8 bits", "4 bits"])
def test_fewer_bits_are_the_same_weights_for_one_row_and_for_many_in_bfloat16(form: str) -> None:
    x_RI = jnp.asarray(RNG.standard_normal((matrix.MOST_VECTORS + 1, 128)), jnp.bfloat16)
    many_RO = product(x_RI, FORMS[form], jnp.float32)
    one_1O = product(x_RI[:1], FORMS[form], jnp.float32)
    np.testing.assert_allclose(many_RO[:1], one_1O, atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_token_has_its_row(form: str) -> None:
    tokens_BT = np.array([[3, 47], [0, 3]])
    expected = np.asarray(FORMS[form].widened())[tokens_BT]
    np.testing.assert_array_equal(rows_of(FORMS[form], tokens_BT), expected)


CONFIG = tiny(model_dim=64, head_dim=32)
PARAMS = random_params(CONFIG)
TOKENS_BT = RNG.integers(0, CONFIG.vocab_size, (2, 12)).astype(np.int32)


def of_widened(model: LanguageModel) -> LanguageModel:
    """Return the model of float32 weights that a quantised one stands for."""
    meant = jax.tree.map(
        lambda leaf: Dense(leaf.widened()) if isinstance(leaf, (Int8, Int4)) else leaf,
        model.params,
        is_leaf=lambda leaf: isinstance(leaf, matrix.FORMS),
    )
    return LanguageModel(model.config, meant, None, "float32")


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_model_has_the_logits_of_what_its_levels_mean(bits: matrix.Bits) -> None:
    model = language_model(CONFIG, PARAMS, None, "float32", bits)
    forms = {type(leaf) for leaf in jax.tree.leaves(model.params, is_leaf=is_form)}
    assert (Int8 if bits == 8 else Int4) in forms
    found_BTV, meant_BTV = model.logits(TOKENS_BT), of_widened(model).logits(TOKENS_BT)
    np.testing.assert_allclose(found_BTV, meant_BTV, atol=1e-5)
    whole_BTV = language_model(CONFIG, PARAMS, None, "float32").logits(TOKENS_BT)
    assert np.abs(found_BTV - whole_BTV).max() > 1e-4  # the levels are not the weights


def is_form(leaf: object) -> bool:
    return isinstance(leaf, matrix.FORMS)


@pytest.mark.parametrize(("bits", "share"), [(8, 1 / 4), (4, 1 / 8)])
def test_fewer_bits_are_as_much_less_memory(bits: matrix.Bits, share: float) -> None:
    large_OI = {"embedding": np.ones((512, 1024), np.float32)}
    whole, fewer = (
        sum(leaf.nbytes for leaf in jax.tree.leaves(decoding_params(large_OI, "float32", each)))
        for each in (None, bits)
    )
    scales = 1 / 1024 if bits == 8 else 2 / 64
    assert fewer / whole == pytest.approx(share + scales)

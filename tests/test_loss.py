"""The chunked loss is the plain one, gradients too, without ever holding all logits.

Legend: N tokens, D model, V vocab.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openelm_jax.training.loss import chunked_loss

N, D, V = 23, 5, 11
Z_LOSS = 0.3  # large, so that its part of the gradient counts


def draw(num_tokens=N):
    rng = np.random.default_rng(1)
    hidden_ND = jnp.asarray(rng.normal(size=(num_tokens, D)), jnp.float32)
    head_VD = jnp.asarray(rng.normal(size=(V, D)), jnp.float32)
    targets_N = jnp.asarray(rng.integers(0, V, num_tokens), jnp.int32)
    weights_N = jnp.asarray(rng.uniform(size=num_tokens) * (rng.uniform(size=num_tokens) < 0.7))
    return hidden_ND, head_VD, targets_N, weights_N.astype(jnp.float32)


def plain(hidden_ND, head_VD, targets_N, weights_N):
    """Return cross-entropy and squared log-partition, summed with weights."""
    logits_NV = hidden_ND @ head_VD.T
    probability_NV = jnp.exp(logits_NV) / jnp.exp(logits_NV).sum(axis=1, keepdims=True)
    nats_N = -jnp.log(probability_NV[jnp.arange(len(targets_N)), targets_N])
    log_partition_N = jnp.log(jnp.exp(logits_NV).sum(axis=1))
    return (weights_N * nats_N).sum(), (weights_N * log_partition_N**2).sum()


def plain_total(hidden_ND, head_VD, targets_N, weights_N):
    cross_entropy, squares = plain(hidden_ND, head_VD, targets_N, weights_N)
    return cross_entropy + Z_LOSS * squares


def chunked_total(chunk):
    return lambda *arrays: chunked_loss(*arrays, Z_LOSS, chunk)


@pytest.mark.parametrize("chunk", [1, 7, 23, 1000])
def test_values_are_the_plain_formula_s_whatever_the_chunk(chunk):
    arrays = draw()

    total, sums = chunked_loss(*arrays, Z_LOSS, chunk)

    cross_entropy, squares = plain(*arrays)
    assert sums.cross_entropy == pytest.approx(float(cross_entropy), rel=1e-5)
    assert sums.squared_log_partition == pytest.approx(float(squares), rel=1e-5)
    assert total == pytest.approx(float(plain_total(*arrays)), rel=1e-5)


@pytest.mark.parametrize("chunk", [7, 1000])
def test_gradients_by_hidden_and_head_are_the_plain_formula_s(chunk):
    arrays = draw()

    def scaled(*arrays):  # the gradient must follow what comes after the loss
        total, sums = chunked_total(chunk)(*arrays)
        return 2.5 * total, sums

    (_, sums), gradients = jax.value_and_grad(scaled, argnums=(0, 1), has_aux=True)(*arrays)

    expected = jax.grad(plain_total, argnums=(0, 1))(*arrays)
    for actual, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(actual, 2.5 * wanted, rtol=1e-5, atol=1e-5)
    assert sums.cross_entropy == pytest.approx(float(plain(*arrays)[0]), rel=1e-5)


def test_a_token_of_weight_zero_counts_in_no_part():
    hidden_ND, head_VD, targets_N, weights_N = draw()
    left_out_N = weights_N == 0
    assert 3 < left_out_N.sum() < N - 3
    gradient = jax.value_and_grad(chunked_total(7), argnums=(0, 1), has_aux=True)

    (total, sums), (d_hidden_ND, d_head_VD) = gradient(hidden_ND, head_VD, targets_N, weights_N)

    other_ND = jnp.where(left_out_N[:, None], 9.0, hidden_ND)
    other_N = jnp.where(left_out_N, (targets_N + 1) % V, targets_N)
    (other_total, other_sums), (_, other_d_head_VD) = gradient(
        other_ND, head_VD, other_N, weights_N
    )
    assert total == other_total
    assert sums.squared_log_partition == other_sums.squared_log_partition
    np.testing.assert_array_equal(d_head_VD, other_d_head_VD)
    assert (d_hidden_ND[left_out_N] == 0).all()


def test_equal_logits_cost_ln_v_and_its_square():
    hidden_ND, head_VD, targets_N, _ = draw()
    mean_N = jnp.full(N, 1 / N)

    _, sums = chunked_loss(hidden_ND, jnp.zeros_like(head_VD), targets_N, mean_N, 1e-4, 7)

    assert sums.cross_entropy == pytest.approx(np.log(V), rel=1e-6)
    assert sums.squared_log_partition == pytest.approx(np.log(V) ** 2, rel=1e-6)


def test_logits_too_large_for_exp_are_finite():
    hidden_ND, head_VD, targets_N, weights_N = draw()

    (total, _), gradients = jax.value_and_grad(chunked_total(7), argnums=(0, 1), has_aux=True)(
        1e3 * hidden_ND, head_VD, targets_N, weights_N
    )

    assert np.isfinite(total)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_bfloat16_hidden_states_give_float32_sums_and_a_float32_gradient_of_the_head():
    hidden_ND, head_VD, targets_N, weights_N = draw()
    arrays = (hidden_ND.astype(jnp.bfloat16), head_VD, targets_N, weights_N)

    (_, sums), (d_hidden_ND, d_head_VD) = jax.value_and_grad(
        chunked_total(7), argnums=(0, 1), has_aux=True
    )(*arrays)

    assert {sums.cross_entropy.dtype, d_head_VD.dtype} == {jnp.dtype(jnp.float32)}
    assert d_hidden_ND.dtype == jnp.bfloat16
    assert sums.cross_entropy == pytest.approx(float(plain(hidden_ND, *arrays[1:])[0]), rel=0.02)
    expected = jax.grad(plain_total, argnums=1)(hidden_ND, *arrays[1:])
    np.testing.assert_allclose(d_head_VD, expected, rtol=0, atol=0.03 * np.abs(expected).max())


@pytest.mark.parametrize("stage", ["traced", "compiled"])
def test_the_logits_of_all_tokens_never_exist(stage):
    """The largest array of the program, forward and backward, holds one chunk's logits."""
    num_tokens, vocab_size, chunk = 1040, 1009, 130
    floats = [(num_tokens, D), (vocab_size, D), (num_tokens,)]
    hidden_ND, head_VD, weights_N = (jax.ShapeDtypeStruct(s, jnp.float32) for s in floats)
    targets_N = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)

    def largest(loss):
        function = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        traced = function.trace(hidden_ND, head_VD, targets_N, weights_N)
        text = str(traced.jaxpr) if stage == "traced" else traced.lower().compile().as_text()
        shapes = re.findall(r"[fiub]+(?:\d+|ool|red)\[([\d,]+)\]", text)
        return max(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes)

    assert largest(plain_total) == num_tokens * vocab_size  # the test can see them
    assert largest(lambda *arrays: chunked_total(chunk)(*arrays)[0]) == chunk * vocab_size

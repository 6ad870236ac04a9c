"""Causal attention is the textbook formula, and its own gradient is the formula's.

Where segments keep tokens apart the expected values are `jax.nn.dot_product_attention`'s, given
the mask in so many words.

Legend: B batch, T time, N query heads, K kv heads, H head dim.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openelm_jax.model.attention import (
    attend,
    attend_slots,
    causal_attend,
    positions_in,
    segments_of,
)

CASES = [((4, 4), 7), ((4, 2), 7), ((4, 1), 7), ((4, 2), 1)]
"""((query heads, kv heads), tokens): groups of 1, 2 and 4; a single token."""


def textbook(query_BTNH, key_BTKH, value_BTKH):
    """softmax(q k^T / sqrt(H)) v over the tokens up to each query's own, a head at a time."""
    group = query_BTNH.shape[2] // key_BTKH.shape[2]
    key_BTNH, value_BTNH = (jnp.repeat(x, group, axis=2) for x in (key_BTKH, value_BTKH))
    scores = jnp.einsum("BTNH,BSNH->BNTS", query_BTNH, key_BTNH) / query_BTNH.shape[3] ** 0.5
    past = jnp.tril(jnp.ones(scores.shape[2:], bool))
    weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf), axis=-1)
    return jnp.einsum("BNTS,BSNH->BTNH", weights, value_BTNH)


def draw(num_tokens, heads, dtype=jnp.float32, head_dim=6, scale=1.5):
    """Return query, key, value and a cotangent."""
    rng = np.random.default_rng(0)
    query_heads, kv_heads = heads
    counts = (query_heads, kv_heads, kv_heads, query_heads)
    return [
        jnp.asarray(scale * rng.normal(size=(2, num_tokens, count, head_dim)), dtype)
        for count in counts
    ]


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(function, query, key, value, cotangent):
    result, pull_back = jax.vjp(function, query, key, value)
    return result, *pull_back(cotangent)


SEGMENTS_BT = jnp.array([[0, 0, 1, 1, 1, 2, 3], [1, 2, 2, 2, 2, 2, 2]])


def attend_in_segments(query, key, value):
    return attend(query, key, value, segments_BT=SEGMENTS_BT)


@pytest.mark.parametrize(("heads", "num_tokens"), CASES)
def test_values_and_gradients_are_the_textbook_s(heads, num_tokens):
    arrays = draw(num_tokens, heads)

    ours = value_and_gradients(attend, *arrays)

    expected = value_and_gradients(textbook, *arrays)
    for actual, wanted in zip(ours, expected, strict=True):
        assert actual.shape == wanted.shape
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=2e-6)


def test_a_later_token_changes_neither_values_nor_gradients_before_it():
    query, key, value, cotangent = draw(7, (4, 2))
    later = [x.at[:, 5:].add(3.0) for x in (query, key, value)]
    cotangent = cotangent.at[:, 5:].set(0.0)

    before = value_and_gradients(attend, query, key, value, cotangent)
    after = value_and_gradients(attend, *later, cotangent)

    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a[:, :5], b[:, :5])


def test_scores_far_beyond_the_range_of_exp_are_finite():
    arrays = draw(7, (4, 4), scale=15.0)
    scores = jnp.einsum("BTNH,BSNH->BNTS", arrays[0], arrays[1]) / 6**0.5
    assert scores.max() > 300  # float32 overflows at exp(89)

    ours = value_and_gradients(attend, *arrays)

    expected = value_and_gradients(textbook, *arrays)
    for actual, wanted in zip(ours, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())


def test_bfloat16_stays_near_float32():
    arrays = draw(23, (4, 2), jnp.bfloat16, head_dim=16, scale=1.0)

    ours = value_and_gradients(attend, *arrays)

    expected = value_and_gradients(textbook, *(x.astype(jnp.float32) for x in arrays))
    for actual, wanted in zip(ours, expected, strict=True):
        assert actual.dtype == jnp.bfloat16
        error = np.abs(np.asarray(actual, np.float32) - wanted)
        assert np.isfinite(error).all()
        assert error.max() < 0.03 * np.abs(wanted).max()  # bfloat16 keeps eight bits


def test_nothing_as_large_as_time_squared_waits_for_the_backward_pass():
    num_tokens = 64
    arrays = draw(num_tokens, (4, 2))[:3]

    def kept(function):
        _, pull_back = jax.vjp(function, *arrays)
        return [leaf.shape for leaf in jax.tree.leaves(pull_back)]

    assert any(shape.count(num_tokens) > 1 for shape in kept(textbook))  # the test can see them
    apart = functools.partial(attend, segments_BT=jnp.zeros((2, num_tokens), jnp.int32))
    for shapes in (kept(attend), kept(apart)):
        assert max(np.prod(shape) for shape in shapes) <= np.prod(arrays[0].shape)
        assert sum(np.prod(shape) for shape in shapes) < 2 * 4 * num_tokens * num_tokens


def test_positions_choose_what_a_query_sees():
    """At 0..T-1 slots are what tokens are; a later position sees more of them."""
    query, key, value, _ = draw(7, (4, 2))
    slots = [x.transpose(0, 2, 1, 3).reshape(4, 7, -1) for x in (key, value)]
    positions_BT = jnp.broadcast_to(jnp.arange(7), (2, 7))

    whole = attend(query, key, value)

    np.testing.assert_allclose(attend_slots(query, *slots, positions_BT), whole, atol=2e-6)
    last = attend_slots(query[:, 4:5], *slots, positions_BT[:, 4:5])
    np.testing.assert_allclose(last, whole[:, 4:5], atol=2e-6)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_a_query_sees_the_tokens_of_its_own_segment_up_to_itself(heads):
    arrays = draw(7, heads)
    mask_BTT = np.zeros((2, 7, 7), bool)
    for row, column, size in [(0, 0, 2), (0, 2, 3), (0, 5, 1), (0, 6, 1), (1, 0, 1), (1, 1, 6)]:
        mask_BTT[row, column : column + size, column : column + size] = np.tri(size)

    def masked(query, key, value):
        return jax.nn.dot_product_attention(query, key, value, mask=mask_BTT[:, None])

    ours = value_and_gradients(attend_in_segments, *arrays)

    expected = value_and_gradients(masked, *arrays)
    for actual, wanted in zip(ours, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("first", [0, 2, 4])
def test_queries_may_be_a_part_of_the_tokens(first):
    """Query t is token `first` + t: of its own segment it sees the tokens up to itself."""
    query, key, value, cotangent = draw(7, (4, 2))
    query, cotangent = query[:, first : first + 3], cotangent[:, first : first + 3]
    segments = np.asarray(SEGMENTS_BT)
    part = segments[:, first : first + 3]
    mask_BTS = (np.arange(7) <= first + np.arange(3)[:, None]) & (
        part[:, :, None] == segments[:, None]
    )

    def masked(query, key, value):
        return jax.nn.dot_product_attention(query, key, value, mask=mask_BTS[:, None])

    def ours(query, key, value):
        return causal_attend(query, key, value, (jnp.asarray(part), SEGMENTS_BT), jnp.int32(first))

    actual = value_and_gradients(ours, query, key, value, cotangent)

    expected = value_and_gradients(masked, query, key, value, cotangent)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_a_document_begins_at_its_bos_and_positions_count_from_there():
    tokens_BT = jnp.array([[5, 6, 1, 7, 1, 1, 8], [1, 2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7, 1]])

    segments_BT = segments_of(tokens_BT, bos_id=1)

    assert segments_BT.tolist() == [[0, 0, 1, 1, 2, 3, 3], [1] * 7, [0] * 6 + [1]]
    assert positions_in(segments_BT).tolist() == [
        [0, 1, 0, 1, 0, 0, 1],
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 3, 4, 5, 0],
    ]

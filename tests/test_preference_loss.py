"""Losses of pairs have their closed forms; answers are as likely as whole logits make them.

Legend: B rows, T time, N tokens, D model, V vocab.
"""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import random_params, tiny

from openelm_jax.data.preferences import Pair, PairRows, pair_rows
from openelm_jax.errors import UserError
from openelm_jax.model.adapters import AdapterShape
from openelm_jax.model.decoder import Decoder, init_adapters
from openelm_jax.training.preference_loss import (
    PreferenceObjective,
    completion_log_probs,
    is_answer,
    loss_name,
    preference_loss,
    token_log_probs,
)

ONE_B = np.ones(2)


def loss_of(objective: PreferenceObjective, policy: Any, reference: Any, length: Any = ONE_B):
    arrays = (np.asarray(array, np.float32) for array in (policy, reference, length))
    loss, metrics = preference_loss(objective, *arrays)  # type: ignore[arg-type]
    return float(loss), {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (PreferenceObjective("sigmoid"), math.log(1 + math.exp(-0.6))),
        (PreferenceObjective("sigmoid"), 0.437488),
        (PreferenceObjective("sigmoid", 0.1, 0.1), 0.9 * 0.437488 + 0.1 * 1.037488),
        (PreferenceObjective("hinge"), 0.4),
        (PreferenceObjective("ipo"), 1.0),
    ],
)
def test_a_margin_of_six_costs_what_it_should(
    objective: PreferenceObjective, expected: float
) -> None:
    """The figures of modelscope/ms-swift#10167: beta 0.1, one token each."""
    loss, _ = loss_of(objective, [-1.0, -9.0], [-2.0, -4.0])
    assert loss == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("beta", [0.01, 0.1, 0.5])
def test_a_policy_that_is_the_reference_costs_what_it_should(beta: float) -> None:
    for name, expected in (("sigmoid", math.log(2)), ("hinge", 1.0), ("ipo", 1 / (4 * beta**2))):
        objective = PreferenceObjective(name, beta)  # type: ignore[arg-type]
        loss, metrics = loss_of(objective, [-7.0, -11.0], [-7.0, -11.0], [3, 4])
        assert loss == pytest.approx(expected, rel=1e-6)
        assert metrics["rewards/accuracies"] == metrics["rewards/margins"] == 0


def test_ipo_is_of_means_over_an_answer_s_tokens() -> None:
    loss, _ = loss_of(PreferenceObjective("ipo", 0.5), [-2.0, -9.0], [-8.0, -1.0], [3, 4])
    assert loss == pytest.approx((6 / 3 + 8 / 4 - 1) ** 2, abs=1e-6)


def test_losses_and_metrics_are_means_over_pairs() -> None:
    policy_B, reference_B = [-1.0, -9.0, -5.0, -3.0], [-2.0, -4.0, -1.0, -2.0]
    loss, metrics = loss_of(PreferenceObjective("hinge"), policy_B, reference_B, np.ones(4))
    assert loss == pytest.approx((0.4 + 1.3) / 2, abs=1e-6)
    assert metrics == pytest.approx(
        {
            "rewards/chosen": 0.1 * (1 - 4) / 2,
            "rewards/rejected": 0.1 * (-5 - 1) / 2,
            "rewards/accuracies": 0.5,
            "rewards/margins": 0.1 * (6 - 3) / 2,
            "logps/chosen": -3.0,
            "logps/rejected": -6.0,
        },
        abs=1e-6,
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss": "kto_pair"}, "loss is kto_pair: it must be sigmoid, hinge, ipo"),
        ({"beta": 0.0}, "beta is 0.0: it must be above 0"),
        ({"beta": math.nan}, "beta is nan"),
        ({"loss": "hinge", "label_smoothing": 0.1}, "label_smoothing is 0.1, but hinge has none"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing is 0.1, but ipo has none"),
        ({"label_smoothing": 0.5}, "from 0 to below 0.5"),
        ({"label_smoothing": -0.1}, "from 0 to below 0.5"),
    ],
)
def test_settings_without_a_meaning_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PreferenceObjective(**fields)


def test_a_list_of_one_loss_is_that_loss() -> None:
    assert loss_name(["hinge"]) == loss_name("hinge") == "hinge"
    for refused in (["hinge", "sigmoid"], [], "nca_pair"):
        with pytest.raises(UserError, match="loss_type is"):
            loss_name(refused)


ROWS = pair_rows(
    [
        Pair(np.array([1, 5]), np.array([7, 8, 2]), np.array([9, 2])),
        Pair(np.array([1, 5, 6, 0]), np.array([2]), np.array([0, 0, 39, 2])),
    ],
    row_length=9,
)


def test_an_answer_s_targets_are_its_tokens_and_no_others() -> None:
    """Padding is id 0, which answers have as well."""
    targets_BT = ROWS.tokens_BL[:, 1:]
    counted_BT = np.asarray(is_answer(ROWS))
    answers = [targets[counted] for targets, counted in zip(targets_BT, counted_BT, strict=True)]
    assert [answer.tolist() for answer in answers] == [[7, 8, 2], [9, 2], [2], [0, 0, 39, 2]]
    assert counted_BT.argmax(axis=1).tolist() == [1, 1, 3, 3]  # from the prompt's last token


def plain(config, params, rows: PairRows) -> np.ndarray:
    """Return the sums by whole logits, each row alone."""
    sums, apply = [], jax.jit(Decoder(config).apply)
    for tokens, start, stop in zip(*rows, strict=True):
        logits_TV = apply({"params": params}, tokens[None])[0]
        log_prob_TV = np.asarray(jax.nn.log_softmax(logits_TV))
        sums.append(sum(log_prob_TV[i - 1, tokens[i]] for i in range(start, stop)))
    return np.array(sums)


@pytest.mark.parametrize("chunk", [5, 1000])
def test_rows_in_a_batch_are_as_likely_as_each_alone(chunk: int) -> None:
    config = tiny(num_layers=2)
    params = random_params(config)
    ours = jax.jit(lambda params: completion_log_probs(Decoder(config), params, ROWS, chunk))
    expected = plain(config, params, ROWS)
    assert np.abs(expected).max() > 5
    np.testing.assert_allclose(ours(params), expected, rtol=0, atol=1e-5)


def test_with_adapters_the_parameters_alone_are_the_reference() -> None:
    """They begin as nothing, so the margin is 0; what is learned goes into them alone."""
    config = tiny(num_layers=1)
    params = random_params(config)
    adapters = (("layers_0/attention/qkv", AdapterShape(rank=2, alpha=4.0)),)
    decoder = Decoder(config, adapters=adapters)
    begun = init_adapters(config, adapters, params, seed=0)
    reference_B = jax.jit(lambda: completion_log_probs(Decoder(config), params, ROWS))()

    def loss(adapters):
        policy_B = completion_log_probs(decoder, params, ROWS, adapters=adapters)
        objective = PreferenceObjective("sigmoid", 0.1)
        return preference_loss(objective, policy_B, reference_B, ROWS.length_B - ROWS.prompt_B)[0]

    value, gradient = jax.jit(jax.value_and_grad(loss))(begun)
    assert value == pytest.approx(math.log(2), abs=1e-6)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient)) > 1e-3


N, D, V = 23, 5, 11


def draw():
    rng = np.random.default_rng(1)
    hidden_ND = jnp.asarray(rng.normal(size=(N, D)), jnp.float32)
    head_VD = jnp.asarray(rng.normal(size=(V, D)), jnp.float32)
    weights_N = jnp.asarray(rng.normal(size=N), jnp.float32)
    return hidden_ND, head_VD, jnp.asarray(rng.integers(0, V, N), jnp.int32), weights_N


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_gradients_are_those_of_whole_logits(chunk: int) -> None:
    hidden_ND, head_VD, targets_N, weights_N = draw()

    def whole(hidden_ND, head_VD):
        log_prob_NV = jax.nn.log_softmax(hidden_ND @ head_VD.T)
        return (weights_N * log_prob_NV[jnp.arange(N), targets_N]).sum()

    def chunked(hidden_ND, head_VD):
        return (weights_N * token_log_probs(hidden_ND, head_VD, targets_N, chunk)).sum()

    value, gradients = jax.value_and_grad(chunked, argnums=(0, 1))(hidden_ND, head_VD)
    expected, wanted = jax.value_and_grad(whole, argnums=(0, 1))(hidden_ND, head_VD)
    assert value == pytest.approx(float(expected), rel=1e-5)
    for ours, theirs in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_of_bfloat16_the_sums_and_the_head_s_gradient_are_float32() -> None:
    hidden_ND, head_VD, targets_N, weights_N = draw()
    low_ND = hidden_ND.astype(jnp.bfloat16)

    def total(hidden_ND, head_VD):
        log_prob_N = token_log_probs(hidden_ND, head_VD, targets_N, 7)
        return (weights_N * log_prob_N).sum(), log_prob_N

    gradient = jax.grad(total, argnums=(0, 1), has_aux=True)
    (d_hidden_ND, d_head_VD), log_prob_N = gradient(low_ND, head_VD)
    assert (log_prob_N.dtype, d_head_VD.dtype) == (jnp.float32, jnp.float32)
    assert d_hidden_ND.dtype == jnp.bfloat16
    (_, expected), _ = gradient(hidden_ND, head_VD)
    np.testing.assert_allclose(d_head_VD, expected, rtol=0, atol=0.03 * np.abs(expected).max())


def test_the_logits_of_all_tokens_never_exist() -> None:
    num_tokens, vocab_size, chunk = 1040, 1009, 130
    shapes = [(num_tokens, D), (vocab_size, D)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    targets_N = jnp.zeros(num_tokens, jnp.int32)

    def total(hidden_ND, head_VD):
        return jnp.square(token_log_probs(hidden_ND, head_VD, targets_N, chunk)).sum()

    text = jax.jit(jax.value_and_grad(total, (0, 1))).trace(*arrays).lower().compile().as_text()
    found = re.findall(r"[fiub]+(?:\d+|ool|red)\[([\d,]+)\]", text)
    largest = max(int(np.prod([int(n) for n in shape.split(",")])) for shape in found)
    assert largest == chunk * vocab_size

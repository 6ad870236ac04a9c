"""The decoder against a plain NumPy forward pass in float64, and against closed forms.

Legend: B batch, T time, D model, H head dim, F ffn, V vocab.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
from small_models import random_params

from openelm_jax.model.decoder import Decoder, Norm, init_params
from openelm_jax.model.scaling import layer_shapes

TOKENS_T = np.random.default_rng(1).integers(0, 96, 20)

tiny = partial(small_models.tiny, num_layers=2, vocab_size=96)


# The same model once more, one token, one head and one key at a time.


def plain_norm(x, weights, kind):
    if kind == "layer_norm":
        x = (x - np.mean(x)) / np.sqrt(np.var(x) + 1e-5)
        return x * weights["scale"] + weights["bias"]
    return x / np.sqrt(np.mean(x * x) + 1e-6) * weights["scale"]


def plain_rotation(x_H, position, base):
    half = len(x_H) // 2
    angles = position * base ** (-2 * np.arange(half) / len(x_H))
    turned = (x_H[:half] + 1j * x_H[half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag])


def plain_attention(x_TD, weights, shape, config):
    heads = [x_D @ weights["qkv"] for x_D in x_TD]
    heads = [np.split(h, len(h) // config.head_dim) for h in heads]
    queries, keys, values = [], [], []
    for position, row in enumerate(heads):
        query, key = row[: shape.num_query_heads], row[shape.num_query_heads :]
        key, value = key[: shape.num_kv_heads], key[shape.num_kv_heads :]
        if config.normalize_qk_projections:
            query = [plain_norm(h, weights["query_norm"], config.normalization) for h in query]
            key = [plain_norm(h, weights["key_norm"], config.normalization) for h in key]
        queries.append([plain_rotation(h, position, config.rope_base) for h in query])
        keys.append([plain_rotation(h, position, config.rope_base) for h in key])
        values.append(value)
    out_TD = []
    for t in range(len(x_TD)):
        mixed = []
        for head in range(shape.num_query_heads):
            group = head // config.num_gqa_groups
            scores = [
                queries[t][head] @ keys[s][group] / math.sqrt(config.head_dim) for s in range(t + 1)
            ]
            shares = np.exp(scores - np.max(scores))
            shares /= shares.sum()
            mixed.append(sum(shares[s] * values[s][group] for s in range(t + 1)))
        out_TD.append(np.concatenate(mixed) @ weights["out"])
    return np.array(out_TD)


def plain_ffn(x_D, weights, config):
    def activate(x):
        if config.activation == "gelu":
            return np.array([v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in x])
        return x / (1 + np.exp(-x))

    wide = x_D @ weights["up"]
    if config.ffn_with_glu:
        gate, up = wide[: len(wide) // 2], wide[len(wide) // 2 :]
        return (activate(gate) * up) @ weights["down"]
    return activate(wide) @ weights["down"]


def plain_forward(config, params, tokens_T):
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    kind = config.normalization
    x_TD = params["embedding"][tokens_T]
    for i, shape in enumerate(layer_shapes(config)):
        layer = params[f"layers_{i}"]
        normal = np.array([plain_norm(x, layer["attention_norm"], kind) for x in x_TD])
        x_TD = x_TD + plain_attention(normal, layer["attention"], shape, config)
        x_TD = x_TD + [
            plain_ffn(plain_norm(x, layer["ffn_norm"], kind), layer["ffn"], config) for x in x_TD
        ]
    hidden = np.array([plain_norm(x, params["final_norm"], kind) for x in x_TD])
    return hidden @ params["embedding" if config.tie_embeddings else "head"].T


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(tiny(), id="as published"),
        pytest.param(tiny(normalization="layer_norm"), id="layer_norm"),
        pytest.param(tiny(ffn_with_glu=False), id="no gate"),
        pytest.param(tiny(activation="gelu"), id="gelu"),
        pytest.param(tiny(num_gqa_groups=1), id="a kv head for each query head"),
        pytest.param(tiny(num_gqa_groups=4, qkv_multipliers=2.0), id="four queries a kv head"),
        pytest.param(tiny(tie_embeddings=False), id="untied"),
        pytest.param(tiny(normalize_qk_projections=False), id="no QK-norm"),
        pytest.param(tiny(rope_base=500.0, context_length=8), id="rope base, past the context"),
    ],
)
def test_logits_are_those_of_a_plain_forward_pass(config):
    params = random_params(config)

    logits_TV = jax.jit(Decoder(config).apply)({"params": params}, TOKENS_T[None])[0]

    expected_TV = plain_forward(config, params, TOKENS_T)
    assert np.abs(expected_TV).max() > 1
    np.testing.assert_allclose(logits_TV, expected_TV, rtol=0, atol=2e-5)


def test_no_gradient_flows_from_a_later_token():
    config = tiny()
    params = random_params(config)
    tokens_BT = jnp.arange(6)[None]  # all different: row t of the embedding is token t alone

    def hidden_sums(embedding_VD):
        variables = {"params": params | {"embedding": embedding_VD}}
        hidden_BTD, _ = Decoder(config).apply(variables, tokens_BT, method="hidden")
        return jnp.sum(hidden_BTD[0] ** 2, axis=-1)

    gradient_TVD = jax.jit(jax.jacrev(hidden_sums))(params["embedding"])

    reaches_TT = np.abs(gradient_TVD[:, :6]).max(axis=-1) > 0
    np.testing.assert_array_equal(reaches_TT, np.tri(6, dtype=bool))


def test_the_context_length_changes_no_logit():
    params = random_params(tiny(num_layers=1))
    tokens_BT = np.random.default_rng(2).integers(0, 96, (1, 40))

    short, long = (
        jax.jit(Decoder(tiny(num_layers=1, context_length=length)).apply)(
            {"params": params}, tokens_BT
        )
        for length in (32, 64)
    )

    np.testing.assert_array_equal(short, long)


def test_initial_weights_have_the_references_two_standard_deviations():
    config = tiny(num_layers=4, model_dim=128, vocab_size=1024, tie_embeddings=False)
    params = jax.tree.map(np.asarray, init_params(config, seed=0))

    into = {"embedding": params["embedding"], "head": params["head"]}
    back = {}
    for i in range(4):
        layer = params[f"layers_{i}"]
        into |= {f"qkv {i}": layer["attention"]["qkv"], f"up {i}": layer["ffn"]["up"]}
        back |= {f"out {i}": layer["attention"]["out"], f"down {i}": layer["ffn"]["down"]}
    for names, std in ((into, 128**-0.5), (back, 128**-0.5 * 8**-0.5)):
        for name, weight in names.items():
            assert weight.std() == pytest.approx(std, rel=0.04), name
            assert abs(weight.mean()) < 0.05 * std, name
    # A normal distribution that is not truncated: 131072 draws reach 4 standard deviations.
    assert np.abs(params["embedding"]).max() > 4 * 128**-0.5
    np.testing.assert_array_equal(params["final_norm"]["scale"], 1)
    np.testing.assert_array_equal(params["layers_0"]["attention"]["query_norm"]["scale"], 1)


def test_another_seed_draws_other_weights():
    first, other = (init_params(tiny(num_layers=1), seed)["embedding"] for seed in (0, 1))

    assert np.abs(first - other).max() > 0.1


def test_remat_changes_neither_logits_nor_gradients():
    config = tiny(num_layers=1)
    params = random_params(config)

    def results(remat):
        decoder = Decoder(config, remat=remat)

        def loss(params):
            logits_BTV = decoder.apply({"params": params}, TOKENS_T[None])
            return jnp.mean(jax.nn.logsumexp(logits_BTV, axis=-1)), logits_BTV

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        results(remat="none"),
        results(remat="block"),
    )


def test_norms_take_their_statistics_in_float32():
    x = np.random.default_rng(0).normal(200, 20, 3072).astype(jnp.bfloat16)

    normal = Norm("rms_norm").apply({"params": {"scale": jnp.ones(3072)}}, jnp.asarray(x))

    exact = np.asarray(x, np.float64)
    exact /= np.sqrt(np.mean(exact**2) + 1e-6)
    assert normal.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(normal, np.float64), exact, rtol=2**-8)

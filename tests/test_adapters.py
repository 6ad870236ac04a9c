"""Low-rank adapters in the decoder: closed forms, what is trained, what is dropped, what is kept.

Legend: I inputs, O outputs, R rank.
"""

import math
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import random_params, tiny

from openelm_jax.errors import UserError
from openelm_jax.experiment_file import load_experiment
from openelm_jax.model.adapters import Adapter, AdapterShape, LookupAdapter, frozen, merged
from openelm_jax.model.decoder import Decoder, Params, init_adapters, init_params
from openelm_jax.model.matrix import in_bits

CONFIG = tiny(num_layers=1)
TOKENS_BT = np.random.default_rng(1).integers(0, 40, (2, 12))
RNG = np.random.default_rng(0)
LINEARS = ("attention/qkv", "attention/out", "ffn/up", "ffn/down")


def everywhere(shape: AdapterShape, config=CONFIG, embedding: AdapterShape | None = None):
    """Return an adapter for each matrix of the layers, and maybe one for the embedding."""
    layers = [(f"layers_{i}/{name}", shape) for i in range(config.num_layers) for name in LINEARS]
    return tuple(layers + ([("embedding", embedding)] if embedding else []))


def random_adapters(adapters, params: Params, config=CONFIG) -> Params:
    """Return adapters that change the model: B drawn, lengths moved."""
    rng = np.random.default_rng(7)
    begun = init_adapters(config, adapters, params, seed=0)
    return jax.tree.map(lambda x: x + rng.normal(0, 0.1, x.shape).astype(np.float32), begun)


@pytest.fixture(scope="module")
def params() -> Params:
    return random_params(CONFIG, std=0.125)


def logits(config, variables, adapters=(), remat="none"):
    return jax.jit(Decoder(config, adapters=adapters, remat=remat).apply)(variables, TOKENS_BT)


def one_matrix(shape: AdapterShape, x, weight_IO, adapter, **rngs):
    variables = {"adapters": adapter}
    return Adapter(shape).apply(variables, x, weight_IO, rngs=rngs)


def drawn(shape: AdapterShape, dim_in: int, dim_out: int) -> dict[str, np.ndarray]:
    parts = {"down_IR": (dim_in, shape.rank), "up_RO": (shape.rank, dim_out)}
    if shape.dora:
        parts["magnitude_O"] = (dim_out,)
    return {
        name: RNG.normal(len(of) == 1, 0.3, of).astype(np.float32) for name, of in parts.items()
    }


@pytest.mark.parametrize(
    ("rslora", "scale"), [(False, 2.0), (True, 4.0)], ids=["over the rank", "over its root"]
)
def test_alpha_8_with_rank_4_is_a_scale_of(rslora: bool, scale: float) -> None:
    shape = AdapterShape(rank=4, alpha=8, rslora=rslora)
    adapter = drawn(shape, 6, 5)
    x_BI, weight_IO = RNG.normal(size=(3, 6)), RNG.normal(size=(6, 5))
    expected_BO = x_BI @ weight_IO + scale * (
        x_BI @ adapter["down_IR"].astype(float) @ adapter["up_RO"].astype(float)
    )
    y_BO = one_matrix(shape, jnp.float32(x_BI), jnp.float32(weight_IO), adapter)
    assert shape.scale == scale
    np.testing.assert_allclose(y_BO, expected_BO, rtol=0, atol=1e-5)


def test_doras_lengths_are_those_of_an_outputs_weights_not_of_an_inputs() -> None:
    """[[3, 0, 0], [0, 0, 4]] as [out, in] has the lengths 3 and 4."""
    weight_IO = jnp.float32([[3, 0], [0, 0], [0, 4]])
    x_1I = jnp.float32([[1, 2, 3]])
    adapter = Adapter(AdapterShape(rank=2, alpha=2, dora=True))
    variables = adapter.init({"adapters": jax.random.key(0)}, x_1I, weight_IO)
    np.testing.assert_array_equal(variables["adapters"]["magnitude_O"], [3, 4])
    np.testing.assert_allclose(adapter.apply(variables, x_1I, weight_IO), x_1I @ weight_IO)


def test_dora_gives_each_output_its_length_and_its_own_direction() -> None:
    shape = AdapterShape(rank=2, alpha=3, dora=True)
    adapter = drawn(shape, 6, 5)
    x_BI, weight_IO = RNG.normal(size=(3, 6)), RNG.normal(size=(6, 5))
    expected_IO = np.empty((6, 5))
    for o in range(5):
        column_I = weight_IO[:, o] + 1.5 * adapter["down_IR"].astype(float) @ adapter["up_RO"][:, o]
        expected_IO[:, o] = adapter["magnitude_O"][o] * column_I / math.hypot(*column_I)
    y_BO = one_matrix(shape, jnp.float32(x_BI), jnp.float32(weight_IO), adapter)
    np.testing.assert_allclose(y_BO, x_BI @ expected_IO, rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        merged(weight_IO.astype(np.float32), shape, adapter), expected_IO, rtol=0, atol=1e-6
    )


def test_the_length_of_doras_weights_is_a_constant_in_the_gradient() -> None:
    """Differences of the forward pass with the length held are the gradient, others are not."""
    shape = AdapterShape(rank=2, alpha=3, dora=True)
    adapter = drawn(shape, 4, 3)
    x_BI, weight_IO = RNG.normal(size=(5, 4)), RNG.normal(size=(4, 3))

    def delta(up_RO):
        return weight_IO + 1.5 * adapter["down_IR"].astype(float) @ up_RO

    def loss(up_RO, held: bool) -> float:
        of = delta(adapter["up_RO"]) if held else delta(up_RO)
        gain_O = adapter["magnitude_O"] / np.sqrt((of * of).sum(0))
        return float(np.sum(np.cos(gain_O * (x_BI @ delta(up_RO)))))

    def slope(held: bool) -> float:
        step = np.zeros((2, 3))
        step[1, 2] = 1e-5
        up_RO = adapter["up_RO"].astype(float)
        return (loss(up_RO + step, held) - loss(up_RO - step, held)) / 2e-5

    gradient = jax.grad(
        lambda a: jnp.cos(one_matrix(shape, jnp.float32(x_BI), jnp.float32(weight_IO), a)).sum()
    )(adapter)["up_RO"][1, 2]
    assert abs(slope(True) - slope(False)) > 0.01
    np.testing.assert_allclose(gradient, slope(True), rtol=1e-4)


def test_an_embeddings_adapter_adds_a_low_rank_row_for_each_token() -> None:
    shape = AdapterShape(rank=2, alpha=3)
    adapter = drawn(shape, 10, 4)
    rows = LookupAdapter(shape, 10).apply(
        {"adapters": adapter}, jnp.ones((1, 3, 4)), np.array([[7, 0, 7]])
    )
    expected = 1 + 1.5 * adapter["down_IR"][[7, 0, 7]] @ adapter["up_RO"]
    np.testing.assert_allclose(rows[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_new_adapters_change_nothing(params: Params, dora: bool) -> None:
    embedding = None if dora else AdapterShape(rank=3, alpha=3)
    adapters = everywhere(AdapterShape(rank=2, alpha=4, dora=dora), embedding=embedding)
    begun = init_adapters(CONFIG, adapters, params, seed=0)

    plain = logits(CONFIG, {"params": params})
    adapted = logits(CONFIG, {"params": params, "adapters": begun}, adapters)

    np.testing.assert_allclose(adapted, plain, rtol=0, atol=1e-5)
    qkv, up = begun["layers_0"]["attention"]["qkv"], begun["layers_0"]["ffn"]["up"]
    most = CONFIG.model_dim**-0.5  # kaiming_uniform(a=sqrt(5)) of PyTorch
    assert 0.9 * most < np.abs(qkv["down_IR"]).max() <= most
    assert not np.array_equal(qkv["down_IR"], up["down_IR"])
    assert not qkv["up_RO"].any()


@pytest.mark.parametrize(
    ("dora", "remat"), [(False, "none"), (True, "block")], ids=["LoRA", "DoRA, computed again"]
)
def test_a_model_with_adapters_is_the_model_of_the_merged_weights(params, dora, remat) -> None:
    shape = AdapterShape(rank=2, alpha=4, dora=dora)
    adapters = everywhere(shape)
    tree = random_adapters(adapters, params)
    whole = jax.tree.map(lambda x: x, params)
    for path, _ in adapters:
        layer, half, name = path.split("/")
        whole[layer][half][name] = merged(params[layer][half][name], shape, tree[layer][half][name])

    unmerged = logits(CONFIG, {"params": params, "adapters": tree}, adapters, remat)

    assert np.abs(unmerged - logits(CONFIG, {"params": params})).max() > 0.1
    merged_BTV = logits(CONFIG, {"params": whole})
    np.testing.assert_allclose(unmerged, merged_BTV, rtol=0, atol=1e-5)


def test_logits_of_a_tied_embedding_do_not_see_its_adapter(params: Params) -> None:
    """The model whose head is the embedding as it was, and whose lookup is the merged one."""
    shape = AdapterShape(rank=3, alpha=6)
    tree = random_adapters((("embedding", shape),), params)
    unmerged = logits(CONFIG, {"params": params, "adapters": tree}, (("embedding", shape),))

    embedding = merged(params["embedding"], shape, tree["embedding"])
    untied = params | {"embedding": embedding, "head": params["embedding"]}
    expected = logits(tiny(num_layers=1, tie_embeddings=False), {"params": untied})
    np.testing.assert_allclose(unmerged, expected, rtol=0, atol=1e-5)


def test_dropout_is_on_where_there_is_a_key_for_it_and_right_on_average() -> None:
    shape = AdapterShape(rank=2, alpha=2, dropout=0.5, dora=True)
    adapter = drawn(shape, 8, 5)
    x_BI, weight_IO = jnp.float32(RNG.normal(size=(3, 8))), jnp.float32(RNG.normal(size=(8, 5)))
    without = one_matrix(shape, x_BI, weight_IO, adapter)
    keys = jax.random.split(jax.random.key(0), 4_000)
    drop = jax.jit(jax.vmap(lambda key: one_matrix(shape, x_BI, weight_IO, adapter, dropout=key)))
    dropped = drop(keys)
    error = dropped.std(axis=0) / math.sqrt(len(keys))
    assert dropped.std(axis=0).min() > 0.1
    assert (np.abs(dropped.mean(axis=0) - without) < 5 * error).all()


def test_with_dropout_dora_rescales_what_the_matrix_makes_of_the_dropped_inputs() -> None:
    """As peft does: y = W x + (g - 1) W x' + g s B A x', x' the inputs that are left.

    With W, A and B the identity and lengths of 4, g is 2: y is 1, and 1 + 2 + 4 where x' is 2.
    """
    shape = AdapterShape(rank=64, alpha=64, dropout=0.5, dora=True)
    identity = jnp.eye(64)
    adapter = {"down_IR": identity, "up_RO": identity, "magnitude_O": jnp.full(64, 4.0)}
    y = one_matrix(shape, jnp.ones((5, 64)), identity, adapter, dropout=jax.random.key(3))
    assert set(np.unique(y)) == {1, 7}
    assert 0.3 < (y == 7).mean() < 0.7


def test_each_matrix_drops_inputs_of_its_own() -> None:
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x, weight):
            shape = AdapterShape(rank=64, alpha=64, dropout=0.5)
            return Adapter(shape, name="a")(x, weight), Adapter(shape, name="b")(x, weight)

    adapter = {"down_IR": jnp.eye(64), "up_RO": jnp.eye(64)}
    a, b = Two().apply(
        {"adapters": {"a": adapter, "b": adapter}},
        jnp.ones((5, 64)),
        jnp.zeros((64, 64)),
        rngs={"dropout": jax.random.key(0)},
    )
    assert set(np.unique(a)) == set(np.unique(b)) == {0, 2}
    assert 0.4 < (a == b).mean() < 0.6


def test_a_step_with_remat_drops_the_same_inputs_again(params: Params) -> None:
    adapters = everywhere(AdapterShape(rank=2, alpha=2, dropout=0.5, dora=True))
    tree = random_adapters(adapters, params)

    @partial(jax.jit, static_argnums=0)
    def gradient(remat):
        def loss(tree):
            decoder = Decoder(CONFIG, adapters=adapters, remat=remat)
            variables = {"params": params, "adapters": tree}
            key = {"dropout": jax.random.key(0)}
            return jnp.sin(decoder.apply(variables, TOKENS_BT, rngs=key)).sum()

        return jax.grad(loss)(tree)

    for leaf, again in zip(*map(jax.tree.leaves, map(gradient, ("none", "block"))), strict=True):
        np.testing.assert_allclose(leaf, again, rtol=0, atol=1e-4)
        assert jnp.abs(leaf).max() > 0.01


@pytest.mark.parametrize("bits", [8, 4])
def test_frozen_weights_of_few_bits_have_the_gradients_of_what_they_stand_for(bits) -> None:
    config = tiny(num_layers=1, model_dim=128, ffn_dim_divisor=64, head_dim=32)
    params = random_params(config, std=0.125)
    adapters = everywhere(AdapterShape(rank=2, alpha=4, dora=True), config)
    few = jax.tree_util.tree_map_with_path(
        lambda path, x: frozen(tuple(key.key for key in path), x, "float32", bits), params
    )
    stands_for = jax.tree.map(lambda x: x, params)
    for module in ("attention", "ffn"):
        for name, weight_IO in params["layers_0"][module].items():
            if not isinstance(weight_IO, dict):
                widened_OI = in_bits(weight_IO.T, bits, "float32").widened()
                stands_for["layers_0"][module][name] = np.asarray(widened_OI).T
    tree = random_adapters(adapters, few, config)
    decoder = Decoder(config, adapters=adapters)

    @partial(jax.jit, static_argnums=0)
    def gradient(_, base):
        def loss(tree):
            logits = decoder.apply({"params": base, "adapters": tree}, TOKENS_BT)
            return jax.nn.logsumexp(logits, axis=-1).mean()

        return jax.grad(loss)(tree)

    ours, expected = gradient("few", few), gradient("stands for", stands_for)
    for leaf, expected_leaf in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, expected_leaf, rtol=0, atol=2e-6)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected)) > 1e-3


def test_a_frozen_matrix_is_kept_in_its_bits_until_its_gradient_is_made() -> None:
    weight = in_bits(RNG.normal(size=(64, 128)), 4, "float32")

    def loss(x):
        return jnp.tanh(Adapter(AdapterShape(rank=2, alpha=2)).apply(variables, x, weight)).sum()

    x = jnp.ones((16, 128))
    variables = {"adapters": drawn(AdapterShape(rank=2, alpha=2), 128, 64)}
    _, gradient = jax.vjp(loss, x)
    kept = [leaf for leaf in jax.tree.leaves(gradient) if leaf.size >= 64 * 64]
    assert {leaf.dtype.name for leaf in kept} == {"uint8"}


def test_in_bfloat16_only_what_a_matrix_makes_is_rounded(params: Params) -> None:
    shape = AdapterShape(rank=2, alpha=2)
    adapter = drawn(shape, 64, 5)
    x_BI = jnp.asarray(RNG.normal(size=(3, 64)), jnp.bfloat16)
    weight_IO = jnp.asarray(RNG.normal(size=(64, 5)), jnp.bfloat16)
    y_BO = one_matrix(shape, x_BI, weight_IO, adapter)
    exact = np.asarray(x_BI @ weight_IO, float) + np.asarray(x_BI, float) @ (
        adapter["down_IR"].astype(float) @ adapter["up_RO"]
    )
    assert y_BO.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y_BO, jnp.asarray(exact, jnp.bfloat16))


def test_adapters_of_the_270m_model_have_as_many_parameters_as_corenets() -> None:
    """Rank 32 on all matrices of the layers, and on the embedding of 32,128 rows."""
    config = load_experiment("270m").model

    def count(adapters) -> int:
        tree = jax.eval_shape(lambda: init_adapters(config, adapters, init_params(config, 0), 0))
        return sum(leaf.size for leaf in jax.tree.leaves(tree))

    shape = AdapterShape(rank=32, alpha=32, dora=True)
    assert count(everywhere(shape, config)) == 8_384_512 + 158_336
    assert count((("embedding", AdapterShape(rank=32, alpha=32)),)) == 1_069_056


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "the rank of an adapter is 0: it must be at least 1"),
        ({"dropout": 1.0}, r"the dropout of an adapter is 1.0: it must be in \[0, 1\)"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(fields, message) -> None:
    with pytest.raises(UserError, match=message):
        AdapterShape(**{"rank": 2, "alpha": 2} | fields)

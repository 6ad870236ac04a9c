"""What a layer keeps and repeats, by its shape, is what its gradient really keeps and repeats."""

import math
import re
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from small_models import tiny

from openelm_jax.experiment_file import load_experiment
from openelm_jax.model.decoder import Decoder, init_params
from openelm_jax.model.memory import (
    KEPT,
    activations,
    kept_by_layer,
    loss_chunk_size,
    recomputed_by_layer,
    step_bytes,
)
from openelm_jax.model.scaling import flops_per_token, layer_shapes, parameter_count

BATCH, TIME = 3, 8
ITEMSIZE = {"f32": 4, "bf16": 2, "i32": 4, "bool": 1, "pred": 1}
VARIANTS = {
    "openelm": {},
    "no gate": {"ffn_with_glu": False, "activation": "gelu"},
    "no norm of queries and keys": {"normalize_qk_projections": False},
    "layer norm": {"normalization": "layer_norm"},
}


def uniform(num_layers, **changes):
    """Layers that are all alike, so that one more layer is one layer more of everything."""
    return tiny(num_layers=num_layers, qkv_multipliers=1.0, ffn_multipliers=3.0, **changes)


def loss_of(config, remat, dtype):
    decoder = Decoder(config, dtype=dtype, remat=remat)
    tokens = jnp.zeros((BATCH, TIME), jnp.int32)

    def loss(params):
        return decoder.apply({"params": params}, tokens, method="hidden")[0].sum()

    return loss


@cache
def params_of(config):
    return jax.eval_shape(lambda: init_params(config, 0))


def residual_bytes(capsys, config, remat, dtype):
    """Return the bytes of the batch's arrays that JAX says it saves, without weights and tables."""
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params_of(config))
    jax.ad_checkpoint.print_saved_residuals(loss_of(config, remat, dtype), zeros)
    total = 0
    for kind, dims in re.findall(r"^(\w+)\[([\d,]*)\]", capsys.readouterr().out, re.MULTILINE):
        shape = [int(dim) for dim in dims.split(",") if dim]
        if shape[:1] == [BATCH]:
            total += math.prod(shape) * ITEMSIZE[kind]
    return total


def saved_by_a_layer(capsys, remat, dtype, **changes):
    """Return what three layers save less what two save, a token: the ends of the model fall out."""
    saved = [residual_bytes(capsys, uniform(layers, **changes), remat, dtype) for layers in (2, 3)]
    return (saved[1] - saved[0]) / (BATCH * TIME)


@pytest.mark.parametrize("remat", ["dots", "save_attention", "block"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_layer_keeps_what_autodiff_saves_for_it(capsys, remat, variant, dtype):
    config = uniform(2, **VARIANTS[variant])
    itemsize = jnp.dtype(dtype).itemsize

    saved = saved_by_a_layer(capsys, remat, dtype, **VARIANTS[variant])

    assert saved == kept_by_layer(config, layer_shapes(config)[0], remat, dtype_bytes=itemsize)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_without_remat_a_layer_keeps_what_autodiff_saves_but_inside_pointwise_functions(
    capsys, dtype
):
    """Of a norm autodiff saves its input in float32, twice that, the result before the scale, and
    two numbers a row; of the gate three arrays besides its input. A compiler makes these again
    where it reads them, from an input in the compute dtype: the table counts only that.
    """
    config = uniform(2)
    shape = layer_shapes(config)[0]
    itemsize = jnp.dtype(dtype).itemsize
    normed = 2 * config.model_dim + shape.query_dim + shape.kv_dim
    rows = 2 + shape.num_query_heads + shape.num_kv_heads
    # in float32 the first of a norm's three is the input itself, and the last is its result
    arrays = {"bfloat16": 3 * 4 * normed, "float32": 2 * 4 * normed}[dtype]
    counted_inputs = {"bfloat16": 2 * normed, "float32": 0}[dtype]
    inside = arrays + 2 * 4 * rows + 3 * shape.ffn_dim * itemsize - counted_inputs

    saved = saved_by_a_layer(capsys, "none", dtype)

    assert saved - inside == kept_by_layer(config, shape, "none", dtype_bytes=itemsize)


def product_flops(jaxpr):
    """Return the FLOPs of all products in a jaxpr and those inside it; nothing is looped here."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[dim] for dim in contracted)
            total += 2 * depth * math.prod(equation.outvars[0].aval.shape)
        for inner in jax.core.jaxprs_in_params(equation.params):
            total += product_flops(inner)
    return total


@pytest.mark.parametrize("remat", KEPT)
def test_a_gradient_repeats_the_products_that_are_counted(remat):
    """Products in the gradient of a layer, less those without remat. The portable attention
    computes all T keys of a token where the causal count is (T + 1) / 2."""
    config = uniform(2)
    shape = layer_shapes(config)[0]

    flops = {
        policy: product_flops(
            jax.make_jaxpr(jax.grad(loss_of(config, policy, "float32")))(params_of(config)).jaxpr
        )
        for policy in ("none", remat)
    }

    counted = recomputed_by_layer(config, shape, remat, TIME)
    above_the_diagonal = 2 * shape.query_dim * (TIME - 1) if remat == "block" else 0
    repeated = config.num_layers * BATCH * TIME * (counted + above_the_diagonal)
    assert flops[remat] - flops["none"] == repeated


def test_all_that_a_forward_pass_computes_but_the_last_product_is_what_block_repeats():
    config = load_experiment("1_1b").model
    shapes = layer_shapes(config)

    repeated = sum(recomputed_by_layer(config, shape, "block") for shape in shapes)

    down = sum(2 * shape.ffn_dim * config.model_dim for shape in shapes)
    head = 2 * config.vocab_size * config.model_dim
    assert repeated == flops_per_token(config) - down - head


def test_the_last_layer_of_the_3b_model_by_hand():
    """24 query and 6 kv heads of 128, FFN 12,288, D 3,072, two bytes an element."""
    config = load_experiment("3b").model
    shape = layer_shapes(config)[-1]

    assert kept_by_layer(config, shape, "block", dtype_bytes=2) == 2 * 3072
    assert kept_by_layer(config, shape, "save_attention", dtype_bytes=2) == (
        2 * 3072 + 2 * 3072 + 4 * 24
    )
    assert kept_by_layer(config, shape, "dots", dtype_bytes=2) == (
        2 * (3072 + 3072 + 2 * 768 + 3072 + 3072 + 2 * 12288) + 4 * 24
    )


def test_a_context_axis_multiplies_the_keys_and_values_that_attention_keeps():
    config = load_experiment("3b").model
    shape = layer_shapes(config)[0]

    one, four = (
        kept_by_layer(config, shape, "none", dtype_bytes=2, context=size) for size in (1, 4)
    )

    assert four - one == 2 * (2 * shape.kv_dim) * 3
    for remat in ("dots", "save_attention", "block"):  # gathered again
        assert kept_by_layer(config, shape, remat, dtype_bytes=2, context=4) == kept_by_layer(
            config, shape, remat, dtype_bytes=2
        )


def test_every_activation_has_a_name_that_none_keeps():
    config = tiny()

    assert set(activations(config, layer_shapes(config)[0], dtype_bytes=2)) == set(KEPT["none"])


# --- Chunks of the loss.


@pytest.mark.parametrize("name", ["tiny", "270m", "3b"])
@pytest.mark.parametrize("tokens", [1, 100, 128, 1024, 2048, 5000, 16_384, 131_072])
def test_chunks_of_the_loss_are_bounded_even_and_whole_lanes(name, tokens):
    config = load_experiment(name).model

    chunk = loss_chunk_size(config, tokens)

    chunks = math.ceil(tokens / chunk)
    assert chunk * config.vocab_size * 4 <= 256 * 2**20 or chunk == 128
    assert chunk == tokens or chunk % 128 == 0
    assert chunks * chunk - tokens < 128 * chunks  # what fills up the last one


# --- A step.


def test_the_state_of_a_step_is_sixteen_bytes_a_parameter_less_the_gradients_four():
    config = load_experiment("270m").model
    remats = ("none",) * config.num_layers

    whole = step_bytes(config, remats, tokens=2048, dtype_bytes=2, loss_chunk=1024)
    halved = step_bytes(
        config, remats, tokens=2048, dtype_bytes=2, loss_chunk=1024, first_moment_bytes=2
    )
    divided = step_bytes(config, remats, tokens=2048, dtype_bytes=2, loss_chunk=1024, shards=4)

    assert whole.state == 12 * parameter_count(config)
    assert halved.state == 10 * parameter_count(config)
    assert divided.state == pytest.approx(3 * parameter_count(config), rel=1e-6)
    assert whole.accumulated == 0


def test_accumulation_holds_the_gradients_of_earlier_parts():
    config = load_experiment("270m").model
    remats = ("block",) * config.num_layers

    held = step_bytes(config, remats, tokens=2048, dtype_bytes=2, loss_chunk=1024, accumulation=8)

    assert held.accumulated == 4 * parameter_count(config)

"""The 3B training step exists, in the paper's shapes, without a weight being made."""

import jax
import jax.numpy as jnp
import pytest

from openelm_jax.experiment_file import load_experiment
from openelm_jax.model.decoder import Decoder, init_params
from openelm_jax.training.optimizer import make_optimizer
from openelm_jax.training.state import new_state
from openelm_jax.training.step import Batch, make_train_step


@pytest.mark.heavy
def test_the_3b_step_lowers_to_a_program_over_all_its_parameters():
    experiment = load_experiment("3b")
    optimizer = make_optimizer(experiment.optimizer)
    state = jax.eval_shape(lambda: new_state(init_params(experiment.model, 0), optimizer))
    assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) == 3_037_040_640
    decoder = Decoder(experiment.model, dtype=jnp.bfloat16, remat="block")
    step = jax.jit(make_train_step(decoder, optimizer, experiment.training), donate_argnums=0)
    batch = Batch(
        jax.ShapeDtypeStruct((2, 2049), jnp.int32), jax.ShapeDtypeStruct((2, 2048), jnp.bool_)
    )
    lowered = step.lower(state, batch, jax.ShapeDtypeStruct((), jnp.float32))
    after, metrics = lowered.out_info
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )
    assert metrics.loss.dtype == jnp.float32
    assert "tensor<2x2048x32128" not in lowered.as_text()  # never the full logits

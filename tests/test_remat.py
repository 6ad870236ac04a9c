"""Layers recompute no more than a budget asks for: the choice is the cheapest that fits."""

import itertools
import time

import numpy as np
import pytest
from small_models import tiny

from openelm_jax.errors import UserError
from openelm_jax.experiment_file import load_experiment
from openelm_jax.model.memory import (
    KEPT,
    backward_bytes,
    choose_remat,
    kept_by_layer,
    recomputed_by_layer,
    recomputed_flops,
    uniform_block,
    working_by_layer,
)
from openelm_jax.model.scaling import layer_shapes

TOKENS = 8 * 2048
PART = {"tokens": TOKENS, "dtype_bytes": 2}
"""Eight rows of a device at a time."""


def peak(config, remats):
    return max(backward_bytes(config, remats, **PART))


def between(config, share):
    """Return the budget so far from `block` everywhere to `none` everywhere."""
    block, none = (peak(config, (remat,) * config.num_layers) for remat in ("block", "none"))
    return int(block + share * (none - block))


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 0.35, 0.5, 0.7, 0.95])
def test_no_choice_that_fits_repeats_fewer_flops(share):
    """Against all 4^5 choices; layers of 2 and 3 heads are far from alike."""
    config = tiny(num_layers=5, model_dim=256, head_dim=32, context_length=512)
    budget = between(config, share)

    chosen = choose_remat(config, budget_bytes=budget, **PART)

    everything = itertools.product(KEPT, repeat=5)
    best = min(
        recomputed_flops(config, each) for each in everything if peak(config, each) <= budget
    )
    assert peak(config, chosen) <= budget
    assert recomputed_flops(config, chosen) <= 1.005 * best


def least_flops(config, budget):
    """Return a bound below the FLOPs a token of every choice that fits, by integer programming."""
    optimize = pytest.importorskip("scipy.optimize")
    shapes, num_layers, num_options = layer_shapes(config), config.num_layers, len(KEPT)

    def table(function, **sizes):
        rows = [[function(config, shape, remat, **sizes) for remat in KEPT] for shape in shapes]
        return np.array(rows, float)

    flops = table(recomputed_by_layer)
    kept, working = (
        TOKENS * table(function, dtype_bytes=2) / budget
        for function in (kept_by_layer, working_by_layer)
    )
    one_each = np.kron(np.eye(num_layers), np.ones(num_options))
    held = np.zeros((num_layers, num_layers, num_options))  # by layer at work, layer, remat
    for layer in range(num_layers):
        held[layer, : layer + 1] = kept[: layer + 1]
        held[layer, layer] += working[layer]
    solved = optimize.milp(
        flops.ravel() / flops.max(),
        integrality=np.ones(flops.size),
        bounds=optimize.Bounds(0, 1),
        constraints=[
            optimize.LinearConstraint(one_each, 1, 1),
            optimize.LinearConstraint(held.reshape(num_layers, -1), -np.inf, 1),
        ],
        options={"mip_rel_gap": 1e-3, "time_limit": 10},
    )
    return solved.mip_dual_bound * flops.max()


@pytest.mark.parametrize("share", [0.1, 0.25, 0.4])
@pytest.mark.parametrize("name", ["270m", "1_1b", "3b"])
def test_the_choice_is_within_half_a_per_cent_of_the_best(name, share):
    config = load_experiment(name).model
    budget = between(config, share)

    chosen = choose_remat(config, budget_bytes=budget, **PART)

    assert peak(config, chosen) <= budget
    assert recomputed_flops(config, chosen) <= 1.005 * least_flops(config, budget)


@pytest.mark.parametrize("share", [0.2, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9])
def test_a_fifth_of_the_flops_of_uniform_block_remat_is_saved_on_1_1b(share):
    """Against the best run of neighbouring layers with `block` that fits the same budget."""
    config = load_experiment("1_1b").model
    budget = between(config, share)

    chosen = choose_remat(config, budget_bytes=budget, **PART)
    uniform = uniform_block(config, budget_bytes=budget, **PART)

    assert 0 < uniform.count("block") < config.num_layers
    assert peak(config, uniform) <= budget
    assert recomputed_flops(config, chosen) <= 0.8 * recomputed_flops(config, uniform)


def test_the_choice_between_none_and_block_alone_gains_little():
    """The later a layer, the more FLOPs it repeats for a byte not kept: a run of early ones with
    `block` is nearly the best that `block` can do."""
    config = load_experiment("1_1b").model

    per_byte = [
        recomputed_by_layer(config, shape, "block")
        / kept_by_layer(config, shape, "none", dtype_bytes=2)
        for shape in layer_shapes(config)
    ]
    budget = between(config, 0.5)
    chosen = choose_remat(config, budget_bytes=budget, among=("none", "block"), **PART)
    uniform = uniform_block(config, budget_bytes=budget, **PART)

    assert np.corrcoef(per_byte, range(config.num_layers))[0, 1] > 0.9
    assert uniform == ("block",) * 17 + ("none",) * 11
    gain = 1 - recomputed_flops(config, chosen) / recomputed_flops(config, uniform)
    assert 0 <= gain < 0.05


def test_what_is_left_of_a_budget_spares_pointwise_work():
    config = load_experiment("270m").model

    everything = choose_remat(config, budget_bytes=between(config, 1.01), **PART)
    most = choose_remat(config, budget_bytes=between(config, 0.8), **PART)

    assert set(everything) == {"none"}
    assert set(most) == {"none", "dots"}


def test_the_last_layer_repeats_nothing_since_that_would_free_nothing():
    """Its backward pass comes first: what it computes again, it needs when most is kept."""
    config = load_experiment("1_1b").model

    chosen = choose_remat(config, budget_bytes=between(config, 0), **PART)

    assert chosen == ("block",) * (config.num_layers - 1) + ("none",)


def test_a_choice_is_quick_and_always_the_same():
    config = load_experiment("3b").model
    budget = between(config, 0.3)

    start = time.process_time()
    chosen = choose_remat(config, budget_bytes=budget, **PART)
    seconds = time.process_time() - start

    assert seconds < 0.2  # measured 0.02; the rest is for slow machines
    assert choose_remat(config, budget_bytes=budget, **PART) == chosen


@pytest.mark.parametrize("choose", [choose_remat, uniform_block])
def test_a_budget_that_nothing_fits_says_what_block_everywhere_needs(choose):
    config = load_experiment("1_1b").model
    budget = between(config, 0) - 1

    with pytest.raises(UserError) as raised:
        choose(config, budget_bytes=budget // 2, **PART)

    message = str(raised.value)
    assert f"{between(config, 0) / 2**30:.2f} GiB" in message
    assert f"{budget // 2 / 2**30:.2f} GiB" in message
    assert "training.accumulation" in message
    assert message.count(". ") == 0

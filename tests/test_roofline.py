"""A bound is the closed form that it stands for."""

from __future__ import annotations

from typing import Any

import pytest

from openelm_jax.config import ModelConfig
from openelm_jax.experiment_file import load_experiment
from openelm_jax.model.scaling import flops_per_token, layer_shapes, parameter_count
from openelm_jax.planning.collectives import Collective
from openelm_jax.planning.roofline import (
    matrix_elements,
    memory_bytes,
    product_flops,
    roofline,
    transfer_seconds,
)
from openelm_jax.planning.topologies import parse_topology

POD = parse_topology("v5p:4x4x4")
NOTHING: dict[str, Any] = {
    "model_flops": 0.0,
    "computed_flops": 0.0,
    "memory_bytes": 0.0,
    "collectives": (),
    "tokens": 1000,
    "steps": 10,
}


def products(seconds: float) -> dict[str, float]:
    """Return FLOPs of the model, none of them twice, that a v5p takes so long for."""
    return {"model_flops": 459e12 * seconds, "computed_flops": 459e12 * seconds}


def gather(size: int, axes: str = "fsdp", kind: str = "all-gather") -> Collective:
    return Collective(kind=kind, dtype="bfloat16", count=1, bytes=size, axes=axes)


def mesh(**sizes: int) -> dict[str, int]:
    return {"replica": 1, "fsdp": 1, "tensor": 1, "context": 1, **sizes}


def test_a_step_of_nothing_but_products_takes_their_flops_over_the_peak() -> None:
    bound = roofline(POD, mesh(fsdp=64), **{**NOTHING, **products(2)})
    assert bound.binds == "compute"
    assert bound.step_seconds == pytest.approx(2)
    assert bound.mfu == pytest.approx(1)
    assert bound.tokens_per_second == pytest.approx(500)
    assert bound.days == pytest.approx(20 / 86_400)


def test_recomputing_a_third_leaves_three_quarters_of_the_peak() -> None:
    flops = {"model_flops": 3e12, "computed_flops": 4e12}
    assert roofline(POD, mesh(fsdp=64), **{**NOTHING, **flops}).mfu == pytest.approx(0.75)


def test_the_slowest_resource_binds() -> None:
    # A second of products, and 2,765 GB, which is what a v5p's memory moves in one second, twice.
    work = {**NOTHING, **products(1), "memory_bytes": 2 * 2765e9}
    bound = roofline(POD, mesh(fsdp=64), **work)
    assert bound.binds == "HBM"
    assert bound.step_seconds == pytest.approx(2)
    assert bound.mfu == pytest.approx(0.5)


def test_gathering_over_a_torus_takes_what_is_missing_ring_by_ring() -> None:
    # Of 640 GB, 3/4 come over the last of three closed rings of 200 GB a second; of the quarter
    # that was there before, 3/4 over the one before it; and so on.
    seconds, network = transfer_seconds(POD, mesh(fsdp=64), [gather(640 * 10**9)])
    assert seconds == pytest.approx((480 + 120 + 30) / 200)
    assert network == 0
    reduced, _ = transfer_seconds(POD, mesh(fsdp=64), [gather(640 * 10**9, kind="all-reduce")])
    assert reduced == pytest.approx(2 * 630 / 200)


def test_copies_of_the_state_on_several_slices_meet_over_the_network() -> None:
    slices = parse_topology("v5e:4x4", 4)
    summed = gather(10**9, "replica", "all-reduce")
    seconds, network = transfer_seconds(slices, mesh(replica=4, fsdp=16), [summed])
    assert seconds == 0
    # 25 Gb/s a chip, and each chip sends and receives 3/4 of its own shard.
    assert network == pytest.approx(2 * 0.75e9 / 3.125e9)


def test_one_copy_over_several_slices_gathers_once_a_slice_over_the_network() -> None:
    slices = parse_topology("v5e:4x4", 2)
    seconds, network = transfer_seconds(slices, mesh(fsdp=32), [gather(32 * 10**9)])
    assert network == pytest.approx(16e9 / 16 / 3.125e9)  # half of it, by the NICs of 16 chips
    assert seconds == pytest.approx(32e9 * 15 / 16 / 50e9)


def test_what_an_axis_of_one_device_does_takes_no_time() -> None:
    assert transfer_seconds(POD, mesh(fsdp=64), [gather(10**12, "tensor")]) == (0, 0)


@pytest.mark.parametrize("size", ["270m", "3b"])
def test_products_are_six_flops_a_parameter_and_attention(size: str) -> None:
    config = load_experiment(size).model
    shapes = layer_shapes(config)
    flops = product_flops(config, shapes, 1.0, config.context_length)
    assert flops == 3 * flops_per_token(config)
    heads = sum(shape.query_dim for shape in shapes)
    norms = config.model_dim * (2 * config.num_layers + 1)
    norms += 2 * config.head_dim * config.num_layers
    assert flops == 6 * (parameter_count(config) - norms) + 6 * heads * 2049


def test_matrices_are_all_of_a_layer_but_its_norms() -> None:
    config = ModelConfig(num_layers=1, model_dim=256, head_dim=64, vocab_size=512)
    (shape,) = layer_shapes(config)
    # By hand: 4 query heads of 64 (alpha 0.5 of 256, rounded up to 4 heads), one kv head, F = 256.
    assert (shape.query_dim, shape.kv_dim, shape.ffn_dim) == (256, 64, 256)
    assert matrix_elements(config, shape) == 256 * (256 + 128) + 256 * 256 + 3 * 256 * 256


def test_a_device_with_a_large_state_and_few_tokens_is_bound_by_its_memory() -> None:
    config = load_experiment("270m").model
    shapes = layer_shapes(config)
    moved = memory_bytes(
        config, shapes, tokens=1.0, parts=1, stored=parameter_count(config),
        first_moment_bytes=4, recomputed=[0.0] * len(shapes),
    )  # fmt: skip
    # AdamW reads parameter, gradient and two moments and writes three of them: 28 bytes; a weight
    # is cast and used by one product forward and one backward (2 + 2 each), and its gradient
    # written and read (4 + 4); the embedding is cast twice and used by two products (8), and has
    # two gradients, of which one is read to add them (12).
    matrices = sum(matrix_elements(config, shape) for shape in shapes)
    embedding = config.vocab_size * config.model_dim
    floor = 28 * parameter_count(config) + 16 * matrices + 20 * embedding
    assert floor < moved < 1.001 * floor
    bound = roofline(
        parse_topology("v5e:1x1"), mesh(),
        **{**NOTHING, "memory_bytes": moved, "model_flops": product_flops(config, shapes, 1.0, 1)},
    )  # fmt: skip
    assert bound.binds == "HBM"


def test_a_parameter_of_the_first_moment_in_bfloat16_moves_four_bytes_less() -> None:
    config = load_experiment("270m").model
    shapes = layer_shapes(config)

    def moved(size: int) -> float:
        return memory_bytes(
            config, shapes, tokens=8.0, parts=2, stored=1000, first_moment_bytes=size,
            recomputed=[0.0] * len(shapes),
        )  # fmt: skip

    assert moved(4) - moved(2) == 4 * 1000


def test_recomputing_a_layer_moves_its_forward_pass_again() -> None:
    config = load_experiment("270m").model
    shapes = layer_shapes(config)

    def moved(share: float) -> float:
        return memory_bytes(
            config, shapes, tokens=8192.0, parts=1, stored=1, first_moment_bytes=4,
            recomputed=[share] * len(shapes),
        )  # fmt: skip

    assert moved(0.5) - moved(0) == pytest.approx((moved(1) - moved(0)) / 2)
    assert moved(1) > 1.2 * moved(0)

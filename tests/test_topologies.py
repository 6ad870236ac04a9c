"""Topologies are read as they are spelled, and have what the makers say."""

from __future__ import annotations

import pytest

from openelm_jax.errors import UserError
from openelm_jax.planning.topologies import ACCELERATORS, axis_rings, parse_topology


@pytest.mark.parametrize(
    ("name", "slices", "devices", "granules"),
    [
        ("v5p:4x4x4", 1, 64, 1),
        ("v5e:16x16", 1, 256, 1),
        ("v5e:4x4", 2, 32, 2),
        ("V6E:2x4", 1, 8, 1),
        ("v4:2x2x1", 1, 4, 1),  # one device a chip, as JAX sees a v4 or v5p
        ("tpu7x:2x2x1", 1, 8, 1),  # and two on a TPU7x
        ("h100:8", 1, 8, 1),
        ("h100:8x4", 1, 32, 4),
        ("a100:1", 1, 1, 1),
    ],
)
def test_a_topology_is_so_many_devices(name: str, slices: int, devices: int, granules: int) -> None:
    topology = parse_topology(name, slices)
    assert (topology.devices, topology.granules) == (devices, granules)
    assert topology.granule_devices * granules == devices
    assert parse_topology(*topology.spelling) == topology


def test_a_topology_is_called_as_it_is_spelled() -> None:
    assert parse_topology("v5e:4x4", 2).name == "2 of v5e:4x4"
    assert parse_topology("v5p:4x4x4").name == "v5p:4x4x4"
    assert parse_topology("h100:8x4").name == "h100:8x4"


@pytest.mark.parametrize(
    ("name", "slices", "phrase"),
    [
        ("v9:4x4", 1, "v4:16x16x16, v5e:16x16"),
        ("v5e", 1, "known are v4:"),
        ("v5e:3x5", 1, "v5e:2x4, v5e:4x4"),
        ("v5p:4x4", 1, "v5p:2x2x1"),
        ("h100:7", 1, "h100:NxM"),
        ("h100:8x0", 1, "h100:NxM"),
        ("h100:8", 4, "h100:8x4"),
        ("v5e:4x4", 0, "--slices is 0"),
    ],
)
def test_an_unknown_topology_is_refused_with_the_known_ones(
    name: str, slices: int, phrase: str
) -> None:
    with pytest.raises(UserError) as refusal:
        parse_topology(name, slices)
    assert phrase in str(refusal.value)
    assert str(refusal.value).count(". ") == 0  # one sentence


@pytest.mark.parametrize(
    ("name", "gigabytes_a_second"),
    # Bidirectional interconnect bandwidth of a chip, from Google's pages: v4 is six links of 50.
    [("v4", 600), ("v5e", 400), ("v5p", 1200), ("v6e", 800), ("tpu7x", 1200)],
)
def test_links_add_up_to_the_published_bandwidth_of_a_chip(
    name: str, gigabytes_a_second: float
) -> None:
    tpu = ACCELERATORS[name]
    links = 2 * max(shape.count("x") + 1 for shape in tpu.slices)
    assert links * 2 * tpu.link * tpu.devices_per_chip == gigabytes_a_second * 1e9


def test_every_accelerator_has_a_peak_and_less_memory_than_advertised() -> None:
    for accelerator in ACCELERATORS.values():
        assert accelerator.peak_flops() > 1e14
        assert 1e13 < accelerator.peak_flops("float32") <= accelerator.peak_flops() / 6
        assert 0.85 < accelerator.memory / 2**30 / accelerator.advertised_gib < 1.01


def rings(name: str, **sizes: int) -> dict[str, tuple[tuple[int, float], ...]]:
    """Return the (length, rate) of each axis' rings, those of one device left out."""
    found = axis_rings(parse_topology(name), sizes)
    return {axis: passed.rings for axis, passed in found.items() if axis in sizes}


def test_a_closed_ring_brings_data_from_both_sides() -> None:
    # A cube of v5p is closed in all three directions, a 4x4 of v5e in none, a v5e pod in both.
    assert rings("v5p:4x4x4", fsdp=64) == {"fsdp": ((4, 200e9),) * 3}
    assert rings("v5e:4x4", fsdp=16) == {"fsdp": ((4, 50e9),) * 2}
    assert rings("v5e:16x16", fsdp=256) == {"fsdp": ((16, 100e9),) * 2}
    assert rings("v5e:8x16", fsdp=128) == {"fsdp": ((8, 50e9), (16, 100e9))}
    assert rings("v5e:1x1", fsdp=1) == {"fsdp": ()}


def test_the_devices_of_a_chip_are_six_times_as_near_as_chips() -> None:
    # They share the links of their chip: 1,200 GB/s both ways / 2 / 6 links / 2 devices, and twice
    # that around a ring. Six times the 100 GB/s of a chip's link joins them.
    torus = ((4, 100e9),) * 3
    assert rings("tpu7x:4x4x4", fsdp=128) == {"fsdp": (*torus, (2, 600e9))}
    assert rings("tpu7x:4x4x4", fsdp=64, tensor=2) == {"fsdp": torus, "tensor": ((2, 600e9),)}


def test_axes_share_the_directions_of_a_torus() -> None:
    cube = axis_rings(parse_topology("v5p:4x4x4"), {"tensor": 4, "fsdp": 16})
    assert cube["tensor"].rings == ((4, 200e9),)
    assert cube["fsdp"].rings == ((4, 200e9), (4, 200e9))
    assert all(passed.assumed is None for passed in cube.values())


def test_a_part_of_a_direction_has_its_share_of_the_links() -> None:
    found = axis_rings(parse_topology("v5e:8x8"), {"tensor": 2, "fsdp": 32})
    # Neighbours have the link between them; every second device shares each link with those
    # between, and other rows are free.
    assert found["tensor"].rings == ((2, 50e9),)
    assert sorted(found["fsdp"].rings) == [(4, 25e9), (8, 50e9)]
    for axis in ("tensor", "fsdp"):
        assert found[axis].assumed is not None
        assert "share" in found[axis].assumed
    # Around a closed direction of 16 every second device has links on both sides.
    pod = axis_rings(parse_topology("v5e:16x16"), {"tensor": 2, "fsdp": 128})
    assert pod["tensor"].rings == ((2, 50e9),)
    assert sorted(pod["fsdp"].rings) == [(8, 50e9), (16, 100e9)]


def test_devices_that_follow_no_direction_are_said_to_be_bounded_as_a_line() -> None:
    # jax lays eight chips of v5e in a ring: 0 1 2 3, and back.
    found = axis_rings(parse_topology("v5e:2x4"), {"tensor": 2, "fsdp": 4})
    assert found["tensor"].rings == ((2, 50e9),)
    assert found["fsdp"].rings == ((4, 50e9),)
    assert found["fsdp"].assumed is not None
    assert "line of neighbours" in found["fsdp"].assumed


def test_a_gpu_has_its_switch_for_every_axis() -> None:
    found = axis_rings(parse_topology("h100:8"), {"tensor": 2, "fsdp": 4})
    assert found["tensor"].rings == ((2, 450e9),)
    assert found["fsdp"].rings == ((4, 450e9),)
    assert all(passed.assumed is None for passed in found.values())

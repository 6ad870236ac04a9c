"""A mesh is built from what is asked for and what is there, or refused with one that fits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from openelm_jax.config import MeshConfig
from openelm_jax.errors import UserError
from openelm_jax.parallel.mesh import (
    MeshShape,
    arranged,
    check_adapters,
    check_context,
    check_rows,
    granules_of,
    make_mesh,
    reader_of,
    resolve_mesh,
    rings_of,
    row_groups,
)


def tpus(*bounds: int, slices: int = 1) -> list[SimpleNamespace]:
    """Return stand-ins for the chips of slices of so many chips along each axis."""
    return [
        SimpleNamespace(platform="tpu", slice_index=number, coords=place, core_on_chip=0)
        for number in range(slices)
        for place in np.ndindex(*bounds)
    ]


def mesh_of(devices: list[SimpleNamespace]) -> SimpleNamespace:
    return SimpleNamespace(devices=np.array(devices, object).reshape(1, -1, 1, 1))


def processes_of(shape: MeshShape, numbers: list[int]) -> SimpleNamespace:
    """Return a mesh whose devices, in order, are of the processes of these numbers."""
    devices = [SimpleNamespace(process_index=number) for number in numbers]
    return SimpleNamespace(devices=np.array(devices).reshape(shape), shape=shape._asdict())


@pytest.mark.parametrize(
    ("config", "devices", "granules", "shape"),
    [
        (MeshConfig(), 8, 1, (1, 8, 1, 1)),
        (MeshConfig(tensor=2), 8, 1, (1, 4, 2, 1)),
        (MeshConfig(), 32, 4, (4, 8, 1, 1)),  # a copy a node
        (MeshConfig(replica=1), 32, 4, (1, 32, 1, 1)),
        (MeshConfig(fsdp=4), 32, 4, (8, 4, 1, 1)),
        (MeshConfig(tensor=2, context=4), 8, 1, (1, 1, 2, 4)),
    ],
)
def test_axes_that_are_left_out_take_the_devices_that_are_left(config, devices, granules, shape):
    assert resolve_mesh(config, devices, granules) == shape


@pytest.mark.parametrize(
    ("config", "devices", "granules", "proposal"),
    [
        (MeshConfig(fsdp=3), 8, 1, "replica 1 x fsdp 8 x tensor 1 x context 1"),
        (MeshConfig(tensor=3), 8, 1, "replica 1 x fsdp 4 x tensor 2 x context 1"),
        (MeshConfig(replica=3), 8, 1, "replica 2 x fsdp 4 x tensor 1 x context 1"),
        (MeshConfig(fsdp=5), 16, 2, "replica 2 x fsdp 8 x tensor 1 x context 1"),
    ],
)
def test_a_mesh_that_does_not_multiply_out_is_refused_with_the_nearest_that_does(
    config, devices, granules, proposal
):
    with pytest.raises(UserError, match=f"there are {devices}: {proposal} would fit"):
        resolve_mesh(config, devices, granules)


def test_rows_that_cannot_be_shared_out_are_refused_with_a_number_that_can():
    check_rows(MeshShape(2, 4), 32, 4)
    with pytest.raises(UserError, match=r"make it a multiple of 32 \(96, say\)"):
        check_rows(MeshShape(2, 4), 100, 4)


def test_tokens_that_cannot_be_shared_out_are_refused_with_a_number_that_can():
    check_context(MeshShape(context=4), 2048)
    with pytest.raises(UserError, match="use 2, or a length"):
        check_context(MeshShape(context=3), 2048)


def test_adapters_are_refused_where_columns_are_divided() -> None:
    check_adapters(MeshShape(replica=2, fsdp=2, context=2))
    with pytest.raises(UserError, match=r"mesh\.tensor is 2: adapters .* set mesh\.tensor to 1"):
        check_adapters(MeshShape(tensor=2))


def test_slices_are_counted():
    assert granules_of(tpus(4, 4)) == 1
    assert granules_of(tpus(4, 4, slices=3)) == 3


@pytest.mark.parametrize("bounds", [(4, 4, 1), (4, 4, 4), (16, 16, 1), (2, 4, 1), (4, 4, 8)])
def test_an_axis_of_all_chips_is_made_of_the_rings_of_the_torus(bounds):
    chips = tpus(*bounds)
    rng = np.random.default_rng(0)
    mesh = make_mesh_of_stand_ins(rng.permutation(np.array(chips, object)).tolist())
    assert rings_of(mesh) == tuple(length for length in bounds if length > 1)


def make_mesh_of_stand_ins(devices):
    return SimpleNamespace(devices=arranged(MeshShape(fsdp=len(devices)), devices))


@pytest.mark.parametrize("shape", [MeshShape(2, 32), MeshShape(4, 16), MeshShape(1, 64)])
def test_an_axis_of_all_chips_of_each_slice_is_made_of_the_rings_of_its_torus(shape):
    """jax would lay one long ring through a slice of 4 x 4 chips."""
    chips = tpus(4, 4, 1, slices=4)
    for chip in chips:
        chip.device_kind = "TPU v5 lite"
    mesh = SimpleNamespace(devices=arranged(shape, chips[::-1]))
    assert rings_of(mesh) == ((4, 4) if shape.fsdp == 16 else (shape.fsdp // 16, 4, 4))
    # A copy of the state is on as few slices as can be.
    slices = [{chip.slice_index for chip in row.flat} for row in mesh.devices]
    assert [len(each) for each in slices] == [shape.fsdp // 16] * shape.replica


def test_chips_in_another_order_are_one_ring():
    snake = sorted(
        tpus(4, 4, 1), key=lambda chip: (chip.coords[0], (-1) ** chip.coords[0] * chip.coords[1])
    )
    assert rings_of(mesh_of(snake)) == (16,)


def test_processes_that_share_rows_are_one_reader():
    # Two processes of two devices each; four devices divide the columns of the same rows.
    mesh = processes_of(MeshShape(tensor=4), [0, 0, 1, 1])
    assert row_groups(mesh) == ((0,), (0,))
    assert reader_of(mesh, 0) == reader_of(mesh, 1) == (0, 1)


def test_processes_with_rows_of_their_own_are_readers_of_their_own():
    mesh = processes_of(MeshShape(replica=2, fsdp=2), [0, 0, 1, 1])
    assert [reader_of(mesh, process) for process in (0, 1)] == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("shape", "numbers"),
    [(MeshShape(fsdp=2, tensor=3), [0, 0, 1, 1, 2, 2]), (MeshShape(fsdp=4), [0, 0, 0, 1])],
)
def test_processes_that_overlap_or_are_unequal_are_refused(shape, numbers):
    with pytest.raises(UserError, match=r"mesh\.tensor x mesh\.context"):
        reader_of(processes_of(shape, numbers), 0)


def test_a_mesh_of_this_machine_has_the_four_axes():
    import jax

    mesh = make_mesh(MeshShape(fsdp=len(jax.devices())))
    assert mesh.axis_names == ("replica", "fsdp", "tensor", "context")
    assert rings_of(mesh) == (len(jax.devices()),)

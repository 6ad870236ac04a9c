"""Whatever the mesh, a run is the run of one device but for the last bits of its sums.

Real devices are stood in for by XLA's devices of one CPU, and by two processes with four each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ports import free_port

PROGRAM = Path(__file__).with_name("run.py")
LOSSES = 1e-5
GRADIENTS = 1e-6
QK_NORMS = 3e-6
"""Of the gradients of the norms of queries and keys: small differences of large sums."""
PARAMETERS = 1e-4
STEPS = 20

# replica, fsdp, tensor, context
SOME = [(2, 2, 2, 1), (1, 2, 2, 2)]
ALL = [
    *[(1, 1, 1, 1)],
    *[(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)],
    *[(4, 1, 1, 1), (1, 4, 1, 1), (1, 1, 4, 1), (1, 1, 1, 4), (2, 2, 1, 1), (1, 1, 2, 2)],
    *[
        (8, 1, 1, 1),
        (1, 8, 1, 1),
        (1, 1, 8, 1),
        (1, 1, 1, 8),
        (2, 1, 1, 4),
        (2, 2, 1, 2),
        (1, 2, 4, 1),
    ],
    *[(1, 1, 3, 1), (1, 1, 5, 1), (1, 1, 6, 1), (1, 1, 7, 1), (2, 1, 3, 1)],
]
"""Tensor degrees of 3, 5, 6 and 7 divide no heads of the model."""
PROCESSES = {"f8": (1, 8, 1, 1), "mix": (1, 2, 2, 2), "r2f4": (2, 4, 1, 1), "t8": (1, 1, 8, 1)}
TWICE = ("f8", "mix")


def train(folder: Path, devices: int, runs: list[str], processes: int = 1) -> Path:
    """Train on each mesh and return the folder of what came of it."""
    folder.mkdir()
    paths = [str(PROGRAM.parents[2]), str(PROGRAM.parents[1])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    coordinator = "-" if processes == 1 else f"localhost:{free_port()}"
    rest = [str(processes), *runs]
    running = [
        subprocess.Popen(
            [sys.executable, PROGRAM, folder, str(STEPS), coordinator, str(process), *rest],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(processes)
    ]
    try:
        for process in running:
            _, said = process.communicate(timeout=1500)
            assert process.returncode == 0, said
    finally:
        for process in running:
            process.kill()
    return folder


def name_of(shape: tuple[int, ...], accumulation: int) -> str:
    return "-".join(map(str, (*shape, accumulation)))


def spelled(shapes: list[tuple[int, ...]], accumulation: int) -> list[str]:
    return [
        f"{name_of(shape, accumulation)}={','.join(map(str, (*shape, accumulation)))}"
        for shape in shapes
    ]


def distances(a: np.lib.npyio.NpzFile, b: np.lib.npyio.NpzFile, kind: str) -> dict[str, float]:
    """Return |a - b| / |b| of each tensor, by path."""
    return {
        name: float(np.linalg.norm(a[name] - b[name]) / np.linalg.norm(b[name]))
        for name in b.files
        if name.startswith(kind)
    }


def is_qk_norm(name: str) -> bool:
    return "query_norm" in name or "key_norm" in name


def assert_same_run(run: np.lib.npyio.NpzFile, one: np.lib.npyio.NpzFile) -> None:
    assert run.files == one.files
    assert one["losses"][-1] < one["losses"][0] - 0.5, "it learns"
    np.testing.assert_allclose(run["losses"], one["losses"], rtol=LOSSES)
    for name, distance in distances(run, one, "gradient").items():
        assert distance <= (QK_NORMS if is_qk_norm(name) else GRADIENTS), (name, distance)
    for name, distance in distances(run, one, "param").items():
        assert distance <= PARAMETERS, (name, distance)


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("some") / "runs"
    others = ["one=0", "cut=1,1,1,1,32", "rings=1,8,1,1,4:2,4"]
    return train(folder, 8, [*others, *spelled(SOME, 4)])


@pytest.mark.heavy
@pytest.mark.parametrize("shape", SOME)
def test_a_mesh_trains_as_one_device(some, shape):
    assert_same_run(np.load(some / f"{name_of(shape, 4)}.npz"), np.load(some / "one.npz"))


@pytest.mark.heavy
def test_passed_on_ring_by_ring_weights_and_gradients_are_the_same(some):
    assert_same_run(np.load(some / "rings.npz"), np.load(some / "one.npz"))


@pytest.mark.heavy
def test_one_device_that_takes_row_by_row_moves_the_norms_of_queries_and_keys_as_far(some):
    moved = distances(np.load(some / "cut.npz"), np.load(some / "one.npz"), "gradient")
    assert GRADIENTS < max(d for name, d in moved.items() if is_qk_norm(name)) < QK_NORMS
    assert max(d for name, d in moved.items() if not is_qk_norm(name)) < GRADIENTS


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("every") / "runs"
    return train(folder, 8, ["one=0", *spelled(ALL + SOME, 1), *spelled(ALL, 4)])


@pytest.mark.heavy
def test_every_mesh_with_and_without_accumulation_trains_as_one_device(every):
    one = np.load(every / "one.npz")
    runs = sorted(every.glob("*-*.npz"))
    assert len(runs) == 2 * len(ALL) + len(SOME)
    for path in runs:
        assert_same_run(np.load(path), one)


@pytest.mark.heavy
def test_two_processes_train_as_one_and_twice_the_same_bits(tmp_path):
    runs = [f"{name}={','.join(map(str, shape))},2" for name, shape in PROCESSES.items()]
    one = train(tmp_path / "one", 8, runs)
    two = train(tmp_path / "two", 4, runs, processes=2)
    again = train(tmp_path / "again", 4, runs[: len(TWICE)], processes=2)
    for name in PROCESSES:
        in_two = np.load(two / f"{name}.npz")
        assert_same_run(in_two, np.load(one / f"{name}.npz"))
    for name in TWICE:
        in_two, in_two_again = (np.load(folder / f"{name}.npz") for folder in (two, again))
        for array in in_two.files:
            assert in_two[array].tobytes() == in_two_again[array].tobytes(), array

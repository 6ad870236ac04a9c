"""What devices send each other: weights in bfloat16, gradients' sums in float32, nothing else.

The traps that a partitioner falls into (docs/scaling.md): weight gradients summed whole and in
bfloat16, the embedding's among them, and products turned into hundreds of permutations. Read from
the program as it is lowered, since XLA's CPU sends everything in float32, and from the compiled
one what it adds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from run import MODEL

from openelm_jax.parallel.mesh import MeshShape
from openelm_jax.parallel.sharding import make_layout

PROGRAM = Path(__file__).with_name("lower.py")
MESHES = {
    "fsdp": "1,8,1,1,none",
    "remat": "1,8,1,1,block",
    "tensor": "2,2,2,1,none",
    "context": "2,2,1,2,none",
}
MATRICES = 2 * 4 + 2
"""Four of each layer; and the embedding, for the lookup and for the loss."""


@pytest.fixture(scope="module")
def sent() -> dict[str, dict]:
    paths = [str(PROGRAM.parents[2]), str(PROGRAM.parents[1])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    done = subprocess.run(
        [sys.executable, PROGRAM, *MESHES.values()],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    by_argument = json.loads(done.stdout)
    return {name: by_argument[argument] for name, argument in MESHES.items()}


def of_kind(program: dict, kind: str) -> list[tuple[str, str]]:
    """Return (shape, type) of each collective of a kind: ("64x48", "bf16")."""
    found = [operand.rpartition("x") for each, operand in program["lowered"] if each == kind]
    return [(shape, dtype) for shape, _, dtype in found]


@pytest.mark.parametrize("mesh", MESHES)
def test_nothing_is_permuted(sent, mesh):
    assert not of_kind(sent[mesh], "collective_permute")
    assert "collective-permute" not in sent[mesh]["compiled"]
    assert sent[mesh]["compiled"] or mesh != "fsdp"


@pytest.mark.parametrize("mesh", MESHES)
def test_weights_are_gathered_in_bfloat16(sent, mesh):
    types = Counter(dtype for _, dtype in of_kind(sent[mesh], "all_gather"))
    segments = types.pop("i32", 0)
    assert (segments > 0) == (mesh == "context")
    assert types.keys() == {"bf16"}


@pytest.mark.parametrize("mesh", ["fsdp", "remat"])
def test_each_weight_is_gathered_for_each_use_and_never_kept(sent, mesh):
    assert len(of_kind(sent[mesh], "all_gather")) == 2 * (MATRICES - 2) + 2


@pytest.mark.parametrize("mesh", MESHES)
def test_every_gradient_of_a_matrix_is_scattered_as_a_float32_sum(sent, mesh):
    scattered = of_kind(sent[mesh], "reduce_scatter")
    keys_and_values = 2 * 2 if mesh == "context" else 0
    over_tensor = 2 if mesh == "tensor" else 0  # the embedding's halves of the tokens
    axes = 2 if mesh == "context" else 1
    assert len(scattered) == axes * MATRICES + keys_and_values + over_tensor
    assert {dtype for _, dtype in scattered} == {"f32"}


@pytest.mark.parametrize("mesh", MESHES)
def test_no_gradient_of_a_matrix_is_summed_whole_nor_in_bfloat16(sent, mesh):
    size = MeshShape(*map(int, MESHES[mesh].split(",")[:4]))
    placements = make_layout(MODEL, size).placements.values()
    whole = {"x".join(map(str, p.shape)) for p in placements if p.dim is not None}
    for shape, dtype in of_kind(sent[mesh], "all_reduce"):
        assert shape not in whole
        if dtype == "bf16":  # activations [rows, tokens, model_dim], or the same flattened
            assert mesh == "tensor"
            assert shape.endswith("x64")
            assert shape.startswith(("6x32x", "192x")), shape

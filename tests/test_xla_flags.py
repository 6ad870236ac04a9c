"""Flags are set where they help, the user's own stay, and the compilers know every name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from openelm_jax.xla_flags import (
    GPU_VARIABLES,
    GPUS_FLAGS,
    GPUS_VARIABLES,
    TPU_OPTIONS,
    compiler_option_lines,
    compiler_options,
    platform,
    set_flags,
)

KINDS = ("TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x")
TOPOLOGIES = {
    "TPU v4": "v4:2x2x1",
    "TPU v5 lite": "v5e:2x2",
    "TPU v5": "v5p:2x2x1",
    "TPU v6 lite": "v6e:2x2",
    "TPU7x": "tpu7x:2x2x1",
}
AHEAD_OF_TIME = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "JAX_PLATFORMS": "cpu",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def machine(root: Path, *, gpus: int = 0, tpus: int = 0) -> Path:
    """Return the root of a file system that shows these devices."""
    for number in range(gpus):
        (root / f"proc/driver/nvidia/gpus/0000:{number}").mkdir(parents=True)
    for number in range(tpus):
        device = root / f"sys/bus/pci/devices/0000:00:0{number}.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x1ae0\n")
        (device / "device").write_text("0x0063\n")
    return root


@pytest.mark.parametrize(
    ("devices", "environ", "expected"),
    [
        ({}, {}, "cpu"),
        ({"gpus": 2}, {}, "gpu"),
        ({"gpus": 2}, {"CUDA_VISIBLE_DEVICES": ""}, "cpu"),
        ({"tpus": 4}, {}, "tpu"),
        ({"gpus": 2}, {"JAX_PLATFORMS": "cpu"}, "cpu"),
        ({"tpus": 4}, {"JAX_PLATFORMS": "cpu"}, "cpu"),
        ({}, {"JAX_PLATFORMS": "tpu,cpu"}, "tpu"),
        ({}, {"JAX_PLATFORMS": "cuda"}, "gpu"),
    ],
)
def test_the_platform_is_the_one_asked_for_else_that_of_the_devices_present(
    tmp_path: Path, devices, environ, expected
) -> None:
    assert platform(environ, machine(tmp_path, **devices)) == expected


def test_another_device_of_google_s_machines_is_no_tpu(tmp_path: Path) -> None:
    machine(tmp_path, tpus=1)
    (tmp_path / "sys/bus/pci/devices/0000:00:00.0/device").write_text("0x0042\n")  # its network

    assert platform({}, tmp_path) == "cpu"


@pytest.mark.parametrize("devices", [{}, {"tpus": 4}])
def test_nothing_is_set_for_cpus_nor_in_the_environment_of_tpus(tmp_path: Path, devices) -> None:
    environ: dict[str, str] = {}

    assert set_flags(None, environ, machine(tmp_path, **devices)) == []
    assert environ == {}


def test_a_single_gpu_gets_memory_and_no_flags_for_collectives(tmp_path: Path) -> None:
    environ: dict[str, str] = {}

    lines = set_flags(None, environ, machine(tmp_path, gpus=1))

    assert environ == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("gpus", "processes", "environ"),
    [
        (8, None, {}),
        (1, 2, {}),
        (1, None, {"SLURM_NTASKS": "2"}),
        (1, None, {"JAX_NUM_PROCESSES": "4"}),
    ],
)
def test_several_gpus_get_the_flags_for_collectives_and_a_line_each(
    tmp_path: Path, gpus, processes, environ
) -> None:
    before = len(environ)

    lines = set_flags(processes, environ, machine(tmp_path, gpus=gpus))

    assert environ["XLA_FLAGS"].split() == [
        f"--{name}={value}" for name, (value, _) in GPUS_FLAGS.items()
    ]
    assert environ["NCCL_NVLS_ENABLE"] == "1"
    assert len(environ) == before + 3
    assert len(lines) == len(GPUS_FLAGS) + len(GPU_VARIABLES) + len(GPUS_VARIABLES)
    for line in lines:
        assert re.fullmatch(r"\S+=\S+ \([^()]+\)", line)


def test_a_process_alone_in_slurm_or_in_flags_is_alone(tmp_path: Path) -> None:
    environ = {"SLURM_NTASKS": "1"}

    set_flags(1, environ, machine(tmp_path, gpus=1))

    assert "XLA_FLAGS" not in environ


def test_what_the_user_has_set_stays_and_the_line_says_so(tmp_path: Path) -> None:
    environ = {
        "XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false --xla_dump_to=/somewhere",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5",
    }
    root = machine(tmp_path, gpus=8)

    lines = set_flags(None, environ, root)

    assert environ["XLA_FLAGS"].startswith(
        "--xla_gpu_enable_latency_hiding_scheduler=false --xla_dump_to=/somewhere --xla_gpu_"
    )
    assert environ["XLA_FLAGS"].count("latency_hiding") == 1
    assert environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"
    assert "--xla_gpu_enable_latency_hiding_scheduler=false (as XLA_FLAGS has it)" in lines
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.5 (as the environment has it)" in lines
    once = dict(environ)
    set_flags(None, environ, root)
    assert environ == once


def test_an_option_that_the_user_names_is_left_to_the_user() -> None:
    ours = compiler_options("TPU v5", environ={})

    theirs = compiler_options(
        "TPU v5", environ={"LIBTPU_INIT_ARGS": "--xla_tpu_scoped_vmem_limit_kib=1024"}
    )

    assert ours.keys() - theirs.keys() == {"xla_tpu_scoped_vmem_limit_kib"}
    assert theirs.items() < ours.items()


def test_only_tpus_have_compiler_options_and_slices_have_more() -> None:
    assert compiler_options("cpu", environ={}) == {}
    assert compiler_options("NVIDIA H200", num_slices=2, environ={}) == {}
    for kind in KINDS:
        alone, sliced = (compiler_options(kind, slices, environ={}) for slices in (1, 2))
        assert alone.items() < sliced.items()
        assert len(compiler_option_lines(kind, sliced)) == len(sliced)


def test_every_generation_of_the_options_is_reached_by_a_kind() -> None:
    reached = [compiler_options(kind, environ={}) for kind in KINDS]

    for options in TPU_OPTIONS.values():
        assert {name: value for name, (value, _) in options.items()} in reached


def test_names_are_plain_and_values_have_no_spaces() -> None:
    for flags in (GPUS_FLAGS, *TPU_OPTIONS.values()):
        for name, (value, why) in flags.items():
            assert re.fullmatch(r"xla_[a-z0-9_]+", name)
            assert re.fullmatch(r"[A-Za-z0-9.]+", value)
            assert why


def test_xla_knows_the_flags_for_gpus() -> None:
    """It reads XLA_FLAGS on every platform, and aborts at a name that it does not know."""

    def starts(flags: str) -> bool:
        environ = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        command = [sys.executable, "-c", "import jax; jax.devices()"]
        return subprocess.run(command, env=environ, capture_output=True).returncode == 0

    assert starts(" ".join(f"--{name}={value}" for name, (value, _) in GPUS_FLAGS.items()))
    assert not starts("--xla_gpu_no_such_flag=true")


COMPILE = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from openelm_jax.xla_flags import compiler_options

for kind, name in {topologies}.items():
    devices = topologies.get_topology_desc(name, "tpu").devices
    assert devices[0].device_kind == kind, devices[0].device_kind
    mesh = Mesh(np.array(devices), "fsdp")
    by_rows = NamedSharding(mesh, P("fsdp"))
    gather = lambda x: jax.lax.all_gather(x, "fsdp", tiled=True)
    function = jax.shard_map(gather, mesh=mesh, in_specs=P("fsdp"), out_specs=P(), check_vma=False)
    x = jax.ShapeDtypeStruct((len(devices) * 8, 128), jnp.bfloat16, sharding=by_rows)
    lowered = jax.jit(function).lower(x)
    lowered.compile(compiler_options=compiler_options(kind, num_slices=2))
try:
    lowered.compile(compiler_options={{"xla_tpu_no_such_option": "true"}})
except Exception as error:
    assert "No such compile option" in str(error), error
else:
    sys.exit("an unknown option was accepted")
"""


def test_the_tpu_compiler_knows_the_options_of_every_generation() -> None:
    pytest.importorskip("libtpu")
    root = str(Path(__file__).parents[1])
    environ = os.environ | AHEAD_OF_TIME | {"PYTHONPATH": root}

    done = subprocess.run(
        [sys.executable, "-c", COMPILE.format(topologies=TOPOLOGIES)],
        env=environ, capture_output=True, text=True, timeout=300,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-2000:]

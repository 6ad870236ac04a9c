"""The compiler's flags for each platform, each with its reason; imports no jax.

GPU flags stand in the environment before jax starts; TPU options are given to each compilation, so
that a plan compiled ahead of time and the run have the same. What the user sets stays: a flag named
in XLA_FLAGS or LIBTPU_INIT_ARGS is never set here. A CPU gets none: there is none that helps.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Literal

Platform = Literal["cpu", "gpu", "tpu"]
ROOT = Path("/")
Flags = dict[str, tuple[str, str]]
"""Name: (value, why)."""

# All weights of a layer in one collective: the widest layer of 3B has 273 MB in bfloat16.
LAYER_BYTES = str(512 * 1024**2)

# Of the process, whatever the number of GPUs.
GPU_VARIABLES: Flags = {
    "XLA_PYTHON_CLIENT_MEM_FRACTION": ("0.9", "jax takes three quarters of the memory by default"),
}
# Of XLA, where a process sees several GPUs or is one of several.
GPUS_FLAGS: Flags = {
    "xla_gpu_enable_latency_hiding_scheduler": ("true", "weights are gathered beside products"),
    "xla_gpu_all_gather_combine_threshold_bytes": (LAYER_BYTES, "a layer's weights at once"),
    "xla_gpu_reduce_scatter_combine_threshold_bytes": (LAYER_BYTES, "a layer's gradients at once"),
    "xla_gpu_all_reduce_combine_threshold_bytes": (LAYER_BYTES, "replicas sum a layer at once"),
}
GPUS_VARIABLES: Flags = {
    "NCCL_NVLS_ENABLE": ("1", "switches of the NVLink add up, where they can"),
}

_FUSED_GATHER: Flags = {
    "xla_enable_async_all_gather": ("true", "weights are gathered beside products"),
    "xla_tpu_enable_async_collective_fusion": ("true", "a product hides the next gather"),
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": ("true", "the gather of weights too"),
    "xla_tpu_enable_async_collective_fusion_multiple_steps": ("true", "over several products"),
    "xla_tpu_overlap_compute_collective_tc": ("true", "on the core that computes"),
}
_SLICES: Flags = {
    "xla_tpu_enable_data_parallel_all_reduce_opt": ("true", "slices sum gradients during backward"),
    "xla_tpu_data_parallel_opt_different_sized_ops": ("true", "layers of different sizes, too"),
}


def _vmem(kib: int) -> Flags:
    return {"xla_tpu_scoped_vmem_limit_kib": (str(kib), "larger blocks, fewer trips to memory")}


# Seen in what the compiler makes of a few FSDP layers: v5p and v6e gather nothing beside products
# unless told to, v5e does so by itself; with more vector memory v5p moves 27 % fewer bytes, v5e and
# v6e 5 to 12 % of smaller layers. v4 and TPU7x are left to their compiler's choices.
TPU_OPTIONS: dict[str, Flags] = {
    "v4": {},
    "v5e": _vmem(65536),
    "v5p": _FUSED_GATHER | _vmem(65536),
    "v6e": _FUSED_GATHER | _vmem(98304),
    "tpu7x": {},
}

# The chips' numbers on the PCI bus: v4, v5p, v5e, v6e, TPU7x, of the maker 0x1ae0.
_PCI_MAKER = "0x1ae0"
_PCI_DEVICES = {"0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}
# Beginnings of `device_kind`; of several that fit the longest counts.
_GENERATIONS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v6": "v6e",
    "TPU7x": "tpu7x",
}


def set_flags(
    processes: int | None = None,
    environ: MutableMapping[str, str] = os.environ,
    root: Path = ROOT,
) -> list[str]:
    """Set what jax and XLA read when they start, and return a line for each flag.

    Call it before jax is imported, with the number of processes if the command line names it. What
    the user has set stays, and its line says so.
    """
    if platform(environ, root) != "gpu":
        return []
    several = _num_gpus(environ, root) > 1 or _is_one_of_several(processes, environ)
    own = _named(environ.get("XLA_FLAGS", ""))
    lines = []
    for name, (value, why) in (GPUS_FLAGS if several else {}).items():
        if name in own:
            lines.append(f"--{name}={own[name]} (as XLA_FLAGS has it)")
        else:
            environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} --{name}={value}".strip()
            lines.append(f"--{name}={value} ({why})")
    for name, (value, why) in (GPU_VARIABLES | (GPUS_VARIABLES if several else {})).items():
        if name in environ:
            lines.append(f"{name}={environ[name]} (as the environment has it)")
        else:
            environ[name] = value
            lines.append(f"{name}={value} ({why})")
    return lines


def compiler_options(
    device_kind: str,
    num_slices: int = 1,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Return the options for compiling for such devices: `lowered.compile(compiler_options=...)`.

    Empty for all but TPUs. Options named in LIBTPU_INIT_ARGS or XLA_FLAGS are left to them.
    """
    own = _named(environ.get("LIBTPU_INIT_ARGS", "")) | _named(environ.get("XLA_FLAGS", ""))
    return {
        name: value
        for name, (value, _) in _tpu_flags(device_kind, num_slices).items()
        if name not in own
    }


def compiler_option_lines(device_kind: str, options: Mapping[str, str]) -> list[str]:
    """Return a line for each of `options`, with its reason."""
    flags = _tpu_flags(device_kind, 2)
    return [f"{name}={value} ({flags[name][1]})" for name, value in options.items()]


def platform(environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> Platform:
    """Return on what jax will run, without asking it: JAX_PLATFORMS, else the machine's devices."""
    wanted = environ.get("JAX_PLATFORMS", "").partition(",")[0]
    if wanted:
        return "tpu" if wanted == "tpu" else "gpu" if wanted in ("cuda", "gpu") else "cpu"
    if _has_tpu(root):
        return "tpu"
    return "gpu" if _num_gpus(environ, root) else "cpu"


def _has_tpu(root: Path) -> bool:
    return (root / "dev/accel0").exists() or any(
        maker.read_text().strip() == _PCI_MAKER
        and maker.with_name("device").read_text().strip() in _PCI_DEVICES
        for maker in root.glob("sys/bus/pci/devices/*/vendor")
    )


def _tpu_flags(device_kind: str, num_slices: int) -> Flags:
    fitting = [start for start in _GENERATIONS if device_kind.startswith(start)]
    if not fitting:
        return {}
    options = TPU_OPTIONS[_GENERATIONS[max(fitting, key=len)]]
    return options | _SLICES if num_slices > 1 else options


def _num_gpus(environ: Mapping[str, str], root: Path) -> int:
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    present = len(list(root.glob("proc/driver/nvidia/gpus/*"))) or len(
        [path for path in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    )
    if chosen is None:
        return present
    return min(present, len([gpu for gpu in chosen.split(",") if gpu.strip() not in ("", "-1")]))


def _is_one_of_several(processes: int | None, environ: Mapping[str, str]) -> bool:
    names = ("JAX_NUM_PROCESSES", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
    return any(
        number not in (None, "", "1")
        for number in (processes and str(processes), *map(environ.get, names))
    )


def _named(flags: str) -> dict[str, str]:
    """Return the flags of XLA_FLAGS by name, without their dashes."""
    pairs = (flag.lstrip("-").partition("=") for flag in flags.split())
    return {name: value or "true" for name, _, value in pairs}

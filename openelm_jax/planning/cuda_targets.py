"""GPUs that are not here, as XLA wants them described to compile for them."""

from __future__ import annotations

from typing import NamedTuple

from openelm_jax.planning.topologies import Accelerator

TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared_optin}
  core_count: {cores} fpus_per_core: {units} clock_rate_ghz: {clock} l2_cache_size: {cache}
  memory_bandwidth: {memory_rate} device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} }}
}}
platform_name: "CUDA"
device_description_str: "{kind}"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 9 }}
"""


class Chip(NamedTuple):
    """Figures of the CUDA programming guide (compute capabilities) and of NVIDIA's white papers."""

    major: int
    cores: int
    units: int
    clock: float
    cache: int
    shared: int
    shared_optin: int


CHIPS = {
    "a100": Chip(8, 108, 64, 1.41, 40 * 2**20, 164 * 2**10, 163 * 2**10),
    "h100": Chip(9, 132, 128, 1.98, 50 * 2**20, 228 * 2**10, 227 * 2**10),
    "h200": Chip(9, 132, 128, 1.98, 50 * 2**20, 228 * 2**10, 227 * 2**10),
    "b200": Chip(10, 148, 128, 1.965, 126 * 2**20, 228 * 2**10, 227 * 2**10),
}


def cuda_target(accelerator: Accelerator) -> str:
    """Return a GPU as the text of XLA's `GpuTargetConfigProto`."""
    return TARGET.format(
        kind=accelerator.device_kind,
        memory=int(accelerator.memory),
        memory_rate=int(accelerator.memory_rate),
        **CHIPS[accelerator.name]._asdict(),
    )

"""What the devices could do at best, and what they hold."""

from __future__ import annotations

from typing import NamedTuple

GIB = 2**30
MIB = 2**20


TPU_PASSES = 6
"""Products in bfloat16 of which a TPU makes one in float32 (`jax.lax.Precision.HIGHEST`)."""


class Device(NamedTuple):
    """Dense FLOP/s of products in bfloat16, bytes of memory, and FLOP/s in float32.

    On GPUs the last are those of the units for float32, which the precision of float32 runs
    ("highest") calls for, and not TF32's.
    """

    bfloat16: float
    memory: int
    float32: float


def _tpu(bfloat16: float, memory: int) -> Device:
    return Device(bfloat16, memory, bfloat16 / TPU_PASSES)


# One JAX device, by the start of its `device_kind`; the longest start that fits counts.
# TPU v2, v3 and TPU7x: a device is one of the two cores of a chip. Peaks and memory are those of
# docs.cloud.google.com/tpu/docs/{v2,v3,v4,v5e,v5p,v6e,tpu7x}.
# GPUs: peaks are the dense ones (half of those "with sparsity") of NVIDIA's data sheets of each
# product (A100, H100, H200, GH200, L4, L40, L40S; B200: DGX and HGX B200; GB200: GB200 NVL72), for
# float32 those of the line "FP32"; memory is the total that nvidia-smi lists.
DEVICES = {
    "TPU v2": _tpu(22.5e12, 8 * GIB),
    "TPU v3": _tpu(61.5e12, 16 * GIB),
    "TPU v4": _tpu(275e12, 32 * GIB),
    "TPU v5 lite": _tpu(197e12, 16 * GIB),
    "TPU v5e": _tpu(197e12, 16 * GIB),
    "TPU v5": _tpu(459e12, 95 * GIB),
    "TPU v6 lite": _tpu(918e12, 32 * GIB),
    "TPU v6e": _tpu(918e12, 32 * GIB),
    "TPU7x": _tpu(1153.5e12, 96 * GIB),
    "NVIDIA A100": Device(312e12, 81_920 * MIB, 19.5e12),
    "NVIDIA A100-SXM4-40GB": Device(312e12, 40_960 * MIB, 19.5e12),
    "NVIDIA A100-PCIE-40GB": Device(312e12, 40_960 * MIB, 19.5e12),
    "NVIDIA H100": Device(989e12, 81_559 * MIB, 67e12),
    "NVIDIA H100 PCIe": Device(756e12, 81_559 * MIB, 51e12),
    "NVIDIA H100 NVL": Device(835.5e12, 95_830 * MIB, 60e12),
    "NVIDIA H200": Device(989e12, 143_771 * MIB, 67e12),
    "NVIDIA H200 NVL": Device(835.5e12, 143_771 * MIB, 60e12),
    "NVIDIA GH200": Device(989e12, 97_871 * MIB, 67e12),
    "NVIDIA B200": Device(2250e12, 183_359 * MIB, 75e12),
    "NVIDIA GB200": Device(2500e12, 189_471 * MIB, 80e12),
    "NVIDIA L4": Device(121e12, 23_034 * MIB, 30.3e12),
    "NVIDIA L40": Device(181e12, 46_068 * MIB, 90.5e12),
    "NVIDIA L40S": Device(362e12, 46_068 * MIB, 91.6e12),
}


def peak_flops(device_kind: str, dtype: str = "bfloat16") -> float | None:
    """Return the peak of a device in FLOP/s, or None if it is not known (a CPU, say)."""
    known = _known(device_kind)
    if known is None:
        return None
    return known.float32 if dtype == "float32" else known.bfloat16


def memory_bytes(device_kind: str) -> int | None:
    """Return the memory of a device in bytes, or None if it is not known (a CPU, say)."""
    known = _known(device_kind)
    return known.memory if known else None


def _known(device_kind: str) -> Device | None:
    fitting = [start for start in DEVICES if device_kind.startswith(start)]
    return DEVICES[max(fitting, key=len)] if fitting else None

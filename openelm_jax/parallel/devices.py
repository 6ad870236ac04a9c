"""What the devices could do at best, and what they hold."""

from __future__ import annotations

from typing import NamedTuple

GIB = 2**30
MIB = 2**20


class Device(NamedTuple):
    """Dense bfloat16 FLOP/s, and bytes of memory."""

    peak_flops: float
    memory: int


# One JAX device, by the start of its `device_kind`; the longest start that fits counts.
# TPU v2, v3 and TPU7x: a device is one of the two cores of a chip. Peaks and memory are those of
# docs.cloud.google.com/tpu/docs/{v2,v3,v4,v5e,v5p,v6e,tpu7x}.
# GPUs: peaks are the dense ones (half of those "with sparsity") of NVIDIA's data sheets of each
# product (A100, H100, H200, GH200, L4, L40S; B200: DGX B200; GB200: GB200 NVL72); memory is the
# total that nvidia-smi lists.
DEVICES = {
    "TPU v2": Device(22.5e12, 8 * GIB),
    "TPU v3": Device(61.5e12, 16 * GIB),
    "TPU v4": Device(275e12, 32 * GIB),
    "TPU v5 lite": Device(197e12, 16 * GIB),
    "TPU v5e": Device(197e12, 16 * GIB),
    "TPU v5": Device(459e12, 95 * GIB),
    "TPU v6 lite": Device(918e12, 32 * GIB),
    "TPU v6e": Device(918e12, 32 * GIB),
    "TPU7x": Device(1153.5e12, 96 * GIB),
    "NVIDIA A100": Device(312e12, 81_920 * MIB),
    "NVIDIA A100-SXM4-40GB": Device(312e12, 40_960 * MIB),
    "NVIDIA A100-PCIE-40GB": Device(312e12, 40_960 * MIB),
    "NVIDIA H100": Device(989e12, 81_559 * MIB),
    "NVIDIA H100 PCIe": Device(756e12, 81_559 * MIB),
    "NVIDIA H100 NVL": Device(835.5e12, 95_830 * MIB),
    "NVIDIA H200": Device(989e12, 143_771 * MIB),
    "NVIDIA H200 NVL": Device(835.5e12, 143_771 * MIB),
    "NVIDIA GH200": Device(989e12, 97_871 * MIB),
    "NVIDIA B200": Device(2250e12, 183_359 * MIB),
    "NVIDIA GB200": Device(2500e12, 189_471 * MIB),
    "NVIDIA L4": Device(121e12, 23_034 * MIB),
    "NVIDIA L40": Device(181e12, 46_068 * MIB),
    "NVIDIA L40S": Device(362e12, 46_068 * MIB),
}


def peak_flops(device_kind: str) -> float | None:
    """Return the bfloat16 peak of a device in FLOP/s, or None if it is not known (a CPU, say)."""
    known = _known(device_kind)
    return known.peak_flops if known else None


def memory_bytes(device_kind: str) -> int | None:
    """Return the memory of a device in bytes, or None if it is not known (a CPU, say)."""
    known = _known(device_kind)
    return known.memory if known else None


def _known(device_kind: str) -> Device | None:
    fitting = [start for start in DEVICES if device_kind.startswith(start)]
    return DEVICES[max(fitting, key=len)] if fitting else None

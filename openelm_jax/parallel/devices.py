"""What the devices could do at best."""

from __future__ import annotations

# Dense bfloat16 FLOP/s of one device, from the makers' data sheets, by the start of its
# `device_kind`; the longest start that fits counts. A TPU7x device is one of its chip's two cores.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 1153.5e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Return the bfloat16 peak of a device in FLOP/s, or None if it is not known (a CPU, say)."""
    known = [start for start in PEAK_FLOPS if device_kind.startswith(start)]
    return PEAK_FLOPS[max(known, key=len)] if known else None

"""What the paper measured, to print beside what is measured here (arXiv 2404.14619).

Tokens a second, batch 1, a prompt of 35 to 36 tokens and 1,024 new ones, with a key/value cache.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Throughput:
    """Tokens a second: of the prompt, of generation, and of both together."""

    prompt: float
    generation: float
    total: float


MACHINE = (
    "NVIDIA RTX 4090 24 GB, Intel i9-13900KF, 64 GB, Ubuntu 22.04, PyTorch 2.2.2 eager, bfloat16"
)
APPLE_MACHINE = "Apple M2 Max, 64 GiB, macOS 14.4.1, MLX 0.10.0"

TABLE_7A = {
    "opt_350m": Throughput(6524.17, 214.11, 220.21),
    "270m": Throughput(6427.27, 159.67, 165.85),
    "450m": Throughput(5211.35, 128.46, 133.42),
    "mobillama_0_8b": Throughput(4151.75, 126.01, 130.08),
    "pythia_1_4b": Throughput(4501.85, 139.65, 143.83),
    "mobillama_1_26b": Throughput(4938.29, 142.96, 147.67),
    "olmo_1_18b": Throughput(7151.65, 203.40, 209.26),
    "1_1b": Throughput(3681.73, 92.15, 95.72),
    "3b": Throughput(2712.56, 70.11, 72.82),
}
"""On MACHINE, by the names of models here."""

TABLE_7B = {
    "270m": Throughput(1151.41, 212.40, 218.45),
    "450m": Throughput(910.61, 147.26, 151.57),
    "1_1b": Throughput(508.56, 78.72, 81.04),
    "3b": Throughput(234.96, 33.96, 34.97),
}
"""On APPLE_MACHINE, the rows that are not bfloat16."""

TABLE_8 = {
    ("olmo_1_18b", "layer_norm"): Throughput(7151.65, 203.40, 209.26),
    ("1_1b", "layer_norm"): Throughput(4697.50, 130.34, 135.38),
    ("1_1b", "rms_norm_naive"): Throughput(3681.73, 92.15, 95.72),
    ("1_1b", "rms_norm_fused"): Throughput(4280.66, 113.42, 117.81),
}
"""On MACHINE, by model and normalization; fused is NVIDIA's Apex."""

"""What the paper measured, to print beside what is measured here (arXiv 2404.14619).

Tokens a second of generation, batch 1, a prompt of 35 to 36 tokens and 1,024 new ones, with a
key/value cache.
"""

from __future__ import annotations

MACHINE = (
    "NVIDIA RTX 4090 24 GB, Intel i9-13900KF, 64 GB, Ubuntu 22.04, PyTorch 2.2.2 eager, bfloat16"
)

TABLE_7 = {"270m": 159.67, "450m": 128.46, "1_1b": 92.15, "3b": 70.11, "olmo_1_18b": 203.0}
"""On MACHINE, by the names of models here."""

TABLE_8 = {
    ("olmo_1_18b", "layer_norm"): 203.0,
    ("1_1b", "layer_norm"): 130.34,
    ("1_1b", "rms_norm_naive"): 92.15,
    ("1_1b", "rms_norm_fused"): 113.42,
}
"""On MACHINE, by model and normalization; fused is NVIDIA's Apex."""

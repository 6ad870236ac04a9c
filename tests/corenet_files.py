"""What CoreNet writes, for tests: its training checkpoints, and the order of its parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def corenet_names(num_layers: int) -> list[str]:
    """Return the parameters of a tied model in the order of CoreNet's `named_parameters`."""
    layer = [
        "attn.qkv_proj", "attn.q_norm", "attn.k_norm", "attn.out_proj",
        "ffn.proj_1", "ffn.proj_2", "ffn_norm", "attn_norm",
    ]  # fmt: skip
    layers = [f"layers.{i}.{name}.weight" for i in range(num_layers) for name in layer]
    return ["token_embeddings.weight", *layers, "norm.weight"]


def save_training_checkpoint(
    path: Path, weights: Mapping[str, Any], optimizer: dict[str, Any], iterations: int
) -> None:
    """Write a training checkpoint with CoreNet's keys."""
    import torch

    checkpoint = {
        "iterations": iterations,
        "epoch": 0,
        "model_state_dict": dict(weights),
        "optim_state_dict": optimizer,
        "best_metric": math.inf,
        "is_interval_ckpt": True,
        "gradient_scaler_state_dict": {},
    }
    torch.save(checkpoint, path)


def named_by_fsdp(optimizer: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return AdamW's state dict as PyTorch's FSDP gathers it: names instead of numbers.

    `names` are the parameters in the order of the numbers.
    """
    return {
        "state": {names[number]: state for number, state in optimizer["state"].items()},
        "param_groups": [
            group | {"params": [names[number] for number in group["params"]]}
            for group in optimizer["param_groups"]
        ],
    }

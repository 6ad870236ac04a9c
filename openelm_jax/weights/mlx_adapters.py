"""Adapters as mlx-lm reads them: adapters.safetensors and adapter_config.json.

mlx-lm has one rank and one scale for all matrices. Here smaller ranks are filled up with zeros, and
other scales go into B: what is added is the same.

Legend: I inputs, O outputs, R rank.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.weights.adapters import StoredAdapters, adaptable, changes_embedding
from openelm_jax.weights.json_files import write_json
from openelm_jax.weights.names import at

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"


def write_mlx_adapters(directory: Path, config: ModelConfig, given: StoredAdapters) -> None:
    """Write adapters for mlx-lm's `--adapter-path` and `fuse`, into a directory that is there.

    Raises UserError for what mlx-lm would compute otherwise, or refuse: adapters of a tied
    embedding, which it applies to the logits too, and parameters that were trained whole.
    """
    from safetensors.numpy import save_file

    if config.tie_embeddings and changes_embedding(given):
        raise UserError(
            f"{given.source} adapts the embedding, for the lookup alone; mlx-lm would apply that "
            "to the logits as well: export the merged model with --to mlx."
        )
    if given.replaced:
        raise UserError(
            f"{given.source} holds whole parameters (modules_to_save), which mlx-lm does not take "
            "beside adapters: export the merged model with --to mlx."
        )
    shapes = dict(given.adapters)
    modules = {
        module: weight
        for module, weight in adaptable(config).items()
        if "/".join(weight.path) in shapes
    }
    rank = max(shape.rank for shape in shapes.values())
    scales = {shape.scale for shape in shapes.values()}
    scale = scales.pop() if len(scales) == 1 else 1.0
    tensors: dict[str, np.ndarray] = {}
    for module, weight in modules.items():
        shape, parts = shapes["/".join(weight.path)], at(given.tree, weight.path)
        missing = rank - shape.rank
        up_RO = parts["up_RO"] if shape.scale == scale else parts["up_RO"] * (shape.scale / scale)
        tensors[f"{module}.lora_a"] = np.pad(parts["down_IR"], ((0, 0), (0, missing)))
        tensors[f"{module}.lora_b"] = np.pad(up_RO, ((0, missing), (0, 0)))
        if shape.dora:
            tensors[f"{module}.m"] = parts["magnitude_O"]
    first = next(iter(shapes.values()))
    fields = {
        "fine_tune_type": "dora" if first.dora else "lora",
        "num_layers": config.num_layers,
        "lora_parameters": {
            "rank": rank,
            "scale": scale,
            "dropout": first.dropout,
            "keys": list(modules),  # whole names: its own short ones are of all layers or the last
        },
    }
    write_json(directory / CONFIG, fields)
    save_file(tensors, directory / WEIGHTS, {"format": "mlx"})

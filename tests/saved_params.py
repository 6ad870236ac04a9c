"""All parameters of a saved step, whatever model they are of."""

from __future__ import annotations

import json
from pathlib import Path

from openelm_jax.weights.names import Params, put
from openelm_jax.weights.orbax import open_params


def saved_params(directory: Path) -> Params:
    """Return the parameters in the directory of a step or of weights, as they are stored."""
    read = open_params(directory)
    metadata = json.loads((directory / "params" / "_METADATA").read_text(encoding="utf-8"))
    params: Params = {}
    for leaf in metadata["tree_metadata"].values():
        path = tuple(key["key"] for key in leaf["key_metadata"])
        put(params, path, read(path))
    return params

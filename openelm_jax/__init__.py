"""OpenELM in JAX: layer-wise scaled language models, trained from raw text, exact to the bit.

Importing the package imports no jax: each name below is fetched when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openelm_jax.experiment_file import load_experiment
    from openelm_jax.generation.language_model import load
    from openelm_jax.model.scaling import layer_shapes, parameter_count

__all__ = ["layer_shapes", "load", "load_experiment", "parameter_count"]

_HOMES = {
    "load": "openelm_jax.generation.language_model",
    "load_experiment": "openelm_jax.experiment_file",
    "layer_shapes": "openelm_jax.model.scaling",
    "parameter_count": "openelm_jax.model.scaling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'openelm_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

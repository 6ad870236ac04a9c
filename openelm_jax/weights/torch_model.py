"""OpenELM in PyTorch, ours: the code beside exports, what our training is compared with.

torch and transformers are imported where the model is made, as every optional package is.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.weights.huggingface_config import fields_of_config
from openelm_jax.weights.json_files import read_json, write_json
from openelm_jax.weights.names import to_reference
from openelm_jax.weights.stored import StoredWeights

if TYPE_CHECKING:
    from openelm_jax.weights.remote_code.modeling_openelm import OpenELMForCausalLM

CODE = Path(__file__).parent / "remote_code"
FILES = ("configuration_openelm.py", "modeling_openelm.py")
AUTO_MAP = {
    "AutoConfig": "configuration_openelm.OpenELMConfig",
    "AutoModel": "modeling_openelm.OpenELMModel",
    "AutoModelForCausalLM": "modeling_openelm.OpenELMForCausalLM",
}


def torch_model(config: ModelConfig) -> OpenELMForCausalLM:
    """Return the model in float32, its weights not yet drawn: `load_params` gives it some.

    Raises UserError without the packages, and for a model with layer norms.
    """
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        raise UserError(
            "PyTorch's model needs torch and transformers 5: pip install 'openelm_jax[torch]'."
        ) from None
    refuse_what_it_does_not_compute(config)
    from openelm_jax.weights.remote_code.configuration_openelm import OpenELMConfig
    from openelm_jax.weights.remote_code.modeling_openelm import OpenELMForCausalLM

    fields: dict[str, Any] = fields_of_config(config, "float32")
    with no_init_weights():
        model = OpenELMForCausalLM(OpenELMConfig(**fields))
    if config.tie_embeddings:
        model.tie_weights()
    return model


def load_params(model: OpenELMForCausalLM, stored: StoredWeights) -> None:
    """Give a model of `torch_model(stored.config)` our parameters, one at a time."""
    import torch

    left = dict(model.named_parameters())
    with torch.no_grad():
        for name, array in to_reference(stored.config, stored.read):
            left.pop(name).copy_(torch.from_numpy(np.array(array, dtype=np.float32)))
    assert not left, f"not ours: {', '.join(left)}"


def write_code(directory: Path) -> None:
    """Copy the code beside a config.json, and name it there for transformers' Auto classes."""
    for file in FILES:
        shutil.copyfile(CODE / file, directory / file)
    path = directory / "config.json"
    write_json(path, read_json(path) | {"auto_map": AUTO_MAP})


def refuse_what_it_does_not_compute(config: ModelConfig) -> None:
    """Raise UserError for layer norms."""
    if config.normalization != "rms_norm":
        raise UserError(
            f"model.normalization is {config.normalization}: the PyTorch code computes rms_norm; "
            "leave --with-code out, or take a model that has it."
        )

"""CoreNet's `.pt` files: weights in and out, read as they lie on disk.

A file of weights is a state dict of PyTorch; a training checkpoint has one inside, beside the state
of its optimiser (`corenet_training.py`). Which model it is stands in the YAML of the run.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.tokenizer import TOKENIZER_FILE
from openelm_jax.weights.corenet_yaml import MODELS, config_beside, corenet_name, write_yaml
from openelm_jax.weights.names import from_reference, named_weights, to_reference
from openelm_jax.weights.safetensors_files import warn_of_overflow
from openelm_jax.weights.stored import StoredWeights

if TYPE_CHECKING:
    import torch

WEIGHTS, YAML = "model.pt", "model.yaml"


@contextmanager
def open_corenet(file: Path, exp: str | None = None) -> Iterator[StoredWeights]:
    """Give the model in a file of weights or in a training checkpoint, mapped into memory.

    The model is that of the .yaml of the same name or the only one beside the file, otherwise that
    of the experiment `exp`; the rows of the vocabulary are the file's, whatever those say. Raises
    UserError for a file that is damaged or would run code, and for tensors of another model.
    """
    tensors = state_dict(load_file(file), file)
    config = config_of(file, exp, tensors)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    del tensors

    def read(name: str) -> np.ndarray:
        # The file is mapped anew: a mapping that stays keeps in memory all that was ever read.
        return as_array(_weights_in(load_file(file))[name], name, str(file))

    yield StoredWeights(
        config=config,
        read=from_reference(config, shapes, read, str(file), "corenet"),
        source=str(file),
        file=file,
    )


def write_corenet(directory: Path, stored: StoredWeights, *, dtype: str | None = None) -> None:
    """Write model.pt, which CoreNet loads, model.yaml, whose block goes into its own YAML, and the
    tokenizer.

    The weights keep their type unless `dtype` names one; of one that float16 cannot hold a warning
    says so, and another of a model that CoreNet cannot build. PyTorch writes a state dict in one
    go, so the whole model is in memory, once. Raises UserError without torch and PyYAML.
    """
    torch = _torch()
    if corenet_name(stored.config) is None:
        print(
            f"warning: CoreNet cannot build this model: it has names for {', '.join(MODELS)}, and "
            f"{YAML} describes it for this program alone, which reads it back.",
            file=sys.stderr,
        )
    tensors = {}
    for name, array in to_reference(stored.config, stored.read, "corenet"):
        if dtype == "float16":
            warn_of_overflow(name, array)
        with np.errstate(over="ignore"):
            tensors[name] = _tensor(np.array(array, dtype=dtype or array.dtype, order="C"))
    write_yaml(directory / YAML, stored, _name(next(iter(tensors.values())).dtype))
    try:
        torch.save(tensors, directory / WEIGHTS)
    except RuntimeError as fault:  # of the archive inside, whose writer counts its bytes
        raise OSError(f"not all of {WEIGHTS} could be written, as on a full disk") from fault
    if stored.tokenizer is not None:
        (directory / TOKENIZER_FILE).write_bytes(stored.tokenizer.model_bytes)


def load_file(file: Path) -> dict[str, Any]:
    """Return what a file holds, its tensors mapped; only tensors and plain values are made.

    Raises UserError for a file that is damaged, or whose pickle wants anything else.
    """
    torch = _torch()
    try:
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as fault:  # the unpickler of a damaged file fails in any way
        wanted = re.search(r"GLOBAL (\S+)", str(fault))
        if wanted is not None:
            raise UserError(
                f"{file} is refused: it asks for {wanted[1]}, which is no tensor and may run any "
                "code; have it saved again as a state dict alone."
            ) from None
        raise UserError(
            f"{file} is damaged, cut short, or not of PyTorch 1.6 or later; fetch it again, or "
            "save it again with torch.save."
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"{file} holds a {type(content).__name__}; give a model's state dict.")
    return content


def state_dict(content: dict[str, Any], file: Path) -> dict[str, torch.Tensor]:
    """Return the weights among what a file holds, by CoreNet's names; UserError if none are."""
    tensors = _weights_in(content)
    require_tensors(tensors, str(file))
    return tensors


def require_tensors(tensors: Any, where: str) -> None:
    """Raise UserError unless these are tensors by their names, each with values of its own."""
    torch = _torch()
    faults = []
    if not isinstance(tensors, dict):
        faults, tensors = [f"it is a {type(tensors).__name__}"], {}
    for name, value in tensors.items():
        if not isinstance(name, str):
            faults.append(f"{name} is no name of a tensor")
        elif not isinstance(value, torch.Tensor):
            faults.append(f"{name} is no tensor")
        elif value.is_meta or value.layout != torch.strided:
            faults.append(f"{name} is sparse or without values")
    if faults:
        raise UserError(
            f"{where} is no model's state dict, for {faults[0]}; give CoreNet's checkpoint_*.pt or "
            "training_checkpoint_*.pt."
        )


def _weights_in(content: dict[str, Any]) -> Any:
    return content.get("model_state_dict", content)


def config_of(file: Path, exp: str | None, tensors: Mapping[str, torch.Tensor]) -> ModelConfig:
    """Return the model of a file, with as many rows of vocabulary as its embedding has."""
    config = config_beside(file, exp)
    names = {weight.path: weight.name for weight in named_weights(config, "corenet")}
    table = tensors.get(names["embedding",])
    if table is None or table.ndim == 0 or len(table) == 0:
        return config  # the tensors are refused by their shapes
    return dataclasses.replace(config, vocab_size=len(table))


def as_array(tensor: torch.Tensor, name: str, where: str) -> np.ndarray:
    """Return the same memory for NumPy, which torch gives no bfloat16."""
    torch = _torch()
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if tensor.dtype not in (torch.float32, torch.float16):
        raise UserError(
            f"{where}: {name} is stored as {_name(tensor.dtype)}; known are float32, bfloat16, "
            "float16."
        )
    return tensor.numpy()


def _tensor(array: np.ndarray) -> torch.Tensor:
    torch = _torch()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError:
        raise UserError(
            "CoreNet's .pt files need the package torch; pip install 'openelm_jax[torch]'."
        ) from None
    return torch

"""CoreNet's training checkpoints: AdamW's moments under our paths, and how far the run had come.

The state of a plain run numbers the parameters, in the order in which CoreNet handed them to the
optimiser; that of a run sharded by FSDP names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.weights.corenet import as_array, config_of, load_file, require_tensors, state_dict
from openelm_jax.weights.names import (
    Params,
    from_reference,
    named_weights,
    put,
    reference_shapes,
)

if TYPE_CHECKING:
    import torch

FIRST, SECOND = "exp_avg", "exp_avg_sq"
WEIGHTS_ALONE = "take the weights of the same step, checkpoint_*.pt, to start from them alone."
WHOLE_MODEL = "take the checkpoint of a run that trained the whole model."


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTraining:
    """A training checkpoint: float32 trees like our parameters, and how far the run had come."""

    params: Params
    first_moment: Params
    second_moment: Params
    step: int
    """The update that comes next, from which the learning rate follows."""
    updates: int
    """Those that AdamW has counted: fewer than `step` by one for each time CoreNet resumed."""


def is_training_checkpoint(file: Path) -> bool:
    """Whether a `.pt` file is a training checkpoint, rather than weights alone."""
    return {"model_state_dict", "optim_state_dict", "iterations"} <= load_file(file).keys()


def open_corenet_training(file: Path, exp: str | None = None) -> StoredTraining:
    """Return the parameters and moments of a training checkpoint, by our paths and in our shapes.

    What is float32 in the file, as all that CoreNet writes, is mapped and not copied. The model is
    found as `open_corenet` finds it. Raises UserError as that does, and for the state of another
    optimiser than AdamW.
    """
    checkpoint = load_file(file)
    tensors = state_dict(checkpoint, file)
    config = config_of(file, exp, tensors)
    states = _states(checkpoint["optim_state_dict"], config, str(file))
    counts = {_whole(state["step"], f"{file}: an optimiser's step") for state in states.values()}
    if len(counts) > 1:
        raise UserError(
            f"{file}: some parameters have had {min(counts):,} updates and others "
            f"{max(counts):,}; {WHOLE_MODEL}"
        )
    moments = [{name: state[kind] for name, state in states.items()} for kind in (FIRST, SECOND)]
    return StoredTraining(
        params=_tree(config, tensors, str(file)),
        first_moment=_tree(config, moments[0], f"{file}, {FIRST}"),
        second_moment=_tree(config, moments[1], f"{file}, {SECOND}"),
        step=_whole(checkpoint["iterations"], f"{file}: iterations"),
        updates=counts.pop(),
    )


def _whole(value: Any, where: str) -> int:
    """Return a number from 0 of a checkpoint, where it may be a tensor."""
    try:
        number = int(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = -1
    if number < 0:
        raise UserError(f"{where} is {str(value)[:40]!r}, not a number from 0; {WEIGHTS_ALONE}")
    return number


def _tree(config: ModelConfig, tensors: Mapping[str, torch.Tensor], where: str) -> Params:
    require_tensors(tensors, where)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    read = from_reference(
        config, shapes, lambda name: as_array(tensors[name], name, where), where, "corenet"
    )
    tree: Params = {}
    for weight in named_weights(config):
        put(tree, weight.path, np.asarray(read(weight.path), dtype=np.float32))
    return tree


def _states(optimizer: Any, config: ModelConfig, where: str) -> dict[str, dict[str, Any]]:
    """Return the state of each parameter by CoreNet's name for it."""
    groups, states = _groups_and_states(optimizer, where)
    if any(group.get("amsgrad") for group in groups):
        raise UserError(f"{where}: its AdamW ran with amsgrad, which ours has not; {WEIGHTS_ALONE}")
    keys = [key for group in groups for key in group["params"]]
    names = keys
    if not all(isinstance(key, str) for key in keys):
        names = _order(config, [len(group["params"]) for group in groups], where)
    by_name: dict[str, Any] = {name: states.get(key) for key, name in zip(keys, names, strict=True)}
    for name in reference_shapes(config, "corenet") | by_name:
        state = by_name.get(name)
        if not isinstance(state, dict) or not {FIRST, SECOND, "step"} <= state.keys():
            raise UserError(
                f"{where}: its optimiser has no moments of {name}, as AdamW would have; "
                f"{WEIGHTS_ALONE}"
            )
    return by_name


def _groups_and_states(optimizer: Any, where: str) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
    """Return the two parts of a PyTorch optimiser's state dict; UserError if it is none."""
    match optimizer:
        case {"param_groups": [*groups], "state": dict(states)} if all(
            isinstance(group, dict)
            and isinstance(group.get("params"), list)
            and all(isinstance(key, str | int) for key in group["params"])
            for group in groups
        ):
            return groups, states
    raise UserError(
        f"{where}: its optim_state_dict is no state of a PyTorch optimiser; {WEIGHTS_ALONE}"
    )


def _order(config: ModelConfig, sizes: list[int], where: str) -> list[str]:
    """Return CoreNet's names in the order in which it hands the parameters to the optimiser.

    With `no_decay_bn_filter_bias`, as in all of Apple's YAMLs, the matrices are one group and the
    vectors, which do not decay, a second; otherwise all are one. Each is in the model's own order.
    (`parameter_list` in CoreNet's modeling/misc/common.py.)
    """
    shapes = reference_shapes(config, "corenet")
    vectors = [name for name, shape in shapes.items() if len(shape) == 1]
    matrices = [name for name in shapes if name not in vectors]
    if sizes == [len(matrices), len(vectors)]:
        return matrices + vectors
    if sizes == [len(shapes)]:
        return list(shapes)
    raise UserError(
        f"{where}: its optimiser has {' and '.join(map(str, sizes))} parameters, and of this model "
        f"there are {len(matrices)} matrices and {len(vectors)} vectors; {WHOLE_MODEL}"
    )

"""Directories of peft's LoRA: adapter_config.json and adapter_model.safetensors, in and out.

Legend: I inputs, O outputs, R rank, V vocab, D model. peft's A is [R, I] and its B [O, R], of the
embedding too, whose inputs are the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.model.adapters import Adapters, AdapterShape
from openelm_jax.weights.adapters import (
    EMBEDDING,
    StoredAdapters,
    adaptable,
    matches,
    names_in_words,
    shaped,
)
from openelm_jax.weights.json_files import read_json, write_json
from openelm_jax.weights.names import NamedWeight, ParamPath, Params, at, named_weights, put
from openelm_jax.weights.safetensors_files import FileTensor, tensors_in

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
READABLE = ("F32", "BF16", "F16")

FIELDS: dict[str, tuple[Any, Any]] = {
    "r": (int, 8),
    "lora_alpha": ((int, float), 8),
    "lora_dropout": ((int, float), 0.0),
    "use_dora": (bool, False),
    "use_rslora": (bool, False),
    "rank_pattern": (dict, {}),
    "alpha_pattern": (dict, {}),
    "target_modules": ((str, list), []),
    "exclude_modules": ((str, list), []),
    "layers_to_transform": ((int, list), []),
    "layers_pattern": ((str, list), []),
    "modules_to_save": (list, []),
}
"""What is read of the configuration: types, and peft's values where it says nothing."""
IGNORED = {
    "peft_type", "bias", "init_lora_weights",  # looked at apart
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "megatron_core", "qalora_group_size", "runtime_config", "ensure_weight_tying",
}  # fmt: skip
"""Fields that say nothing more of what is computed; any other that is set is refused."""
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""How adapters may have begun: the other ways change the weights beside them as well."""

PARTS = {
    "linear": {"down_IR": "lora_A.weight", "up_RO": "lora_B.weight"},
    "embedding": {"down_IR": "lora_embedding_A", "up_RO": "lora_embedding_B"},
}
MAGNITUDE = "lora_magnitude_vector"


def read_peft(directory: Path, config: ModelConfig, pieces: int | None = None) -> StoredAdapters:
    """Return the adapters in a directory for a model of this configuration.

    `pieces` of the model's tokenizer let an embedding's adapters have more or fewer rows, if they
    are rows that no token has. Raises UserError for what peft's LoRA and DoRA are not, for fields
    that would change what is computed, and for adapters that were trained beside another model.
    """
    fields = _read_fields(directory)
    tensors = tensors_in(directory / WEIGHTS)
    modules = adaptable(config)
    found, replaced = _sorted_tensors(tensors, config, directory)
    _require_the_targets(fields, found, modules, directory)
    shape = AdapterShape(
        rank=fields["r"],
        alpha=fields["lora_alpha"],
        dropout=fields["lora_dropout"],
        rslora=fields["use_rslora"],
        dora=fields["use_dora"],
    )
    ranks, alphas = fields["rank_pattern"], fields["alpha_pattern"]
    adapters = shaped(config, [name for name in modules if name in found], shape, ranks, alphas)
    tree: Params = {}
    for path, of in adapters:
        module = _module_at(modules, path)
        weight = modules[module]
        for part, shape_here in _part_shapes(weight, of).items():
            key = _key(module, weight, part)
            if key not in tensors:
                raise UserError(f"{directory / WEIGHTS} has no {key}; take the complete files.")
            array = _read(tensors[key], directory).T
            if weight.path == EMBEDDING and part == "down_IR":
                array = _fitted(array, weight.shape[0], pieces)
            if array.shape != shape_here:
                raise _another_base(
                    directory,
                    f"{key} is {list(array.shape[::-1])}, and here it would be "
                    f"{list(shape_here[::-1])}",
                )
            put(tree, (*weight.path, part), np.ascontiguousarray(array))
    return StoredAdapters(
        adapters=adapters,
        tree=tree,
        source=str(directory),
        replaced=_read_replaced(replaced, config, directory),
    )


def write_peft(
    directory: Path,
    config: ModelConfig,
    adapters: Adapters,
    tree: Params,
    base: str | None = None,
) -> None:
    """Write adapters as peft itself would, into a directory that is there.

    `base` is where peft finds the model beside which they were trained, if it is said.
    """
    from safetensors.numpy import save_file

    modules = adaptable(config)
    shapes = {_module_at(modules, path): shape for path, shape in adapters}
    tensors = {
        _key(module, modules[module], part): np.ascontiguousarray(np.asarray(array, np.float32).T)
        for module in shapes
        for part, array in at(tree, modules[module].path).items()
    }
    write_json(directory / CONFIG, _fields(config, shapes, base))
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})


def _fields(
    config: ModelConfig, shapes: Mapping[str, AdapterShape], base: str | None
) -> dict[str, Any]:
    first = next(iter(shapes.values()))
    uniform = {(shape.dropout, shape.rslora, shape.dora) for shape in shapes.values()}
    assert len(uniform) == 1, "peft has one dropout, rsLoRA or not, DoRA or not, for all adapters"
    # The short names that peft's users write, where they are what was chosen.
    short = sorted({module.rpartition(".")[2] for module in shapes})
    whole = {module for module in adaptable(config) if matches(module, short)} == set(shapes)
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "lora_alpha": _number(first.alpha),
        "lora_dropout": first.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": first.rank,
        "rank_pattern": {
            module: shape.rank for module, shape in shapes.items() if shape.rank != first.rank
        },
        "alpha_pattern": {
            module: _number(shape.alpha)
            for module, shape in shapes.items()
            if shape.alpha != first.alpha
        },
        "target_modules": short if whole else sorted(shapes),
        "task_type": "CAUSAL_LM",
        "use_dora": first.dora,
        "use_rslora": first.rslora,
    }


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _read_fields(directory: Path) -> dict[str, Any]:
    """Return the fields of the configuration, each there; raises UserError for one to refuse."""
    where = directory / CONFIG
    if not where.is_file() or not (directory / WEIGHTS).is_file():
        raise _not_a_directory_of_peft(directory)
    fields = read_json(where)
    if "fine_tune_type" in fields:
        raise _not_a_directory_of_peft(directory)
    if (kind := fields.get("peft_type")) != "LORA":
        raise UserError(f"{where}: peft_type is {kind}: only LORA, with DoRA or without, is known.")
    if (bias := fields.get("bias", "none")) != "none":
        raise UserError(
            f"{where}: bias is {bias}: OpenELM has no biases to train, so it must be none."
        )
    if (start := fields.get("init_lora_weights", True)) not in PLAIN_STARTS:
        raise UserError(
            f"{where}: init_lora_weights is {start}, which changes the model's weights too: save "
            "it with peft's path_initial_model_for_weight_conversion, which makes LoRA of it."
        )
    for name in sorted(fields.keys() - FIELDS.keys() - IGNORED):
        if fields[name]:
            raise UserError(
                f"{where}: {name} is {fields[name]}, which is not computed here: train without it, "
                "or merge the adapters with peft."
            )
    return {name: _typed(fields, name, where) for name in FIELDS}


def _typed(fields: Mapping[str, Any], name: str, where: Path) -> Any:
    kind, default = FIELDS[name]
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{where}: {name} is {value!r}, which peft would not write; correct it.")
    return value


def _not_a_directory_of_peft(directory: Path) -> UserError:
    if not directory.is_dir():
        return UserError(f"--adapter {directory}: there is no such directory.")
    if (directory / "adapters.safetensors").is_file():
        return UserError(
            f"--adapter {directory} is of mlx-lm: merge it with mlx_lm.fuse, and give the model "
            "that it writes to --from."
        )
    if (directory / "adapter_model.bin").is_file():
        return UserError(
            f"--adapter {directory}: adapter_model.bin is a pickle, which is not read: save it "
            "again with peft's save_pretrained, as safetensors."
        )
    return UserError(
        f"--adapter {directory} holds no {CONFIG} and {WEIGHTS}: give a directory of peft's."
    )


def _sorted_tensors(
    tensors: Mapping[str, FileTensor], config: ModelConfig, directory: Path
) -> tuple[set[str], dict[str, FileTensor]]:
    """Return the modules that have adapters, and the tensors that replace parameters, by name."""
    modules = adaptable(config)
    whole = {weight.name for weight in named_weights(config)}
    found: set[str] = set()
    replaced: dict[str, FileTensor] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(PREFIX)
        module, lora, part = name.partition(".lora_")
        if lora and module in modules:
            known = {*PARTS[_kind(modules[module])].values(), MAGNITUDE, f"{MAGNITUDE}.weight"}
            if f"lora_{part}" not in known:
                raise UserError(
                    f"{directory / WEIGHTS}: {key} is no part of LoRA or DoRA; take peft's files."
                )
            found.add(module)
        elif (plain := name.replace(".base_layer.", ".")) in whole and not lora:
            replaced[plain] = tensor
        else:
            raise _another_base(
                directory, f"it holds {key}, and this model has {names_in_words(config)}"
            )
    return found, replaced


def _require_the_targets(
    fields: Mapping[str, Any],
    found: set[str],
    modules: Mapping[str, NamedWeight],
    directory: Path,
) -> None:
    """Raise UserError unless the tensors are those of the modules that the configuration names."""
    layers, patterns = fields["layers_to_transform"], fields["layers_pattern"]
    layers = None if layers == [] else [layers] if isinstance(layers, int) else layers
    if layers and patterns and "layers" not in ([patterns] if _is_text(patterns) else patterns):
        layers = []
    saved = fields["modules_to_save"]
    named = {
        module
        for module in modules
        if matches(module, fields["target_modules"], layers)
        and not (fields["exclude_modules"] and matches(module, fields["exclude_modules"]))
        and not any(re.search(rf"(^|\.){re.escape(name)}(\.|$)", module) for name in saved)
    }
    if differing := sorted(named ^ found):
        has, lacks = (CONFIG, WEIGHTS) if differing[0] in named else (WEIGHTS, CONFIG)
        raise _another_base(directory, f"{differing[0]} is in its {has} and not in its {lacks}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _another_base(directory: Path, fault: str) -> UserError:
    return UserError(
        f"--adapter {directory} was not trained beside this model: {fault}; give it with its own "
        "base in --from."
    )


def _module_at(modules: Mapping[str, NamedWeight], path: str) -> str:
    return next(name for name, weight in modules.items() if "/".join(weight.path) == path)


def _kind(weight: NamedWeight) -> str:
    return "embedding" if weight.path == EMBEDDING else "linear"


def _key(module: str, weight: NamedWeight, part: str) -> str:
    """Return peft's name of a part of a module's adapter."""
    return f"{PREFIX}{module}.{PARTS[_kind(weight)].get(part, MAGNITUDE)}"


def _part_shapes(weight: NamedWeight, shape: AdapterShape) -> dict[str, tuple[int, ...]]:
    inputs, outputs = weight.shape
    shapes: dict[str, tuple[int, ...]] = {
        "down_IR": (inputs, shape.rank),
        "up_RO": (shape.rank, outputs),
    }
    return shapes | ({"magnitude_O": (outputs,)} if shape.dora else {})


def _read(tensor: FileTensor, directory: Path) -> np.ndarray:
    if tensor.code not in READABLE:
        raise UserError(
            f"{directory / WEIGHTS}: {tensor.name} is stored as {tensor.code}; known are "
            f"{', '.join(READABLE)}."
        )
    return tensor.read().astype(np.float32)


def _fitted(down_VR: np.ndarray, rows: int, pieces: int | None) -> np.ndarray:
    """Return A with the rows of the model, if only rows that no token has come or go."""
    given = len(down_VR)
    if pieces is None or given == rows or min(given, rows) < pieces:
        return down_VR
    return np.pad(down_VR[:rows], ((0, max(rows - given, 0)), (0, 0)))


def _read_replaced(
    tensors: Mapping[str, FileTensor], config: ModelConfig, directory: Path
) -> dict[ParamPath, np.ndarray]:
    weights = {weight.name: weight for weight in named_weights(config)}
    replaced: dict[ParamPath, np.ndarray] = {}
    for name, tensor in tensors.items():
        weight = weights[name]
        if tensor.shape != weight.reference_shape:
            raise _another_base(
                directory,
                f"its {name} is {list(tensor.shape)}, and here it would be "
                f"{list(weight.reference_shape)}",
            )
        array = _read(tensor, directory)
        replaced[weight.path] = array.T if weight.transpose else array
    return replaced

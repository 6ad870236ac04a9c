"""Which model a file of CoreNet's holds: its names for models, and the YAML beside the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import load_experiment
from openelm_jax.model.scaling import differing_widths
from openelm_jax.weights.huggingface_config import config_from_fields, fields_of_config
from openelm_jax.weights.stored import StoredWeights

MODELS: dict[str, dict[str, Any]] = {
    "OpenELM-270M": {"num_layers": 16, "model_dim": 1280, "head_dim": 64},
    "OpenELM-450M": {"num_layers": 20, "model_dim": 1536, "head_dim": 64},
    "OpenELM-1_1B": {"num_layers": 28, "model_dim": 2048, "head_dim": 64},
    "OpenELM-3B": {"num_layers": 36, "model_dim": 3072, "head_dim": 128},
    "gpt-1_3B": {
        "num_layers": 24,
        "model_dim": 2048,
        "head_dim": 64,
        "qkv_multipliers": 1.0,
        "ffn_multipliers": 3.0,
    },
    "gpt-test": {
        "num_layers": 1,
        "model_dim": 128,
        "head_dim": 64,
        "num_gqa_groups": 1,
        "qkv_multipliers": (0.25, 0.5),
        "ffn_multipliers": (0.25, 0.75),
    },
}
"""The models that CoreNet builds, by its names for them. (`gpt_configs` in its general_gpt.py.)"""

OURS = "openelm_jax"
"""The block that holds a model for which CoreNet has no name."""


def corenet_name(config: ModelConfig) -> str | None:
    """Return CoreNet's name for a model, whatever its vocabulary and context; None without one."""
    for name, fields in MODELS.items():
        if not differing_widths(ModelConfig(**fields), config):
            return name
    return None


def config_beside(file: Path, exp: str | None) -> ModelConfig:
    """Return the model that the YAML beside a file says, or else that of the experiment `exp`.

    The YAML is the one of the file's name, or the only one there. Raises UserError if neither
    names a model.
    """
    beside = _yaml_beside(file)
    config = None if beside is None else _config_in(beside)
    if config is None and exp is not None:
        config = load_experiment(exp).model
    if config is None:
        lack = "there is no .yaml beside it" if beside is None else f"{beside.name} names none"
        raise UserError(
            f"{file} does not say which model it is, and {lack}: put the YAML of its run there as "
            f"{file.stem}.yaml, or name the experiment with --exp."
        )
    return config


def write_yaml(path: Path, stored: StoredWeights, dtype: str) -> None:
    """Write the block that CoreNet's own YAML needs, or one of ours where it cannot build it."""
    config, tokenizer = stored.config, stored.tokenizer
    name = corenet_name(config)
    blocks: dict[str, Any] = {OURS: fields_of_config(config, dtype)}  # type: ignore[arg-type]
    if name is not None:
        pad_id = None if tokenizer is None else tokenizer.vocab_size
        model = {
            "model_name": name,
            "vocab_size": config.vocab_size,
            "max_context_length": config.context_length,
            # Apple's converter to MLX fails without the field, even if it is null.
            "padding_index": pad_id if pad_id and pad_id < config.vocab_size else None,
        }
        blocks = {"model": {"language_modeling": {"name": "general_gpt", "general_gpt": model}}}
    path.write_text(_yaml().safe_dump(blocks, sort_keys=False), encoding="utf-8")


def _yaml_beside(file: Path) -> Path | None:
    own = file.with_suffix(".yaml")
    if own.is_file():
        return own
    others = list(file.parent.glob("*.yaml"))
    return others[0] if len(others) == 1 else None


def _config_in(path: Path) -> ModelConfig | None:
    """Return the model in a YAML of CoreNet's or of ours, None if there is none in it."""
    yaml = _yaml()
    try:
        blocks = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as fault:
        reason = " ".join(str(fault).split())
        raise UserError(f"{path} is no YAML ({reason}); take the original file.") from None
    if isinstance(ours := _inside(blocks, OURS), dict):
        return config_from_fields(ours, str(path))
    block = _inside(blocks, "model", "language_modeling", "general_gpt")
    if not isinstance(block, dict):
        return None
    name = block.get("model_name")
    if not isinstance(name, str) or name not in MODELS:
        raise UserError(
            f"{path}: model_name is {name!r}; known are {', '.join(MODELS)}: correct it, or take "
            "the file away and name the experiment with --exp."
        )
    sizes = {"vocab_size": "vocab_size", "context_length": "max_context_length"}
    given = {ours: block[theirs] for ours, theirs in sizes.items() if theirs in block}
    try:
        return ModelConfig(**MODELS[name], **given)
    except UserError as mistake:
        raise UserError(f"{path}: {mistake}") from None


def _inside(block: Any, *keys: str) -> Any:
    for key in keys:
        block = block.get(key) if isinstance(block, dict) else None
    return block


def _yaml() -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise UserError(
            "CoreNet's .yaml files need the package PyYAML; pip install 'openelm_jax[corenet]'."
        ) from None
    return yaml

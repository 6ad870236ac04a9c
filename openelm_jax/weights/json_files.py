"""The JSON files beside weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from openelm_jax.errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; raises UserError if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing; give the directory that holds it and the weights."
        ) from None
    except ValueError as fault:
        raise UserError(f"{path} is no JSON ({fault}); take the original file.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; take the original file.")
    return value


def write_json(path: Path, value: dict[str, Any], *, sort_keys: bool = True) -> None:
    """Write an object as other programs' files of this kind look."""
    text = json.dumps(value, indent=2, sort_keys=sort_keys, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")

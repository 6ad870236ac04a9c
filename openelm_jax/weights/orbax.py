"""Our own Orbax checkpoints: where steps lie, whether they are whole, and their parameters.

A run holds `checkpoints/000500/` with the items `params`, `optimizer` and `data`, and
`checksums.json`: the SHA-256 of every other file of the step. Orbax restores a file with a flipped
bit without a word (it keeps no checksums of its own), so whoever reads a step verifies it first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.path import atomicity

from openelm_jax.errors import UserError

CHECKPOINTS = "checkpoints"
CHECKSUMS = "checksums.json"
TEMPORARY = ".orbax-checkpoint-tmp"
STEP_DIGITS = 6

Params = dict[str, Any]


class ChecksummedPath(atomicity.AtomicRenameTemporaryPath):
    """The temporary directory of a step, which gets its checksums before it gets its name."""

    async def finalize(self) -> None:
        final = self.get_final()
        if TEMPORARY in final.parent.name:  # an item inside its step
            await super().finalize()
            return
        # Orbax adds files while it finalizes, so it renames to a second temporary name first; a
        # process that dies here leaves only what the next start clears away.
        self._final_path = final.parent / f"{final.name}{TEMPORARY}.finalized"
        await super().finalize()
        write_checksums(Path(self._final_path))
        self._final_path.rename(final)
        self._final_path = final


def step_directory(run_directory: str | Path, step: int) -> Path:
    """Return the directory of a step: `RUN/checkpoints/000500`."""
    return Path(run_directory) / CHECKPOINTS / f"{step:0{STEP_DIGITS}}"


def saved_steps(run_directory: str | Path) -> list[int]:
    """Return the finished steps of a run, first to last; unfinished ones have other names."""
    return sorted(
        int(path.name)
        for path in (Path(run_directory) / CHECKPOINTS).glob("[0-9]*")
        if path.name.isdigit() and path.is_dir()
    )


def latest_step(run_directory: str | Path) -> int | None:
    """Return the last finished step of a run, or None if it has none."""
    return next(reversed(saved_steps(run_directory)), None)


def load_params(directory: str | Path) -> Params:
    """Return the parameters of a step directory as nested dicts of NumPy arrays, verified.

    No device is needed, whatever devices saved them. Raises UserError naming the damaged file.
    """
    directory = Path(directory).absolute()
    damage = find_damage(directory, ["params"])
    if damage is not None:
        raise UserError(f"{directory}: {damage}; use another step of the run.")
    handler = ocp.PyTreeCheckpointHandler()
    try:
        tree = handler.metadata(directory / "params").tree
        as_numpy = _map_leaves(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return handler.restore(
            directory / "params", args=ocp.args.PyTreeRestore(restore_args=as_numpy)
        )
    finally:
        handler.close()


def load_data_position(directory: str | Path) -> dict[str, Any]:
    """Return the position of the data in a step directory as plain values, verified.

    Raises UserError naming the damaged file.
    """
    directory = Path(directory).absolute()
    damage = find_damage(directory, ["data"])
    if damage is not None:
        raise UserError(f"{directory}: {damage}; use another step of the run.")
    handler = ocp.JsonCheckpointHandler()
    try:
        return handler.restore(directory / "data")
    finally:
        handler.close()


def write_checksums(directory: Path) -> None:
    """Write the SHA-256 of every file below `directory` into its `checksums.json`."""
    files = {name: _sha256(directory / name) for name in _file_names(directory)}
    (directory / CHECKSUMS).write_text(_render(files), encoding="utf-8")


def find_damage(directory: Path, items: Iterable[str]) -> str | None:
    """Return what is wrong with the first damaged file of a step, or None if it is whole.

    Looks at the files of `items` and at those beside them; other items may have been deleted.
    """
    path = directory / CHECKSUMS
    try:
        text = path.read_text(encoding="utf-8")
        expected = json.loads(text)["files"]
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{CHECKSUMS} is unreadable ({error})"
    if not isinstance(expected, dict) or text != _render(expected):
        return f"{CHECKSUMS} is damaged"
    folders = set(items)
    found = set(_file_names(directory))
    for name in sorted(found | expected.keys()):
        folder, inside, _ = name.partition("/")
        if inside and folder not in folders:
            continue
        if name not in found:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is not one of its files"
        if _sha256(directory / name) != expected[name]:
            return f"{name} is damaged (its SHA-256 differs from the one in {CHECKSUMS})"
    return None


def _file_names(directory: Path) -> list[str]:
    return sorted(
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file() and path != directory / CHECKSUMS
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _render(files: dict[str, str]) -> str:
    """Return the text of `checksums.json`, which holds a checksum of itself."""
    own = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return json.dumps({"files": files, "sha256": own}, indent=1, sort_keys=True) + "\n"


def _map_leaves(function: Any, tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _map_leaves(function, value) for name, value in tree.items()}
    return function(tree)

"""Our own Orbax checkpoints: where steps lie, whether they are whole, and their parameters.

A run holds `checkpoints/000500/` with the items `params`, `optimizer` and `data`, and
`checksums.json`: the SHA-256 of every other file of the step. Orbax restores a file with a flipped
bit without a word (it keeps no checksums of its own), so whoever reads a step verifies it first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint.path import atomicity

from openelm_jax.errors import UserError
from openelm_jax.tokenizer import TOKENIZER_FILE
from openelm_jax.weights.huggingface_config import config_from_fields, fields_of_config
from openelm_jax.weights.json_files import read_json, write_json
from openelm_jax.weights.names import ParamPath
from openelm_jax.weights.run_record import read_run_record, write_run_record
from openelm_jax.weights.stored import StoredWeights, read_params

CHECKPOINTS = "checkpoints"
CHECKSUMS = "checksums.json"
TEMPORARY = ".orbax-checkpoint-tmp"
STEP_DIGITS = 6
CONFIG = "config.json"


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


def open_params(directory: str | Path, item: str = "params") -> Callable[[ParamPath], np.ndarray]:
    """Return what reads a parameter of a step directory by its path, as it is stored; verified.

    No device is needed, whatever devices saved them, and no more memory than the parameter takes.
    Raises UserError naming the damaged file.
    """
    directory = Path(directory).absolute()
    damage = find_damage(directory, [item])
    if damage is not None:
        raise UserError(f"{directory}: {damage}; use another step of the run.")
    metadata = json.loads((directory / item / "_METADATA").read_text(encoding="utf-8"))
    driver = "zarr3" if metadata["use_zarr3"] else "zarr"

    def read(path: ParamPath) -> np.ndarray:
        array = tensorstore.open(
            {
                "driver": driver,
                "kvstore": {
                    "driver": "ocdbt",
                    "base": f"file://{directory / item}/",
                    "path": f"{'.'.join(path)}/",
                },
            },
            open=True,
            read=True,
        ).result()
        return array.read().result()

    return read


def is_weights_directory(directory: Path) -> bool:
    """Whether `write_weights_directory` made it, or was about to."""
    return (directory / CONFIG).is_file() and (directory / "params").is_dir()


@contextmanager
def open_weights_directory(directory: Path) -> Iterator[StoredWeights]:
    """Give the model in a directory that `write_weights_directory` made."""
    config = config_from_fields(read_json(directory / CONFIG), str(directory / CONFIG))
    yield StoredWeights(
        config=config,
        read=open_params(directory),
        source=str(directory),
        record=read_run_record(directory),
    )


def write_weights_directory(directory: Path, stored: StoredWeights) -> None:
    """Write config.json, the item `params` in its stored type, the tokenizer, and checksums.

    The record of the run comes after them: it may be deleted, since it names the run's folders.
    Orbax holds back what it writes until all is there: twice the model's size of memory.
    """
    params = read_params(stored, dtype=None)
    dtype: Any = str(params["embedding"].dtype)
    write_json(directory / CONFIG, fields_of_config(stored.config, dtype))
    if stored.tokenizer is not None:
        (directory / TOKENIZER_FILE).write_bytes(stored.tokenizer.model_bytes)
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)  # which would hold a third
    try:
        handler.save(directory.absolute() / "params", args=ocp.args.PyTreeSave(params))
        handler.finalize(directory.absolute() / "params")
    except ValueError as fault:  # tensorstore's, for whatever the system refuses
        raise OSError(str(fault)) from fault
    finally:
        handler.close()
    write_checksums(directory)
    if stored.record is not None:
        write_run_record(directory, stored.record)


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
            if not inside:
                continue  # a card, notes
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

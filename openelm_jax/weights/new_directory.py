"""A directory that appears complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openelm_jax.errors import UserError


def require_new(directory: Path) -> None:
    """Raise UserError if `directory` is a file or holds anything."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file; name a new directory.")
    if directory.is_dir() and any(directory.iterdir()):
        raise UserError(f"{directory} is not empty; name a new directory, or empty it first.")


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Give a directory to write into that takes the name `directory` when the block ends well.

    After an exception nothing is left. Raises UserError as `require_new` does.
    """
    require_new(directory)
    partial = directory.parent / f".{directory.name}.partial-{os.getpid()}"
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise

"""A directory that appears complete or not at all."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openelm_jax.errors import UserError


def require_new(directory: Path) -> None:
    """Raise UserError unless `directory` is a free name or an empty directory of its own."""
    with _in_one_sentence(directory):
        if directory.is_symlink():
            raise UserError(f"{directory} is a link; name a new directory.")
        if directory.exists() and not directory.is_dir():
            raise UserError(f"{directory} is a file; name a new directory.")
        if directory.is_dir() and any(directory.iterdir()):
            raise UserError(f"{directory} is not empty; name a new directory, or empty it first.")
        if directory.resolve() == Path.cwd():
            raise UserError(f"{directory} is the working directory; name a new one in it.")


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Give a directory to write into that takes the name `directory` when the block ends well.

    After an exception, Ctrl-C or SIGTERM nothing is left, and what killed processes have left of
    the same directory is removed. Raises UserError as `require_new` does, and where the system
    does not let it be written.
    """
    require_new(directory)
    final = directory.resolve()
    partial = final.with_name(f".{final.name}.partial-{os.getpid()}")
    with _in_one_sentence(directory), _exit_at_sigterm():
        _clear_what_is_left_of(final)
        partial.mkdir(parents=True)
        try:
            yield partial
            partial.rename(final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextmanager
def _in_one_sentence(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        raise UserError(
            f"{directory} was not written ({fault}); make it possible, or name another directory."
        ) from fault


@contextmanager
def _exit_at_sigterm() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _clear_what_is_left_of(final: Path) -> None:
    for left in final.parent.glob(f".{glob.escape(final.name)}.partial-*"):
        process = left.name.rpartition("-")[2]
        if process.isdecimal() and not _is_another_that_runs(int(process)):
            shutil.rmtree(left)


def _is_another_that_runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return process != os.getpid()

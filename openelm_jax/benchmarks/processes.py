"""The sides of a comparison: each a process of its own that answers questions, one at a time.

Spawned, not forked: nothing of the other side is in it. They are asked by turns and never at the
same time, since each computes with every core.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from openelm_jax.errors import UserError

Ask = Callable[[Any], Any]
"""Put a question to a side and wait for its answer."""

ON_THE_CPU = {"JAX_PLATFORMS": "cpu"}


@contextmanager
def process(
    serve: Callable[..., None],
    *arguments: Any,
    benchmark: str,
    cure: str,
    environment: Mapping[str, str] = ON_THE_CPU,
) -> Iterator[Ask]:
    """Give what asks a process that runs `serve(connection, *arguments)`.

    `environment` is that process's before anything is imported there, jax too. A process that
    ends before it answers is a UserError of `benchmark`, with `cure` for what to do.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    started = context.Process(target=serve, args=(there, *arguments), daemon=True)
    with _environment(environment):
        started.start()
    there.close()

    def ask(question: Any) -> Any:
        try:
            here.send(question)
            return here.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            started.join()
            raise UserError(
                f"{benchmark}: one side ended with code {started.exitcode} (see above); {cure}."
            ) from None

    try:
        yield ask
    finally:
        here.close()
        started.terminate()
        started.join()


def questions(connection: Connection) -> Iterator[Any]:
    """Yield what a side is asked, until nobody asks any more."""
    with connection, suppress(EOFError):
        while True:
            yield connection.recv()


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Let what is started inherit other variables: the module of `serve` may import jax at once."""
    before = dict(os.environ)
    os.environ |= changes
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before

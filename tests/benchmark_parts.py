"""Parts of a benchmark that end in different ways, for processes of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from openelm_jax.errors import UserError


def complete() -> Iterator[dict[str, Any]]:
    yield {"first": 1}
    yield {"second": 2}


def slow() -> Iterator[dict[str, Any]]:
    yield {"first": 1}
    time.sleep(600)


def dying() -> Iterator[dict[str, Any]]:
    yield {"first": 1}
    os._exit(9)


def refusing() -> Iterator[dict[str, Any]]:
    yield {"first": 1}
    raise UserError("this cannot be.")


def failing() -> Iterator[dict[str, Any]]:
    yield {"first": 1}
    raise KeyError("device")

"""How many bytes a second this machine's memory gives: the bound of generating token by token."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from openelm_jax.benchmarks.processes import questions
from openelm_jax.benchmarks.report import num_cores

READ_BYTES = 2**30
"""Read at a time: more than any processor's caches hold."""
READS = 5


def serve_bandwidth(connection: Connection, num_bytes: int = READ_BYTES) -> None:
    """Answer any question with what a `reader` of so many bytes finds."""
    read = reader(num_bytes)
    for _ in questions(connection):
        connection.send(read())


def reader(num_bytes: int) -> Callable[[], tuple[str, float]]:
    """Return what reads so many bytes: the platform of jax's first device, and bytes a second."""
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        array = np.ones(num_bytes // 4, np.float32)
        return lambda: ("cpu", host_bandwidth(array))
    return lambda: (device.platform, device_bandwidth(num_bytes))


def host_bandwidth(array: np.ndarray) -> float:
    """Return bytes a second, best of several reads of `array` by a thread a core.

    Two ways to read, since which is faster depends on the processor: its largest number, and its
    product with itself.
    """
    parts = np.array_split(array, num_cores())
    with ThreadPoolExecutor(len(parts)) as threads:

        def seconds(read: Callable[[np.ndarray], Any]) -> float:
            begin = time.perf_counter()
            list(threads.map(read, parts))
            return time.perf_counter() - begin

        ways: tuple[Callable[[np.ndarray], Any], ...] = (np.max, lambda part: np.dot(part, part))
        return array.nbytes / min(seconds(way) for way in ways for _ in range(READS))


def device_bandwidth(num_bytes: int) -> float:
    """Return bytes a second of summing numbers on jax's first device, best of several."""
    import jax
    import jax.numpy as jnp

    array = jnp.ones(num_bytes // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    total(array).block_until_ready()
    fastest = float("inf")
    for _ in range(READS):
        begin = time.perf_counter()
        # Several in a row, so that starting them does not count.
        jax.block_until_ready([total(array) for _ in range(8)])
        fastest = min(fastest, (time.perf_counter() - begin) / 8)
    return array.nbytes / fastest

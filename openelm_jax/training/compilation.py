"""Compiling a step once: ahead of time, timed, and kept on disk for the next start."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax

CACHE_HIT = "/jax/compilation_cache/cache_hits"


class Compiled(NamedTuple):
    """A compiled function, the seconds it took, and whether the disk had it: hit or miss."""

    function: Any
    seconds: float
    cache: str


def keep_compiled_code() -> None:
    """Turn on jax's persistent compilation cache.

    It lies in JAX_COMPILATION_CACHE_DIR if that is set, else in ~/.cache/openelm_jax/xla.
    """
    if not jax.config.values["jax_compilation_cache_dir"]:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(cache, "openelm_jax", "xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def compile_step(function: Any, *arguments: Any) -> Compiled:
    """Compile a jitted `function` for arguments like these."""
    hits: list[str] = []

    def listen(event: str, **_: Any) -> None:
        if event == CACHE_HIT:
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    begin = time.perf_counter()
    try:
        compiled = function.lower(*arguments).compile()
    finally:
        jax.monitoring.unregister_event_listener(listen)
    return Compiled(compiled, time.perf_counter() - begin, "hit" if hits else "miss")

"""Compiling a step once: ahead of time, timed, and kept on disk for the next start."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax


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
    before = _cached_names()
    begin = time.perf_counter()
    compiled = function.lower(*arguments).compile()
    seconds = time.perf_counter() - begin
    return Compiled(compiled, seconds, "miss" if _cached_names() - before else "hit")


def _cached_names() -> set[str]:
    folder = jax.config.values["jax_compilation_cache_dir"]
    return set(os.listdir(folder)) if folder and os.path.isdir(folder) else set()

"""Compiling a step once: ahead of time, timed, and kept on disk for the next start."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

CACHE_HIT = "/jax/compilation_cache/cache_hits"


class Compiled(NamedTuple):
    """A compiled function, the seconds it took, and whether the disk had it: hit or miss."""

    function: Any
    seconds: float
    cache: str

    @property
    def bytes_held(self) -> int:
        """What a device holds at most while it runs, arguments included, as XLA counts it."""
        analysis = self.function.memory_analysis()
        return (
            analysis.argument_size_in_bytes
            + analysis.output_size_in_bytes
            - analysis.alias_size_in_bytes
            + analysis.temp_size_in_bytes
        )


def keep_compiled_code() -> None:
    """Turn on jax's persistent compilation cache.

    It lies in JAX_COMPILATION_CACHE_DIR if that is set, else in ~/.cache/openelm_jax/xla. XLA's
    own caches, of what it tried on a GPU, lie below it.
    """
    if not jax.config.values["jax_compilation_cache_dir"]:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(cache, "openelm_jax", "xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def compile_step(
    function: Any,
    *arguments: Any,
    options: Mapping[str, str] | None = None,
    what: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Compiled:
    """Compile a jitted `function` for arguments like these, with the compiler's `options`.

    Given `what` is compiled ("36 layers for 8 devices"), a line is said before and one after it.
    """
    hits: list[str] = []

    def listen(event: str, **_: Any) -> None:
        if event == CACHE_HIT:
            hits.append(event)

    if what:
        say(f"compiling {what} ...")
    jax.monitoring.register_event_listener(listen)
    begin = time.perf_counter()
    try:
        compiled = function.lower(*arguments).compile(
            compiler_options=dict(options) if options else None
        )
    finally:
        jax.monitoring.unregister_event_listener(listen)
    done = Compiled(compiled, time.perf_counter() - begin, "hit" if hits else "miss")
    if what:
        say(f"compiled {what} in {done.seconds:.1f} s (cache {done.cache})")
    return done

"""What the time of a run is spent on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Loss = Literal["start", "compile", "data", "save", "hooks"]
"""Time without steps: before the first (reading the tokenizer, restoring), compiling, waiting for
batches while the device stands still, saving, and validation, samples and profiles."""


class Clock:
    """Seconds since the run began, by what they were spent on; what is not lost went into steps."""

    def __init__(self, began: float | None = None) -> None:
        """Begin now, or at an earlier time of `time.perf_counter`."""
        self._began = time.perf_counter() if began is None else began
        self._lost: dict[str, float] = dict.fromkeys(get_args(Loss), 0.0)

    def now(self) -> float:
        """Return seconds, whose differences count."""
        return time.perf_counter()

    def lose(self, to: Loss, seconds: float) -> None:
        """Count seconds in which no step was done."""
        self._lost[to] += seconds

    @contextmanager
    def losing(self, to: Loss) -> Iterator[None]:
        """Count the time of a block."""
        begin = self.now()
        try:
            yield
        finally:
            self.lose(to, self.now() - begin)

    def steps_begin(self) -> None:
        """Count what has passed and is not counted yet as the start."""
        self.lose("start", self.now() - self._began - sum(self._lost.values()))

    def figures(self) -> dict[str, float]:
        """Return `time/...` in seconds and `goodput`, the share of time spent on steps."""
        elapsed = self.now() - self._began
        lost = {f"time/{to}": seconds for to, seconds in self._lost.items()}
        goodput = (elapsed - sum(self._lost.values())) / elapsed if elapsed > 0 else 0.0
        return {"time/elapsed": elapsed, **lost, "goodput": goodput}

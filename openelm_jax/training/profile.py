"""A profile of some steps: where the time of a step goes, on host and device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import jax

from openelm_jax.config import first_and_last


class Profile:
    """Records the steps FIRST:LAST of `training.profile_steps` under RUN/profile.

    Of a run that goes on between them, what is left of them. Of several processes the first one
    records itself; the others wait for the same steps, for the loop's waiting may hold collectives.
    """

    def __init__(self, steps: str | None, run: str | Path, say: Callable[[str], None]) -> None:
        """Record nothing where `steps` is None."""
        self._first, self._last = (0, -1) if steps is None else first_and_last(steps)
        self._directory = Path(run) / "profile"
        self._say = say
        self._started_at: int | None = None
        self._done = False

    def starts(self, step: int) -> bool:
        """Return whether recording has to start before `step`."""
        within = self._first <= step <= self._last
        return within and self._started_at is None and not self._done

    def ends(self, step: int) -> bool:
        """Return whether recording has to stop after `step`."""
        return self._started_at is not None and step >= self._last

    def start(self, step: int) -> None:
        """Start recording; `step` is the first of the record."""
        if jax.process_index() == 0:
            jax.profiler.start_trace(str(self._directory))
        self._started_at = step

    def stop(self, step: int) -> None:
        """Write what was recorded up to the end of `step`, if anything is being recorded."""
        if self._started_at is None:
            return
        if jax.process_index() == 0:
            jax.profiler.stop_trace()
        self._say(
            f"profile of steps {self._started_at:,} to {step:,}: {self._directory}; open its "
            "*.trace.json.gz at https://ui.perfetto.dev, or all of it with "
            f"`pip install xprof` and `xprof --logdir {self._directory}`"
        )
        self._started_at, self._done = None, True

    def annotated(self, step: int) -> AbstractContextManager:
        """Return the context in which to dispatch `step`, so that the record shows its number."""
        if self._started_at is None:
            return nullcontext()
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

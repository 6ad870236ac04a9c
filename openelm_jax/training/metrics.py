"""Where a run's figures go: `metrics.jsonl`, TensorBoard, and a progress bar."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openelm_jax.errors import UserError


class MetricWriter:
    """Writes figures to `metrics.jsonl`, a line a call, and to `tensorboard/` if it is installed.

    `notes` says in one line each what is left out. Raises UserError where nothing can be written.
    """

    def __init__(self, directory: str | Path, resume_step: int) -> None:
        """Continue after `resume_step`; what was written about later steps is dropped."""
        self.path = Path(directory) / "metrics.jsonl"
        self.notes: tuple[str, ...] = ()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _drop_later_lines(self.path, resume_step)
            self._file = self.path.open("a", encoding="utf-8")
            self._events = _open_events(self.path.parent / "tensorboard", resume_step)
        except OSError as error:
            raise self._cannot_write(error) from error
        if self._events is None:
            self.notes = ("TensorBoard files are not written: pip install tensorboard for them.",)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record `metrics` of `step`; what is not finite becomes null in the file, to stay JSON."""
        plain = {name: _plain(value) for name, value in metrics.items()}
        try:
            self._file.write(json.dumps({"step": step, **plain}, allow_nan=False) + "\n")
            self._file.flush()
            if self._events is not None:
                self._events.add_event(_event(step, metrics))
                self._events.flush()
        except OSError as error:
            raise self._cannot_write(error) from error

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def _cannot_write(self, error: OSError) -> UserError:
        return UserError(
            f"{self.path.parent}: metrics cannot be written ({error.strerror}); free space there "
            "or make it writable, then start again."
        )


class ProgressBar:
    """A line on the terminal; `update` moves it."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show that `step` steps are done, with the last loss (nats a token) and the speed."""
        self._bar.update(
            self._task,
            completed=step,
            figures=f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s",
        )


@contextmanager
def progress(total: int, start: int) -> Iterator[ProgressBar]:
    """Show a progress bar from `start` to `total` steps on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        # Results stay on stdout when that is a file or a pipe.
        redirect_stdout=sys.stdout.isatty(),
    )
    with bar:
        yield ProgressBar(bar, bar.add_task("", total=total, completed=start, figures=""))


def speed_figures(
    tokens_per_second: float, flops_per_token: float, devices: int, peak_flops: float | None
) -> dict[str, float]:
    """Return the `speed/...` figures of a step on `devices`.

    `flops_per_token` are those of training (forward and backward, nothing computed again),
    `peak_flops` those a second of one device; without them there is no `speed/mfu`.
    """
    flops_per_device = tokens_per_second * flops_per_token / devices
    figures = {
        "speed/tokens_per_second": tokens_per_second,
        "speed/tokens_per_second_per_device": tokens_per_second / devices,
        "speed/tflops_per_device": flops_per_device / 1e12,
    }
    return figures if peak_flops is None else figures | {"speed/mfu": flops_per_device / peak_flops}


def is_logged(directory: str | Path, step: int, group: str) -> bool:
    """Return whether `directory` holds figures of `step` whose names begin with `group`."""
    try:
        lines = (Path(directory) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return any(
            figures["step"] == step and any(name.startswith(f"{group}/") for name in figures)
            for figures in map(json.loads, lines[-3:])
        )
    except (OSError, ValueError):
        return False  # there is none, or its last line is half written


def _drop_later_lines(path: Path, resume_step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if resume_step else []:
        try:
            step = json.loads(line)["step"]
        except ValueError:
            break  # the line that a killed process left half written, always the last
        if step <= resume_step:
            kept.append(line)
    rewritten = path.with_suffix(".tmp")
    rewritten.write_text("".join(kept), encoding="utf-8")
    os.replace(rewritten, path)


def _open_events(directory: Path, resume_step: int) -> Any:
    """Return TensorBoard's writer, or None where the package is not installed."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        return None
    events = EventFileWriter(str(directory))
    # TensorBoard hides what earlier files say about this step and later ones.
    start = SessionLog(status=SessionLog.START)
    events.add_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=start))
    return events


def _event(step: int, metrics: Mapping[str, float]) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
    return Event(wall_time=time.time(), step=step, summary=Summary(value=values))


def _plain(value: float) -> float | int | None:
    if isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None

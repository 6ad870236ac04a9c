"""What a benchmark found: figures beside their targets, and the machine that they are of."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured or counted value."""

    part: str
    name: str
    """Short, for programs."""
    value: float
    unit: str
    meaning: str
    least: float | None = None
    """Target: not below this."""
    most: float | None = None
    """Target: not above this."""
    low: float | None = None
    """Smallest of the repetitions of which `value` is the median."""
    high: float | None = None
    repetitions: int = 1

    @property
    def is_reached(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.least is None and self.most is None:
            return None
        return (self.least is None or self.value >= self.least) and (
            self.most is None or self.value <= self.most
        )


def median_figure(
    part: str,
    name: str,
    values: list[float],
    unit: str,
    meaning: str,
    *,
    least: float | None = None,
    most: float | None = None,
) -> Figure:
    """Return the median of repetitions, with their range."""
    return Figure(
        part=part,
        name=name,
        value=statistics.median(values),
        unit=unit,
        meaning=meaning,
        least=least,
        most=most,
        low=min(values),
        high=max(values),
        repetitions=len(values),
    )


def describe_machine(packages: Iterable[str]) -> dict[str, str]:
    """Return processor, cores, load, system, versions of Python and `packages`, and date."""
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
        "processor": _processor(),
        "cores": str(num_cores()),
        "load": ", ".join(f"{load:.1f}" for load in os.getloadavg()),
        "system": platform.platform(),
        "python": platform.python_version(),
    } | {name: version for name in packages if (version := _version(name))}


def commit() -> str | None:
    """Return which commit this code is of, marked where it was changed; None outside git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def format_figures(machine: dict[str, str], figures: list[Figure]) -> str:
    """Return the lines that people read."""
    return "\n".join([*format_machine(machine), *format_parts(figures)])


def format_machine(machine: dict[str, str]) -> list[str]:
    """Return a line for each thing that is known of the machine."""
    return [f"{name}: {value}" for name, value in machine.items()]


def format_parts(figures: list[Figure]) -> list[str]:
    """Return the figures below the names of their parts."""
    lines: list[str] = []
    part = None
    for figure in figures:
        if figure.part != part:
            lines += ["", figure.part]
            part = figure.part
        lines.append(f"  {_format_value(figure):>16}  {figure.meaning}{_format_target(figure)}")
    return lines


def format_table(heading: list[str], rows: list[list[str]], *, left: int = 1) -> list[str]:
    """Return lines with aligned columns: the first `left` ones on the left, the others right."""
    lines = [heading, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]

    def aligned(line: list[str]) -> str:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return [aligned(line) for line in lines]


def _format_value(figure: Figure) -> str:
    return f"{short(figure.value)} {figure.unit}".rstrip()


def _format_target(figure: Figure) -> str:
    notes = []
    if figure.low is not None and figure.high is not None:
        spread = f"{short(figure.low)} to {short(figure.high)}"
        notes.append(f"median of {figure.repetitions}: {spread}")
    for sign, bound in (("at least", figure.least), ("at most", figure.most)):
        if bound is not None:
            verdict = "reached" if figure.is_reached else "MISSED"
            notes.append(f"target {sign} {short(bound)}: {verdict}")
    return f" ({'; '.join(notes)})" if notes else ""


def short(value: float) -> str:
    """Return a number with the digits that people read."""
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def num_cores() -> int:
    """Return the processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

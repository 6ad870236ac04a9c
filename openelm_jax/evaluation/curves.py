"""What the saved steps of a run find on tasks, and their mean: the paper's Figure 1.

matplotlib is imported where it is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openelm_jax.errors import UserError
from openelm_jax.evaluation.suites import Results, Value
from openelm_jax.generation.language_model import LanguageModel, read_model
from openelm_jax.model.matrix import Bits
from openelm_jax.weights.averaging import average
from openelm_jax.weights.load import open_weights
from openelm_jax.weights.orbax import saved_steps

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from matplotlib.axes import Axes

    from openelm_jax.config import DType

FILES = ("curves.json", "curves.png", "curves.svg")
MOST_COLUMNS = 4
LINE, MARK = "#1f5fa8", "#c8501e"


@dataclass(frozen=True)
class Point:
    """What was found at a saved step, or for the mean of several."""

    steps: tuple[int, ...]
    results: Results

    @property
    def step(self) -> int:
        return self.steps[-1]

    @property
    def is_mean(self) -> bool:
        return len(self.steps) > 1


def points_of(run: Path, average_last: int | None = None) -> list[tuple[int, ...]]:
    """Return the saved steps of a run one by one, and then the last `average_last` together.

    Raises UserError where there are too few.
    """
    saved = saved_steps(run)
    if not saved:
        raise UserError(f"--run {run} holds no finished checkpoint: give a run directory of train.")
    points: list[tuple[int, ...]] = [(step,) for step in saved]
    if average_last is None:
        return points
    trained = [step for step in saved if step > 0]
    if len(trained) < average_last:
        raise UserError(
            f"--average-last {average_last}: {run} has {len(trained)} saved steps; give fewer, or "
            "train with checkpoint.keep_every set."
        )
    return [*points, tuple(trained[-average_last:])]


def models_of(
    run: Path,
    points: Sequence[tuple[int, ...]],
    dtype: DType | None = None,
    quantize: Bits | None = None,
    mesh: Mesh | None = None,
) -> Iterator[LanguageModel]:
    """Yield the model of each point of a run, one at a time."""
    for steps in points:
        with ExitStack() as opened:
            stored = [opened.enter_context(open_weights(f"{run}@{step}")) for step in steps]
            one = stored[0] if len(stored) == 1 else average(stored)
            model = read_model(one, dtype, quantize, mesh)
        yield model


def evaluate_points(
    points: Sequence[tuple[int, ...]],
    models: Iterator[LanguageModel],
    find: Callable[[LanguageModel], Results],
    say: Callable[[str], None],
) -> list[Point]:
    """Return what `find` finds for each model, saying each when it is found."""
    found = []
    for steps, model in zip(points, models, strict=True):
        point = Point(steps, find(model))
        figures = [(value.label, value.shown) for value in point.results.values]
        figures += point.results.averages.items()
        listed = ", ".join(f"{name} {figure:.2f}" for name, figure in figures)
        say(f"{_name(point)}: {listed}")
        found.append(point)
    return found


def curves_json(run: Path, suite: str | None, points: Sequence[Point]) -> dict[str, Any]:
    """Return the points for programs: metrics as the harness gives them, averages in percent."""
    return {
        "run": str(run),
        "suite": suite,
        "limit": points[0].results.limit,
        "points": [
            {
                "steps": list(point.steps),
                "tasks": {
                    value.task.name: {
                        "metric": value.metric,
                        "value": value.value,
                        "stderr": value.stderr,
                        "items": value.items,
                    }
                    for value in point.results.values
                },
                "averages": dict(point.results.averages),
            }
            for point in points
        ],
    }


def curves_table(points: Sequence[Point]) -> str:
    """Return the points as a Markdown table, a row each."""
    first = points[0].results
    head = ["steps", *(value.label for value in first.values), *first.averages]
    lines = [head, ["---:"] * len(head)]
    for point in points:
        figures = [value.shown for value in point.results.values]
        figures += point.results.averages.values()
        lines.append([_name(point), *(f"{figure:.2f}" for figure in figures)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def require_matplotlib() -> None:
    """Raise UserError without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("curves need matplotlib: pip install 'openelm_jax[eval]'.") from None


def write_curves(folder: Path, run: Path, suite: str | None, points: Sequence[Point]) -> list[Path]:
    """Write curves.json, curves.png and curves.svg into `folder`, and return where they are."""
    paths = [folder / name for name in FILES]
    from matplotlib import rc_context

    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(json.dumps(curves_json(run, suite, points), indent=2) + "\n")
        with rc_context({"svg.hashsalt": "curves", "font.size": 9}):
            figure = _figure(str(run), points)
            figure.savefig(paths[1], dpi=150)
            figure.savefig(paths[2], metadata={"Date": None})
    except OSError as fault:
        raise UserError(f"--out {folder} was not written ({fault}); name another folder.") from None
    return paths


def _figure(title: str, points: Sequence[Point]) -> Any:
    """Draw a panel for each task and each average: steps against what was found, ± its error."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    single = [point for point in points if not point.is_mean]
    mean = next((point for point in points if point.is_mean), None)
    first = points[0].results
    count = len(first.values) + len(first.averages)
    rows = math.ceil(count / MOST_COLUMNS)
    columns = math.ceil(count / rows)
    figure = Figure(figsize=(3.0 * columns, 2.4 * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for number, value in enumerate(first.values):
        axes = next(panels)
        _panel(
            axes,
            [(p.step, *_percent(p.results.values[number])) for p in single],
            None if mean is None else (mean.step, *_percent(mean.results.values[number])),
        )
        axes.set_title(f"{value.label} ({value.metric}{', %' if value.scale != 1 else ''})")
    for name in first.averages:
        axes = next(panels)
        _panel(
            axes,
            [(p.step, p.results.averages[name], None) for p in single],
            None if mean is None else (mean.step, mean.results.averages[name], None),
        )
        axes.set_title(f"{name} (%)")
    for axes in panels:
        axes.set_visible(False)
    figure.suptitle(title)
    if mean is not None:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        labels = [f"mean of the last {len(mean.steps)}" for _ in labels]
        figure.legend(handles, labels, loc="upper right", frameon=False)
    return figure


def _panel(
    axes: Axes,
    line: Sequence[tuple[int, float, float | None]],
    mark: tuple[int, float, float | None] | None,
) -> None:
    steps = [step for step, _, _ in line]
    figures = [figure for _, figure, _ in line]
    errors = [error or 0.0 for _, _, error in line]
    axes.plot(steps, figures, "o-", color=LINE, markersize=3.5, linewidth=1.4)
    if any(errors):
        low = [figure - error for figure, error in zip(figures, errors, strict=True)]
        high = [figure + error for figure, error in zip(figures, errors, strict=True)]
        axes.fill_between(steps, low, high, color=LINE, alpha=0.15, linewidth=0)
    if mark is not None:
        axes.plot(mark[0], mark[1], "*", color=MARK, markersize=12, label="mean", zorder=3)
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter(lambda step, _: f"{step / 1000:g}k" if step else "0")
    axes.locator_params(axis="x", nbins=5, integer=True)


def _percent(value: Value) -> tuple[float, float | None]:
    error = value.stderr
    usable = error is not None and math.isfinite(error)
    return value.shown, error * value.scale if usable and error else None


def _name(point: Point) -> str:
    if point.is_mean:
        return f"mean of {', '.join(f'{step:,}' for step in point.steps)}"
    return f"{point.step:,}"

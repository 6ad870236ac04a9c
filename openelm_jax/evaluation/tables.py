"""Results as Markdown and JSON, beside the paper's figures."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from openelm_jax.errors import UserError
from openelm_jax.evaluation.paper_results import PaperRow
from openelm_jax.evaluation.suites import TABLES, Results, Value, averages


def title(row: PaperRow) -> str:
    """Return what a row of the paper is called in tables and by `--beside`."""
    return row.model if row.kind in ("", "base") else f"{row.model} {row.kind}"


def choose_row(rows: Sequence[PaperRow], name: str) -> PaperRow:
    """Return the row that is called `name`, in any case; UserError lists them all."""
    for row in rows:
        if title(row).lower() == name.lower():
            return row
    known = ", ".join(map(title, rows)) or "none for this suite"
    raise UserError(f"--beside {name}: the paper has no such model; known are {known}.")


def markdown(model: str, suite: str | None, results: Results, row: PaperRow | None) -> str:
    """Return a table of tasks: our figures with standard errors, the paper's, the difference.

    Figures are percent where the metric is a fraction. The standard error of an average takes the
    tasks as independent.
    """
    head = ["task", "shots", "metric", "items", model]
    head += [] if row is None else [title(row), "difference"]
    lines = [head, ["---", *["---:" if name != "metric" else "---" for name in head[1:]]]]
    for value in results.values:
        shots = "" if value.task.shots is None else str(value.task.shots)
        cells = [value.label, shots, value.metric, f"{value.items:,}", _with_error(value)]
        lines.append(cells + _beside(value.shown, _figure(row, value.task.name)))
        if row is None:
            lines[-1] = cells
    theirs = {} if row is None else _averages(row, suite, _names(results))
    for name, average in results.averages.items():
        cells = [name, "", "", "", _number(average, _average_error(results, name))]
        lines.append(cells + ([] if row is None else _beside(average, theirs.get(name))))
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return "\n\n".join(
        filter(None, (table, "\n".join(f"- {note}" for note in _notes(results, row))))
    )


def all_rows(model: str, suite: str, results: Results, rows: Sequence[PaperRow]) -> str:
    """Return a table of models: ours first, then all of the paper's in this suite."""
    tasks = TABLES[suite]
    ours = {value.task.name: value.shown for value in results.values}
    names = list(results.averages)
    lines = [
        ["model", *(task.label for task in tasks), *names],
        ["---", *["---:"] * (len(tasks) + len(names))],
        [model, *(_cell(ours.get(task.name)) for task in tasks)]
        + [_cell(results.averages[name]) for name in names],
    ]
    for row in rows:
        theirs = _averages(row, suite, ours)
        figures = [_figure(row, task.name) for task in tasks]
        lines.append(
            [title(row), *map(_cell, figures), *(_cell(theirs.get(name)) for name in names)]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def to_json(
    model: str, suite: str | None, results: Results, row: PaperRow | None
) -> dict[str, Any]:
    """Return all that was found: metrics as the harness gives them, averages in percent."""
    found: dict[str, Any] = {
        "model": model,
        "suite": suite,
        "limit": results.limit,
        "tasks": {
            value.task.name: {
                "shots": value.task.shots,
                "metric": value.metric,
                "value": value.value,
                "stderr": value.stderr,
                "items": value.items,
                "version": value.version,
                "metrics": dict(value.metrics),
                "paper": _figure(row, value.task.name),
                "notes": list(value.notes),
            }
            for value in results.values
        },
        "averages": dict(results.averages),
    }
    if row is not None:
        found["paper"] = {
            "model": title(row),
            "source": row.source,
            "averages": _averages(row, suite, _names(results)),
        }
    return found


def _figure(row: PaperRow | None, task: str) -> float | None:
    return None if row is None else row.values.get(task)


def _names(results: Results) -> set[str]:
    return {value.task.name for value in results.values}


def _averages(row: PaperRow, suite: str | None, ours: Collection[str]) -> dict[str, float]:
    """Return the paper's averages over the tasks that we have, where it has figures of them all.

    Its own average is that of a whole suite.
    """
    tasks = TABLES.get(suite or "", ())
    some = [task for task in tasks if task.name in ours]
    known = {task: row.values[task.name] for task in some if task.name in row.values}
    found = averages(known) if some and len(known) == len(some) else {}
    return found if len(some) < len(tasks) else found | {"average": row.average}


def _with_error(value: Value) -> str:
    error = None if value.stderr is None else value.stderr * value.scale
    return _number(value.shown, error)


def _number(figure: float, error: float | None) -> str:
    usable = error is not None and math.isfinite(error)
    return f"{figure:.2f} ± {error:.2f}" if usable else f"{figure:.2f}"


def _cell(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.2f}"


def _beside(ours: float, theirs: float | None) -> list[str]:
    return ["", ""] if theirs is None else [f"{theirs:.2f}", f"{ours - theirs:+.2f}"]


def _average_error(results: Results, name: str) -> float | None:
    """Return the standard error of an average of independent figures, None where one is lacking."""
    values = [value for value in results.values if value.scale != 1]
    if "SciQ" in name:
        values = [value for value in values if value.task.name != "sciq"]
    errors = [value.stderr for value in values if value.stderr is not None]
    if len(errors) < len(values):
        return None
    return 100 * math.sqrt(math.fsum(error**2 for error in errors)) / len(errors)


def _notes(results: Results, row: PaperRow | None) -> list[str]:
    notes = []
    limit = results.limit
    if limit is not None and any(value.items >= limit for value in results.values):
        notes.append(f"Only {limit} items of each task: not to be compared with the paper.")
    if any(value.metric == "pct_stereotype" for value in results.values):
        notes.append("CrowS-Pairs: less is better, unlike the rest.")
    notes += [f"{value.label}: {note}." for value in results.values for note in value.notes]
    if row is not None:
        notes.append(f"{title(row)}: {row.source}.")
    return notes

"""Tasks in the middle of a training run (`training.evaluate_every`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from openelm_jax.config import TrainingConfig
from openelm_jax.evaluation.harness import harness_class, harness_model
from openelm_jax.evaluation.harness_tasks import OpenTask, open_tasks, quiet, run
from openelm_jax.evaluation.suites import parse_tasks
from openelm_jax.generation.language_model import LanguageModel


class _Stopped(Exception):
    pass


def open_chosen(training: TrainingConfig) -> tuple[OpenTask, ...]:
    """Return the tasks that a run evaluates, with their data; none if it evaluates never.

    Raises UserError without lm-eval, for unknown tasks and for missing data.
    """
    if not training.evaluate_every:
        return ()
    tasks = parse_tasks(",".join(training.evaluate_tasks), "training.evaluate_tasks")
    harness_class()
    quiet()
    data = training.evaluate_data
    return open_tasks(tasks, None if data is None else Path(data))


def evaluate_chosen(
    model: LanguageModel,
    tasks: Sequence[OpenTask],
    limit: int | None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Return `evaluation/TASK` as the harness gives it, and the average if there are several.

    None if told to stop before the last answer. All processes must call it.
    """

    def stop_if_told() -> None:
        if should_stop():
            raise _Stopped

    try:
        stop_if_told()
        lm = harness_model(model, between=stop_if_told, silent=True)
        results = run(lm, tasks, limit=limit)
    except _Stopped:
        return None
    figures = {f"evaluation/{value.task.name}": value.value for value in results.values}
    if (average := results.averages.get("average")) is not None:
        figures["evaluation/average"] = average / 100
    return figures

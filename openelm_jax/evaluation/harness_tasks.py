"""Tasks of lm-evaluation-harness: opened with their data, and asked of a model.

lm_eval and datasets are imported where they are used.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openelm_jax.errors import UserError
from openelm_jax.evaluation.answers import shared
from openelm_jax.evaluation.harness import harness_class
from openelm_jax.evaluation.local_data import find_set, splits_of
from openelm_jax.evaluation.suites import KNOWN, Results, Task, Value

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager

OWN_TASKS = Path(__file__).parent / "tasks"
"""Tasks in the harness' YAML that take the place of its own of the same name."""


@dataclass(frozen=True)
class OpenTask:
    """A task whose data is at hand: the harness' objects, and what is to be said of its data."""

    task: Task
    objects: tuple[Any, ...]
    notes: tuple[str, ...]


def open_tasks(tasks: Sequence[Task], data: Path | None = None) -> tuple[OpenTask, ...]:
    """Return tasks with their data, read from `data` if it is given, and otherwise from the Hub.

    Raises UserError for unknown tasks, for one that is named by itself and with a group, and for
    missing data: of local copies all that is missing at once.
    """
    harness_class()
    manager = _manager()
    _require_apart(manager, tasks)
    opened, missing = [], []
    for task in tasks:
        try:
            opened.append(_load(manager, task, data))
        except UserError as fault:
            if data is None:  # the Hub need not be asked in vain for all of them
                raise
            missing.append(str(fault).removesuffix("."))
    if missing:
        raise UserError(f"{'; '.join(missing)}.")
    return tuple(opened)


def _require_apart(manager: TaskManager, tasks: Sequence[Task]) -> None:
    """Raise UserError for an unknown task, and where two tasks have one in common."""
    owner: dict[str, str] = {}
    for task in tasks:
        if task.name not in manager.task_index:
            raise UserError(_unknown(manager, task.name))
        for leaf in _leaves(manager.task_index, task.name):
            if owner.setdefault(leaf, task.name) != task.name:
                raise UserError(
                    f"{leaf} is asked with {owner[leaf]} and with {task.name}, and would count "
                    "twice: leave one of them out."
                )


def run(
    lm: TemplateLM,
    tasks: Sequence[OpenTask],
    *,
    limit: int | None = None,
    cache: Path | None = None,
) -> Results:
    """Return what a model of the harness makes of `tasks`, the first `limit` items of each.

    What the model has answered is kept in `cache`, and not asked again. All processes must call
    it; all get the results.
    """
    from lm_eval import simple_evaluate

    values: list[Value] = []
    with shared(cache) as own_cache:
        for opened in tasks:
            found = simple_evaluate(
                lm,
                tasks=list(opened.objects),
                num_fewshot=opened.task.shots,
                limit=limit,
                task_manager=_manager(),
                log_samples=False,
                use_cache=None if own_cache is None else str(own_cache),
            )
            values += _values(opened.task, found, opened.notes)
    return Results(tuple(values), limit)


@functools.cache
def _manager() -> TaskManager:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(OWN_TASKS) if OWN_TASKS.is_dir() else None)


def _load(manager: TaskManager, task: Task, data: Path | None) -> OpenTask:
    with _reading(manager, task, data) as notes, _in_one_sentence(task):
        loaded = manager.load([task.name])
    if task.name in loaded["groups"]:
        return OpenTask(task, (loaded["groups"][task.name],), tuple(notes))
    return OpenTask(task, tuple(loaded["tasks"].values()), tuple(notes))


def _unknown(manager: TaskManager, name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, manager.all_tasks, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return (
        f"the harness has no task {name}; {hint}`python -m openelm_jax.evaluation.harness ls tasks`"
        " lists them."
    )


@contextmanager
def _reading(manager: TaskManager, task: Task, data: Path | None) -> Iterator[list[str]]:
    """Let a task, or the tasks of a group, read local copies while the block runs.

    Entries of the index are replaced: overrides of a group do not reach its tasks unharmed.
    """
    if data is None:
        yield []
        return
    from lm_eval.tasks._yaml_loader import load_yaml

    index, before = manager.task_index, {}
    notes: dict[str, None] = {}
    try:
        for name in _leaves(index, task.name):
            entry = index[name]
            config = load_yaml(entry.yaml_path, resolve_func=True) if entry.yaml_path else {}
            if not isinstance(config.get("dataset_path"), str):
                raise UserError(f"{name} does not say what data it reads: leave out --data.")
            changes, said = _local(name, config, task.shots, data)
            before[name] = entry
            index[name] = dataclasses.replace(entry, yaml_path=None, cfg={**config, **changes})
            notes |= dict.fromkeys(said)
        yield list(notes)
    finally:
        index.update(before)


def _local(
    name: str, config: Mapping[str, Any], shots: int | None, data: Path
) -> tuple[dict[str, Any], list[str]]:
    """Return what is to be changed in a task's configuration, and what is to be said of it."""
    dataset, part = config["dataset_path"], config.get("dataset_name")
    found = find_set(data, dataset, name)
    there = splits_of(found, part, name, dataset)
    scored = config.get("test_split") or config.get("validation_split")
    if scored not in there:
        raise UserError(
            f"{name} is scored on the split {scored} of {dataset}, and {found.source} has "
            f"{', '.join(sorted(there))}: add it."
        )
    kept = (config.get("dataset_kwargs") or {}) | {"cache_dir": str(found.cache)}
    changes: dict[str, Any] = {"dataset_path": str(found.folder), "dataset_kwargs": kept}
    splits = ("training_split", "validation_split", "fewshot_split")
    lacking = [key for key in splits if config.get(key) and config[key] not in there]
    changes |= dict.fromkeys(lacking)
    examples = config.get("fewshot_split") or config.get("training_split")
    number = config.get("num_fewshot") if shots is None or config.get("num_fewshot") == 0 else shots
    notes = [found.note] if found.note else []
    if number and examples is not None and examples not in there:
        notes.append(f"examples are from the scored split, since {examples} is not here")
    return changes, notes


def _leaves(index: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield the names of the tasks of a task, tag or group of the index."""
    from lm_eval.tasks._index import Kind
    from lm_eval.tasks._yaml_loader import load_yaml

    entry = index[name]
    if entry.kind is Kind.TAG:
        members: list[Any] = sorted(entry.tags)
    elif entry.kind is Kind.GROUP:
        members = list(load_yaml(entry.yaml_path, resolve_func=False)["task"])
    else:
        yield name
        return
    while members:
        member = members.pop(0)
        if isinstance(member, dict):
            inner = member.get("group")
            if isinstance(member.get("task"), list):
                members += member["task"]
                continue
            member = inner or member["task"]
        if member in index:
            yield from _leaves(index, member)


@contextmanager
def _in_one_sentence(task: Task) -> Iterator[None]:
    """Raise UserError where data cannot be had, instead of what the library says."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (OSError, DatasetsError, ValueError, KeyError) as fault:
        what = " ".join(str(fault).split())[:300] or type(fault).__name__
        raise UserError(
            f"the data of {task.name} could not be read ({what}): make the Hub reachable, or give "
            "local copies with --data DIR."
        ) from fault


def _values(task: Task, found: Mapping[str, Any], notes: Sequence[str]) -> Iterator[Value]:
    """Yield what the harness' results say of a task or group, or else of each of its tasks."""
    results = found["results"]
    names = [task.name] if task.name in results else list(results)
    for name in names:
        member = task if name == task.name else KNOWN.get(name, Task(name, label=name))
        figures = results[name]
        metrics = {
            key: float(value)
            for key, value in figures.items()
            if "," in key and isinstance(value, int | float)
        }
        counts = found["n-samples"]
        items = counts[name]["effective"] if name in counts else figures.get("sample_len", 0)
        key = next(
            (
                key
                for key in metrics
                if "_stderr," not in key and member.metric in (None, key.partition(",")[0])
            ),
            None,
        )
        if key is None:
            wanted = member.metric or "of its own"
            raise UserError(f"{name} has no metric {wanted}; it has {', '.join(metrics)}.")
        metric, _, how = key.partition(",")
        yield Value(
            task=dataclasses.replace(member, shots=task.shots),
            value=metrics[key],
            stderr=metrics.get(f"{metric}_stderr,{how}"),
            metric=metric,
            items=int(items),
            metrics=metrics,
            version=str(found["versions"].get(name, "")),
            notes=tuple(notes),
        )


def quiet() -> None:
    """Let the harness and its data library say only what is wrong."""
    import datasets
    from lm_eval import evaluator

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    evaluator.get_git_commit_hash = lambda: None  # git complains outside of repositories
    datasets.disable_progress_bars()

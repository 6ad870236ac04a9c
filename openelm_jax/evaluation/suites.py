"""The paper's suites of tasks (Tables 3 and 6), tasks by name, and what was found on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from openelm_jax.errors import UserError

PERCENT = ("acc", "acc_norm", "exact_match", "f1", "pct_stereotype")
"""Metrics that the harness gives as fractions and everybody else as percent."""


@dataclass(frozen=True)
class Task:
    """A task or group of the harness, how often it is shown how, and what is counted.

    `shots` None is the task's own number, `metric` None its first metric; `label` is the paper's
    name.
    """

    name: str
    shots: int | None = None
    metric: str | None = None
    label: str = ""

    def with_shots(self, shots: int) -> Task:
        """Return the task with so many examples before each question."""
        return Task(self.name, shots, self.metric, self.label)


ARC_C = Task("arc_challenge", 0, "acc_norm", "ARC-c")
ARC_E = Task("arc_easy", 0, "acc_norm", "ARC-e")
BOOLQ = Task("boolq", 0, "acc", "BoolQ")
CROWS_PAIRS = Task("crows_pairs_english", 0, "pct_stereotype", "CrowS-Pairs")
HELLASWAG = Task("hellaswag", 0, "acc_norm", "HellaSwag")
MMLU = Task("mmlu", 0, "acc", "MMLU")
PIQA = Task("piqa", 0, "acc_norm", "PIQA")
RACE = Task("race", 0, "acc", "RACE")
SCIQ = Task("sciq", 0, "acc", "SciQ")
TRUTHFULQA = Task("truthfulqa_mc2", 0, "acc", "TruthfulQA-mc2")
WINOGRANDE = Task("winogrande", 0, "acc", "WinoGrande")

KNOWN = {
    task.name: task
    for task in (
        *(ARC_C, ARC_E, BOOLQ, CROWS_PAIRS, HELLASWAG, MMLU),
        *(PIQA, RACE, SCIQ, TRUTHFULQA, WINOGRANDE),
    )
}

SUITES: dict[str, tuple[Task, ...]] = {
    "zero-shot": (ARC_C, ARC_E, BOOLQ, HELLASWAG, PIQA, SCIQ, WINOGRANDE),
    "openllm": (
        ARC_C.with_shots(25),
        HELLASWAG.with_shots(10),
        MMLU.with_shots(5),
        TRUTHFULQA,
        WINOGRANDE.with_shots(5),
    ),
    # Table 3 (c) does not name TruthfulQA; Tables 4 (c) and 5 (c) have it, and so their averages.
    "llm360": (
        ARC_C.with_shots(25),
        CROWS_PAIRS.with_shots(25),
        HELLASWAG.with_shots(10),
        MMLU.with_shots(5),
        PIQA,
        RACE,
        TRUTHFULQA,
        WINOGRANDE.with_shots(5),
    ),
}

COMMONSENSE = (
    Task("boolq", 0, "acc", "BoolQ"),
    Task("piqa", 0, "acc", "PIQA"),
    Task("social_i_qa", 0, "acc", "SIQA"),
    Task("hellaswag", 0, "acc", "HellaSwag"),
    Task("winogrande", 0, "acc", "WinoGrande"),
    Task("ARC-Easy", 0, "acc", "ARC-e"),
    Task("ARC-Challenge", 0, "acc", "ARC-c"),
    Task("openbookqa", 0, "acc", "OBQA"),
)
"""LLM-Adapters' sets (the paper's Table 6), which the harness does not have: `commonsense.py`."""

TABLES = SUITES | {"commonsense": COMMONSENSE}
"""What the paper has tables of."""


@dataclass(frozen=True)
class Value:
    """What was found on a task: its metric as the harness gives it, and all its metrics.

    `stderr` is None where the harness gives none; `items` is how many were scored.
    """

    task: Task
    value: float
    stderr: float | None
    metric: str
    items: int
    metrics: Mapping[str, float]
    version: str = ""
    notes: tuple[str, ...] = ()
    """How its data or examples differ from the paper's."""

    @property
    def scale(self) -> float:
        """What makes of it what tables show."""
        return 100.0 if self.metric in PERCENT else 1.0

    @property
    def shown(self) -> float:
        """The value as tables show it: percent, where it is a fraction."""
        return self.value * self.scale

    @property
    def label(self) -> str:
        """What tables call the task."""
        return self.task.label or self.task.name


@dataclass(frozen=True)
class Results:
    """What was found on all tasks, in their order, and of how many items at most."""

    values: tuple[Value, ...]
    limit: int | None = None
    averages: Mapping[str, float] = field(init=False)
    """In percent, over the tasks whose metrics are fractions: of all, and without SciQ."""

    def __post_init__(self) -> None:
        percent = {value.task: value.shown for value in self.values if value.scale != 1}
        object.__setattr__(self, "averages", averages(percent))


def averages(percent: Mapping[Task, float]) -> dict[str, float]:
    """Return the means that the paper's tables show of these tasks' figures."""
    found = {}
    without = [value for task, value in percent.items() if task.name != SCIQ.name]
    if len(percent) > 1:
        found["average"] = math.fsum(percent.values()) / len(percent)
    if 1 < len(without) < len(percent):
        found["average without SciQ"] = math.fsum(without) / len(without)
    return found


def parse_tasks(text: str, flag: str = "--tasks") -> tuple[Task, ...]:
    """Return the tasks of `a,b:5`: names of the harness, maybe with a number of shots.

    Raises UserError naming `flag` for what is no number, and for a task that is named twice.
    """
    tasks: list[Task] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, shots = part.partition(":")
        if shots and not shots.isdecimal():
            raise UserError(f"{flag} {part}: {shots} is no number of examples; write {name}:5.")
        task = KNOWN.get(name, Task(name, label=name))
        tasks.append(task.with_shots(int(shots)) if shots else task)
        if [other.name for other in tasks].count(name) > 1:
            raise UserError(f"{flag} names {name} twice: evaluate it twice.")
    if not tasks:
        raise UserError(f"{flag} names no task: write {flag} piqa,hellaswag:10.")
    return tuple(tasks)

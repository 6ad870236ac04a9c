"""The pages tell the truth: commands, fields, paths, links, metrics, tables, refusals."""

from __future__ import annotations

import ast
import contextlib
import importlib
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openelm_jax.command_line import VERBS, parse
from openelm_jax.config import Experiment
from openelm_jax.experiment_file import load_experiment
from openelm_jax.planning.layers import plan_experiment

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "openelm_jax"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SIZES = {"270M": "270m", "450M": "450m", "1.1B": "1_1b", "3B": "3b"}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
COMMAND = "python -m openelm_jax."
FILE = re.compile(r"(tokenizer|model)\.(model|json|safetensors)")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def inline_code() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for code in INLINE.findall(prose(page)):
            yield page, code


def blocks(language: str) -> Iterator[str]:
    for page in PAGES:
        for found, block in FENCE.findall(page.read_text(encoding="utf-8")):
            if found == language:
                yield block


def section(name: str, heading: str) -> str:
    return read(name).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def first_cells(table: str) -> list[str]:
    """Return the first cell of each row of the only table in a text, without its heading."""
    rows = [line for line in table.splitlines() if line.startswith("|")]
    return [row.split(" | ")[0].removeprefix("| ") for row in rows[2:]]


def commands() -> list[str]:
    lines = [line for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    parts += [code for _, code in inline_code()]
    return sorted({part for part in parts if part.startswith(COMMAND)})


@pytest.fixture
def folder_of_the_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be where a reader is who has saved the experiment files that the pages show."""
    for block in blocks("python"):
        if name := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / name[1]).write_text(block)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", commands())
def test_every_command_is_one_that_its_verb_accepts(
    command: str, folder_of_the_reader: Path
) -> None:
    verb, *arguments = shlex.split(command.removeprefix(COMMAND), comments=True)
    arguments = ["tiny" if argument == "NAME" else argument for argument in arguments]
    assert verb in VERBS
    module: Any = importlib.import_module(f"openelm_jax.{verb}")
    with contextlib.suppress(SystemExit) if "--help" in arguments else contextlib.nullcontext():
        if hasattr(module, "_parse"):
            module._parse(arguments)
        else:
            parse(verb, module.PURPOSE, module.EXAMPLES, module._add_flags, arguments)


def test_every_verb_is_in_the_readme() -> None:
    assert {f"{COMMAND}{verb}" for verb in VERBS} <= {
        " ".join(code.split()[:3]) for code in INLINE.findall(prose(ROOT / "README.md"))
    }


def test_the_readme_has_the_two_commands_that_install_and_go_on() -> None:
    """Continuous integration runs these lines of the README, whatever they say."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    assert [line for line in lines if line.startswith("pip install") and " && " in line] == [
        "pip install -e '.[demo]' && python -m openelm_jax.train --exp tiny",
        "pip install -e '.[test]' && pytest",
    ]


def test_every_field_that_is_named_exists() -> None:
    groups = [name for name in vars(load_experiment("tiny")) if name != "name"]
    for page, code in inline_code():
        if not re.fullmatch(rf"({'|'.join(groups)})(\.\w+)+", code) or FILE.fullmatch(code):
            continue
        value: Any = load_experiment("tiny")
        for name in code.split("."):
            assert hasattr(value, name), f"{page.name}: {code}"
            value = getattr(value, name)


def test_every_path_of_this_repository_exists() -> None:
    ours = re.compile(r"(openelm_jax|tests|docs|experiments|\.ci)/\S*|[\w./-]*\w\.(py|md|toml)")
    for page, code in inline_code():
        if ours.fullmatch(code):
            places = [ROOT / code, PACKAGE / code, page.parent / code]
            assert any(place.exists() for place in places), f"{page.name}: {code}"


def test_every_relative_link_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            there = page.parent / path if path else page
            assert there.exists(), f"{page.name}: {target}"
            headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert not anchor or anchor in slugs, f"{page.name}: {target}"


def test_the_floor_plan_is_the_package() -> None:
    plan = FENCE.findall(section("docs/architecture.md", "Floor plan"))[0][1]
    listed, folder = set(), ""
    for indent, name, phrase in re.findall(r"^( +)(\S+)(?: +(\S.*))?$", plan, re.MULTILINE):
        if name.endswith(".py"):
            assert phrase, f"{name} has no phrase"
            listed.add(name if len(indent) == 2 else folder + name)
        folder = name if len(indent) == 2 else folder
    there = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    assert listed == {name for name in there if not name.endswith("__init__.py")}


def test_metrics_have_the_names_that_train_gives_them() -> None:
    from openelm_jax.training.clock import Clock
    from openelm_jax.training.metrics import speed_figures

    written = {
        node.value
        for node in ast.walk(ast.parse(read("openelm_jax/train.py")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"(train|speed|time|validation)/\w+", node.value)
    }
    written |= speed_figures(1.0, 1.0, 1, 1.0).keys() | Clock().figures().keys()
    cells = first_cells(section("docs/training.md", "Metrics"))
    assert {cell.strip("`") for cell in cells} == written | {"data/SOURCE/…", "evaluation/TASK"}


def test_counters_have_the_names_that_the_data_gives_them() -> None:
    from openelm_jax.data.columns import Column
    from openelm_jax.data.position import Position, count

    table_NSC = np.zeros((1, 1, len(Column)), np.int64)
    counters = count(Position(step=0, fingerprint={}, lanes=range(1), table_NSC=table_NSC), 0)
    cells = first_cells(section("docs/data-reference.md", "Counters"))
    assert {name for cell in cells for name in INLINE.findall(cell)} == counters.keys()


@pytest.mark.parametrize(("size", "name"), SIZES.items())
def test_sizes_are_those_of_the_plan(size: str, name: str) -> None:
    experiment = load_experiment(name)
    model, plan = experiment.model, plan_experiment(experiment)
    totals = f"{plan.parameters_at_32000:,} | {plan.parameters:,}"
    assert f"| `{name}` | {model.num_layers} | {model.model_dim} | {totals} |" in read("README.md")
    assert (
        f"| {size} | {totals} | {plan.kv_cache_elements_per_token:,} | "
        f"{plan.training_flops_per_token:,} | {plan.total_training_flops:.3e} |"
    ) in read("docs/reproducing.md")


@pytest.mark.parametrize(
    ("label", "value"),
    [
        ("width (`model.model_dim`)", lambda e: e.model.model_dim),
        ("layers", lambda e: e.model.num_layers),
        ("head width", lambda e: e.model.head_dim),
        ("alpha, first to last layer", lambda e: "{} to {}".format(*e.model.qkv_multipliers)),
        ("beta, first to last layer", lambda e: "{} to {}".format(*e.model.ffn_multipliers)),
        ("query heads a key/value head", lambda e: e.model.num_gqa_groups),
        ("context", lambda e: e.model.context_length),
        ("sequences a step", lambda e: e.training.global_batch_size),
        ("tokens a step", lambda e: f"{e.training.global_batch_size * e.model.context_length:,}"),
        ("steps", lambda e: f"{e.training.steps:,}"),
        ("warm-up steps, from 1e-6", lambda e: e.optimizer.warmup_steps),
        ("peak learning rate", lambda e: e.optimizer.peak_lr),
        ("AdamW", lambda e: f"{e.optimizer.b1}, {e.optimizer.b2}, 1e-8"),
        ("weight decay", lambda e: e.optimizer.weight_decay),
        ("gradient norm at most", lambda e: e.optimizer.clip_norm),
        (
            "activations recomputed",
            lambda e: {"none": "no", "block": "each layer"}[e.training.remat],
        ),
    ],
)
def test_the_papers_table_9_is_that_of_the_experiments(label: str, value: Any) -> None:
    cells = [label, *(value(load_experiment(name)) for name in SIZES.values())]
    assert f"| {' | '.join(map(str, cells))} |" in read("docs/reproducing.md")


@pytest.mark.parametrize("name", ["tiny", "sotu"])
def test_the_demo_runs_are_those_of_the_experiments(name: str) -> None:
    experiment = load_experiment(name)
    model, plan = experiment.model, plan_experiment(experiment)
    assert (
        f"| `--exp {name}` | {plan.parameters:,} | {model.num_layers}, {model.model_dim} | "
        f"{model.context_length} | {plan.tokens_per_step:,} | {plan.steps:,} | "
        f"{plan.total_tokens:,} |"
    ) in read("docs/reproducing.md")


def test_an_experiment_of_the_pages_is_an_experiment(folder_of_the_reader: Path) -> None:
    files = sorted(folder_of_the_reader.glob("*.py"))
    assert len(files) >= 2
    assert all(isinstance(load_experiment(str(file)), Experiment) for file in files)


OF_FINETUNING = (
    "chat.py",
    "conversations.py",
    "instructions.py",
    "objects.py",
    "preferences.py",
)
"""Modules of `data` whose refusals name a file and a record, and are told where they arise."""


def sentences(call: str | None = None) -> Iterator[str]:
    """Yield the texts in the files that look at data, with … for what is filled in; if `call` is
    given, those that it is called with."""
    others = ("tokenizer.py", "training/feed.py", "training/run_directory.py")
    of_pretraining = [
        path for path in sorted((PACKAGE / "data").glob("*.py")) if path.name not in OF_FINETUNING
    ]
    files = [*of_pretraining, *(PACKAGE / name for name in others)]
    for path in files if call else [*files, PACKAGE / "train.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if call:
                if not (isinstance(node, ast.Call) and ast.unparse(node.func) == call):
                    continue
                node = node.args[0]
            if isinstance(node, ast.Constant):
                yield str(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (
                    part.value if isinstance(part, ast.Constant) else "…" for part in node.values
                )
                yield "".join(map(str, parts))


def test_every_refusal_of_the_data_is_listed_and_no_other() -> None:
    table = section("docs/data-reference.md", "Refusals")
    listed = [cell.strip("`") for cell in first_cells(table)]
    raised, written = list(sentences("UserError")), list(sentences())
    assert len(raised) > 25
    for message in raised:
        assert any(phrase in message for phrase in listed), message
    for phrase in listed:
        assert any(phrase in message for message in written), phrase


def test_plans_in_the_walk_through_scaling_are_what_plan_prints(capsys) -> None:
    """But for the layer table, which the page leaves out."""
    from openelm_jax import plan

    fences = FENCE.findall(read("docs/scaling.md"))
    commands = [
        (block.strip(), following)
        for (_, block), (_, following) in itertools.pairwise(fences)
        if block.startswith("python -m openelm_jax.plan")
    ]
    assert len(commands) == 5
    for command, shown in commands:
        plan.main(shlex.split(command)[3:])
        assert capsys.readouterr().out.strip().endswith(shown.strip()), command

"""A model's figures on tasks and texts: `python -m openelm_jax.evaluate --from WHERE`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from openelm_jax.command_line import command_parser, run
from openelm_jax.errors import UserError
from openelm_jax.xla_flags import set_flags

if TYPE_CHECKING:
    from openelm_jax.config import ModelConfig
    from openelm_jax.evaluation.harness_tasks import OpenTask
    from openelm_jax.evaluation.paper_results import PaperRow
    from openelm_jax.evaluation.suites import Results, Task
    from openelm_jax.generation.language_model import LanguageModel

SUITE_NAMES = ("zero-shot", "openllm", "llm360", "commonsense")
EXAMPLES = """
python -m openelm_jax.evaluate --from runs/tiny --suite zero-shot --limit 100
python -m openelm_jax.evaluate --from exports/270m --suite openllm --out results/270m
python -m openelm_jax.evaluate --from exports/3b --tasks piqa,hellaswag:10 --data DIR
python -m openelm_jax.evaluate --from exports/270m --adapter DIR --suite commonsense --data DIR
python -m openelm_jax.evaluate --from runs/tiny --text held_out.txt --stride 256
python -m openelm_jax.evaluate --run runs/tiny --all-checkpoints --average-last 5 --tasks piqa
"""
PUBLISHED = {
    (16, 1280): "OpenELM-270M",
    (20, 1536): "OpenELM-450M",
    (28, 2048): "OpenELM-1_1B",
    (36, 3072): "OpenELM-3B",
}
"""The paper's names of its models, by layers and width."""


def main(argv: list[str]) -> None:
    """Print a table of the tasks or texts, or JSON, and write both below --out."""
    arguments = _parse(argv)
    for line in set_flags(arguments.processes):
        _say(line)
    from openelm_jax.parallel.processes import ending_alone, join_processes

    join_processes(arguments.coordinator, arguments.processes, arguments.process, _say)
    with ending_alone():
        if arguments.out and _is_first():
            _require_folder(arguments.out)
        if arguments.text:
            _evaluate_texts(arguments)
        elif arguments.suite == "commonsense":
            _evaluate_commonsense(arguments)
        else:
            _evaluate_tasks(arguments)


def _evaluate_tasks(arguments: argparse.Namespace) -> None:
    from openelm_jax.evaluation.harness_tasks import open_tasks, quiet
    from openelm_jax.evaluation.paper_results import paper_rows
    from openelm_jax.evaluation.suites import SUITES, parse_tasks

    # --- What is asked, and its data, before anything takes time.
    suite = arguments.suite
    tasks = SUITES[suite] if suite else parse_tasks(arguments.tasks)
    rows = paper_rows(suite) if suite else []
    quiet()
    if arguments.run:
        _evaluate_run(arguments, tasks)
        return
    opened = open_tasks(tasks, arguments.data)

    # --- The model, and the paper's of the same shape.
    model = _load(arguments)
    row = _row(rows, arguments.beside, model.config)

    # --- Requests, answers, metrics.
    results = _results(arguments, model, opened)
    if not _is_first():
        return
    _show(arguments, results, row, rows)


def _evaluate_commonsense(arguments: argparse.Namespace) -> None:
    from openelm_jax.evaluation.commonsense import open_sets, run_commonsense
    from openelm_jax.evaluation.paper_results import paper_rows
    from openelm_jax.evaluation.suites import COMMONSENSE

    rows = paper_rows("commonsense")
    named = [name.strip() for name in (arguments.sets or "").split(",")]
    names = [name for name in named if name] or [task.name for task in COMMONSENSE]
    sets = open_sets(arguments.data, names)
    model = _load(arguments)
    row = _row(rows, arguments.beside, model.config)
    results = run_commonsense(
        model, sets, way=arguments.way, form=arguments.prompt_form, limit=arguments.limit
    )
    if _is_first():
        _show(arguments, results, row, rows)


def _show(
    arguments: argparse.Namespace,
    results: Results,
    row: PaperRow | None,
    rows: Sequence[PaperRow],
) -> None:
    from openelm_jax.evaluation.tables import all_rows, markdown, to_json

    suite = arguments.suite
    table = markdown(arguments.where, suite, results, row)
    found = to_json(arguments.where, suite, results, row)
    print(json.dumps(found) if arguments.json else table)
    if arguments.out:
        pages = [table, all_rows(arguments.where, suite, results, rows)] if rows else [table]
        _write(arguments.out, json.dumps(found, indent=2), "\n\n".join(pages))


def _evaluate_run(arguments: argparse.Namespace, tasks: Sequence[Task]) -> None:
    from openelm_jax.evaluation.curves import (
        curves_json,
        curves_table,
        evaluate_points,
        models_of,
        points_of,
        require_matplotlib,
        write_curves,
    )
    from openelm_jax.evaluation.harness_tasks import open_tasks
    from openelm_jax.generation.placement import decoding_mesh

    require_matplotlib()
    run_directory, suite = arguments.run, arguments.suite
    steps = points_of(run_directory, arguments.average_last)
    out = arguments.out or run_directory / "evaluation"
    if _is_first():
        _require_folder(out)
    opened = open_tasks(tasks, arguments.data)
    mesh = decoding_mesh(_replica(arguments), arguments.tensor)
    models = models_of(run_directory, steps, arguments.dtype, arguments.quantize, mesh)
    say = _say if _is_first() else lambda line: None
    points = evaluate_points(steps, models, lambda m: _results(arguments, m, opened), say)
    if not _is_first():
        return
    found = curves_json(run_directory, suite, points)
    print(json.dumps(found) if arguments.json else curves_table(points))
    written = write_curves(out, run_directory, suite, points)
    _say(f"wrote {', '.join(map(str, written))}")


def _results(
    arguments: argparse.Namespace, model: LanguageModel, opened: Sequence[OpenTask]
) -> Results:
    """Return what a model finds on tasks, asking nothing that it has answered before."""
    from openelm_jax.evaluation.answers import cache_file
    from openelm_jax.evaluation.harness import harness_model
    from openelm_jax.evaluation.harness_tasks import run as run_tasks
    from openelm_jax.evaluation.local_data import cache_folder

    lm = harness_model(model)
    cache = cache_file(cache_folder() / "answers", model, lm)
    cache.parent.mkdir(parents=True, exist_ok=True)
    return run_tasks(lm, opened, limit=arguments.limit, cache=cache)


def _replica(arguments: argparse.Namespace) -> int:
    import jax

    if arguments.replica is not None:
        return arguments.replica
    return max(1, jax.local_device_count() // max(1, arguments.tensor))


def _is_first() -> bool:
    import jax

    return jax.process_index() == 0


def _evaluate_texts(arguments: argparse.Namespace) -> None:
    from openelm_jax.evaluation.text import text_costs, text_json, text_table

    costs = text_costs(_load(arguments), arguments.text, arguments.stride)
    if not _is_first():
        return
    table = text_table(costs)
    found = text_json(arguments.where, arguments.stride, costs)
    print(json.dumps(found) if arguments.json else table)
    if arguments.out:
        _write(arguments.out, json.dumps(found, indent=2), table)


def _load(arguments: argparse.Namespace) -> LanguageModel:
    from openelm_jax.generation.language_model import load

    return load(
        arguments.where,
        arguments.tokenizer,
        dtype=arguments.dtype,
        exp=arguments.exp,
        quantize=arguments.quantize,
        replica=_replica(arguments),
        tensor=arguments.tensor,
        adapter=arguments.adapter,
    )


def _row(rows: Sequence[PaperRow], beside: str | None, config: ModelConfig) -> PaperRow | None:
    """Return the paper's row to compare with: the one asked for, or that of the same shape."""
    from openelm_jax.evaluation.tables import choose_row

    if beside is not None:
        return choose_row(rows, beside)
    name = PUBLISHED.get((config.num_layers, config.model_dim))
    kinds = ("base", "LoRA")
    return next((row for row in rows if row.model == name and row.kind in kinds), None)


def _require_folder(folder: Path) -> None:
    """Make the folder before anything takes time; UserError where it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UserError(f"--out {folder} cannot be made ({fault}); name another folder.") from None


def _write(folder: Path, found: str, pages: str) -> None:
    try:
        (folder / "results.json").write_text(found + "\n", encoding="utf-8")
        (folder / "results.md").write_text(pages + "\n", encoding="utf-8")
    except OSError as fault:
        raise UserError(f"--out {folder} was not written ({fault}); name another folder.") from None
    _say(f"wrote {folder / 'results.json'} and {folder / 'results.md'}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(
        "evaluate",
        "The paper's suites of tasks, or any task of lm-evaluation-harness, beside the paper's "
        "figures;\nor what texts cost. Tasks go on where an interrupted command stopped.",
        EXAMPLES,
        "(--from WHERE | --run DIR) (--suite SUITE | --tasks A,B | --text FILE) [--FLAG VALUE ...]",
    )
    flag = parser.add_argument
    whose = parser.add_mutually_exclusive_group(required=True)
    whose.add_argument("--from", dest="where", metavar="WHERE", help="whatever holds weights")
    whose.add_argument(
        "--run", type=Path, metavar="DIR", help="a run: with --all-checkpoints, its curves"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--suite", choices=SUITE_NAMES, help="the paper's Table 3 (a), (b) or (c), or Table 6"
    )
    what.add_argument(
        "--tasks", metavar="A,B:SHOTS", help="tasks of the harness, maybe with examples before each"
    )
    what.add_argument(
        "--text",
        action="append",
        type=Path,
        metavar="FILE",
        help="nats a token, perplexity and bits per byte of a text; again for several",
    )
    flag(
        "--stride",
        type=int,
        metavar="N",
        help="score N tokens of a text at a time after all that fit before them; else windows "
        "lie side by side",
    )
    flag(
        "--all-checkpoints",
        action="store_true",
        help="each saved step of --run: curves.json, .png and .svg in DIR/evaluation, or --out",
    )
    flag("--average-last", type=int, metavar="N", help="and the mean of the last N, marked")
    flag("--limit", type=int, metavar="N", help="only N items of each task")
    flag(
        "--data",
        type=Path,
        metavar="DIR",
        help="read local copies: the Hub's folders OWNER/NAME, or the origins' files",
    )
    flag("--sets", metavar="A,B", help="which sets of commonsense (all eight)")
    flag(
        "--by",
        dest="way",
        choices=("likelihood", "generation"),
        help="how commonsense is answered: the likeliest answer (as in the paper), or the first "
        "that is written",
    )
    flag(
        "--prompt-form",
        choices=("corenet", "llm-adapters"),
        help="how commonsense is asked (corenet by likelihood, llm-adapters by generation)",
    )
    flag("--beside", metavar="MODEL", help="which row of the paper to compare with (same shape)")
    flag("--out", type=Path, metavar="DIR", help="write results.json and results.md there")
    flag("--json", action="store_true", help="print JSON instead of the table")
    flag("--dtype", choices=("float32", "bfloat16"), help="float32 on a CPU, bfloat16 elsewhere")
    flag("--quantize", type=int, choices=(8, 4), help="bits of a weight: less memory to read")
    flag(
        "--mesh.replica",
        dest="replica",
        type=int,
        metavar="N",
        help="devices that divide the rows (all of this process)",
    )
    flag("--mesh.tensor", dest="tensor", type=int, default=1, metavar="N", help="divides matrices")
    flag("--tokenizer", metavar="FILE", help="SentencePiece file, if WHERE has none or another")
    flag("--adapter", metavar="DIR", help="merge the LoRA or DoRA that peft saved there, or hf://")
    flag("--exp", metavar="NAME", help="the experiment that a CoreNet .pt without .yaml is of")
    flag("--coordinator", metavar="HOST:PORT", help="where process 0 of several listens")
    flag("--processes", type=int, metavar="N", help="how many there are")
    flag("--process", type=int, metavar="I", help="which one this is")
    arguments = parser.parse_args(argv)
    if arguments.limit is not None and arguments.limit < 1:
        parser.error("--limit: give a number of items, 1 or more")
    if arguments.stride is not None and not arguments.text:
        parser.error("--stride moves over texts: give --text too")
    if arguments.text and (arguments.limit or arguments.data):
        parser.error("--limit and --data are for tasks: leave them out with --text")
    if arguments.run and not arguments.all_checkpoints:
        parser.error("--run needs --all-checkpoints; for its last step give --from RUN")
    if not arguments.run and (arguments.all_checkpoints or arguments.average_last is not None):
        parser.error("--all-checkpoints and --average-last are for runs: give --run RUN")
    if arguments.average_last is not None and arguments.average_last < 2:
        parser.error("--average-last: give a number of steps, 2 or more")
    for name in ("text", "beside", "tokenizer", "exp", "adapter"):
        if arguments.run and getattr(arguments, name):
            parser.error(f"--{name} is for weights: leave it out with --run")
    if arguments.suite == "commonsense":
        if not arguments.data:
            parser.error("--suite commonsense: give LLM-Adapters' folder dataset with --data DIR")
        if arguments.run:
            parser.error("--suite commonsense is for weights: give --from")
        arguments.way = arguments.way or "likelihood"
    elif arguments.sets or arguments.way or arguments.prompt_form:
        parser.error("--sets, --by and --prompt-form are for --suite commonsense")
    if arguments.beside and not arguments.suite:
        parser.error("--beside compares suites: give --suite too")
    return arguments


if __name__ == "__main__":
    run(main)

"""What would this run need? `python -m openelm_jax.plan --exp 3b --topology v5p:4x4x4`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from openelm_jax.command_line import parse, run
from openelm_jax.errors import UserError
from openelm_jax.planning.layers import format_plan, plan_experiment

PURPOSE = (
    "Layers, parameters, FLOPs and tokens of an experiment, from its shapes alone; and on a "
    "topology, without the hardware, what it needs of it and how long it takes."
)
EXAMPLES = """
python -m openelm_jax.plan --exp 3b
python -m openelm_jax.plan --exp 270m --model.num-layers 20 --json
python -m openelm_jax.plan --exp 3b --topology v5p:4x4x4 --training.accumulation 16
python -m openelm_jax.plan --exp 3b --topology h100:8x4 --search
python -m openelm_jax.plan --exp 1_1b --topology v5e:4x4 --slices 2 --training.accumulation 64
python -m openelm_jax.plan --exp 270m --topology v5e:2x4 --training.accumulation 64 --compile quick
"""


def main(argv: list[str]) -> None:
    """Print the plan of `--exp`, and of it on `--topology`, as text or as JSON."""
    arguments, experiment = parse("plan", PURPOSE, EXAMPLES, _add_flags, argv)
    plan = plan_experiment(experiment)
    if arguments.topology is None:
        for flag in ("compile", "search", "python"):
            if getattr(arguments, flag):
                raise UserError(f"--{flag} needs a machine: give --topology, v5p:4x4x4 say.")
        if arguments.slices != 1:
            raise UserError("--slices needs a machine: give --topology, v5e:4x4 say.")
        print(json.dumps(_plain(plan)) if arguments.json else format_plan(plan))
        return

    # From here on jax is imported, for the table of shardings.
    from openelm_jax.planning.compiled import compile_on
    from openelm_jax.planning.estimate import estimate, search
    from openelm_jax.planning.report import format_estimate, format_search
    from openelm_jax.planning.topologies import parse_topology

    if arguments.search and arguments.compile:
        raise UserError("--search and --compile are two questions: compile what the search finds.")
    if arguments.python and not arguments.compile:
        raise UserError("--python names who compiles: give --compile as well.")
    topology = parse_topology(arguments.topology, arguments.slices)
    if arguments.search:
        found = search(experiment, topology)
        if arguments.json:
            print(json.dumps([_plain(each) for each in found]))
        else:
            print(format_search(experiment, topology, found))
        return
    figures = estimate(experiment, topology)
    if arguments.compile:
        compiled = compile_on(
            topology, experiment, arguments.compile, arguments.python, arguments.json
        )
        fits = compiled.memory <= figures.usable_bytes
        figures = dataclasses.replace(figures, compiled=compiled, fits=fits)
    if arguments.json:
        print(json.dumps({**_plain(plan), "on_topology": _plain(figures)}))
    else:
        print(format_plan(plan), end="\n\n")
        print(format_estimate(experiment, figures))


def _plain(value: Any) -> dict[str, Any]:
    return dataclasses.asdict(value)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--topology",
        metavar="NAME",
        help="a slice of TPUs (v5p:4x4x4), a node of GPUs (h100:8) or nodes of them (h100:8x4)",
    )
    parser.add_argument("--slices", type=int, default=1, metavar="N", help="slices of TPUs")
    parser.add_argument(
        "--search",
        action="store_true",
        help="settings that fit and that none beats in both memory and time",
    )
    parser.add_argument(
        "--compile",
        nargs="?",
        choices=("full", "quick"),
        const="full",
        help="let XLA compile the step: minutes; quick spares its optimisations, seconds a layer",
    )
    parser.add_argument(
        "--python", metavar="FILE", help="interpreter with jax's TPU or CUDA part, for --compile"
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON: one object, or a list with --search"
    )


if __name__ == "__main__":
    run(main)

"""What would this run compute? `python -m openelm_jax.plan --exp 3b`, answered at once."""

from __future__ import annotations

import argparse
import dataclasses
import json

from openelm_jax.command_line import parse, run
from openelm_jax.planning.layers import format_plan, plan_experiment

PURPOSE = "Layers, parameters, FLOPs and tokens of an experiment, from its shapes alone."
EXAMPLES = """
python -m openelm_jax.plan --exp 3b
python -m openelm_jax.plan --exp 270m --model.num-layers 20 --json
"""


def main(argv: list[str]) -> None:
    """Print the plan of `--exp`, as text or as JSON."""
    arguments, experiment = parse("plan", PURPOSE, EXAMPLES, _add_flags, argv)
    plan = plan_experiment(experiment)
    print(json.dumps(dataclasses.asdict(plan)) if arguments.json else format_plan(plan))


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


if __name__ == "__main__":
    run(main)

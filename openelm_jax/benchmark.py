"""How fast, on your own text and machine? `python -m openelm_jax.benchmark data --exp NAME`."""

from __future__ import annotations

import argparse
import dataclasses
import json

from openelm_jax.command_line import command_parser, parse, run
from openelm_jax.config import Experiment

PURPOSE = (
    "The data pipeline on the text of an experiment: time in the tokenizer, workers,\n"
    "restoring, memory, mixture, each beside its target. Trains nothing, writes nothing."
)
EXAMPLES = """
python -m openelm_jax.benchmark data --exp tiny
python -m openelm_jax.benchmark data --exp 3b --data.root DIR --tokenizer FILE --json
"""
PARTS = ("encode", "workers", "restore", "memory", "mixture")


def main(argv: list[str]) -> None:
    """Print the figures of a subject, as text or as JSON."""
    arguments, experiment = _parse(argv)

    from openelm_jax.benchmarks.data import measure
    from openelm_jax.benchmarks.report import describe_machine, format_figures

    if arguments.tokenizer is not None:
        chosen = dataclasses.replace(experiment.tokenizer, path=arguments.tokenizer)
        experiment = dataclasses.replace(experiment, tokenizer=chosen)
    machine = describe_machine()
    figures = measure(
        experiment, arguments.part, seconds=arguments.seconds, long_steps=arguments.long_steps
    )
    if arguments.json:
        plain = [dataclasses.asdict(figure) for figure in figures]
        print(json.dumps({"machine": machine, "experiment": experiment.name, "figures": plain}))
    else:
        print(format_figures(machine, figures))


def _parse(argv: list[str]) -> tuple[argparse.Namespace, Experiment]:
    if argv[:1] == ["data"]:
        return parse("benchmark data", PURPOSE, EXAMPLES, _add_flags, argv[1:])
    parser = command_parser("benchmark", PURPOSE, EXAMPLES, "data --exp NAME [--FLAG VALUE ...]")
    parser.add_argument("subject", choices=("data",), help="what is measured")
    parser.parse_args(argv[:1])
    raise AssertionError("a subject that is known is taken above")


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer", metavar="FILE", help="SentencePiece model")
    parser.add_argument("--part", type=_parts, default=PARTS, metavar="A,B", help=",".join(PARTS))
    parser.add_argument(
        "--seconds", type=float, default=30, metavar="S", help="about so long a part (30)"
    )
    parser.add_argument(
        "--long-steps", type=int, default=10_000, metavar="N", help="a late restore (10000)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _parts(names: str) -> tuple[str, ...]:
    chosen = tuple(names.split(","))
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no part {unknown[0]}; known are {', '.join(PARTS)}")
    return chosen


if __name__ == "__main__":
    run(main)

"""The mean of checkpoints: `python -m openelm_jax.average --run R --last 5 --out DIR`."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from contextlib import ExitStack
from pathlib import Path

from openelm_jax.command_line import command_parser, run
from openelm_jax.errors import UserError

EXAMPLES = """
python -m openelm_jax.average --run runs/3b --last 5 --out runs/3b-average
python -m openelm_jax.average --run runs/3b --steps 340000,345000,350000 --out runs/3b-three
"""


def main(argv: list[str]) -> None:
    """Write the mean of the parameters of some steps into a directory that every `--from` takes."""
    arguments = _parse(argv)
    directory, out = Path(arguments.run), Path(arguments.out)

    from openelm_jax.training.run_summary import summarize_run
    from openelm_jax.weights.averaging import average
    from openelm_jax.weights.load import open_weights
    from openelm_jax.weights.model_card import write_model_card
    from openelm_jax.weights.new_directory import new_directory, require_new
    from openelm_jax.weights.orbax import saved_steps, write_weights_directory

    require_new(out)
    if not (directory / "experiment.json").is_file():
        raise UserError(
            f"--run {directory} is no run directory: there is no experiment.json in it."
        )
    saved = saved_steps(directory)
    steps = arguments.steps or _last(directory, arguments.last, saved)
    _require_saved(directory, steps, saved)
    with ExitStack() as opened:
        models = [opened.enter_context(open_weights(f"{directory}@{step}")) for step in steps]
        source = f"{directory}, the mean of steps {', '.join(map(str, steps))}"
        # What was measured at one of the steps does not hold for the mean.
        record = dataclasses.replace(
            summarize_run(directory, max(steps)), validation=None, averaged=tuple(steps)
        )
        mean = dataclasses.replace(average(models), source=source, record=record)
        with new_directory(out) as partial:
            write_weights_directory(partial, mean)
            write_model_card(partial, mean, target="orbax", written_as="as stored")
    print(f"{source}, written to {out}", file=sys.stderr)


def _last(directory: Path, count: int, saved: list[int]) -> list[int]:
    trained = [step for step in saved if step > 0]
    if len(trained) < count:
        raise UserError(
            f"{directory} has {len(trained)} saved steps ({_list(trained)}), not {count}: give a "
            "smaller --last, or train longer with checkpoint.keep_every set."
        )
    return trained[-count:]


def _require_saved(directory: Path, steps: list[int], saved: list[int]) -> None:
    unknown = [step for step in steps if step not in saved]
    if unknown:
        raise UserError(f"{directory} holds no step {_list(unknown)}; saved are {_list(saved)}.")


def _list(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def _steps(text: str) -> list[int]:
    """Return the numbers in `340000,345000`, each once, in their order."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text} is no list of steps, as 340000,345000 is")
    steps = sorted(map(int, text.split(",")))
    twice = sorted({step for step in steps if steps.count(step) > 1})
    if twice:
        raise argparse.ArgumentTypeError(f"step {_list(twice)} is given twice")
    if len(steps) < 2:
        raise argparse.ArgumentTypeError("a mean needs two steps or more, as 340000,345000")
    return steps


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no number of steps")
    count = int(text)
    if count < 2:
        raise argparse.ArgumentTypeError("a mean needs two steps or more")
    return count


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(
        "average",
        "The mean of the parameters of some checkpoints of a run, in float64, stored as they are.",
        EXAMPLES,
        "--run DIR (--last N | --steps A,B,...) --out DIR",
    )
    parser.add_argument("--run", metavar="DIR", required=True, help="a run directory")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--last", type=_count, metavar="N", help="the last N saved steps")
    which.add_argument("--steps", type=_steps, metavar="A,B,...", help="these saved steps")
    parser.add_argument("--out", metavar="DIR", required=True, help="a new directory")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run(main)

"""What the mixture of a run held, or will hold: `python -m openelm_jax.data_report --run RUN`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from openelm_jax.command_line import command_parser, parse, run
from openelm_jax.config import Experiment
from openelm_jax.errors import UserError

if TYPE_CHECKING:
    from openelm_jax.data.audit import Audit
    from openelm_jax.tokenizer import Tokenizer

PURPOSE = (
    "What each source of a mixture holds: read, dropped by each filter, kept, beside the paper's\n"
    "Table 2. Of a run exactly, from its checkpoint (--run); before a run from some documents of\n"
    "each source (--exp)."
)
EXAMPLES = """
python -m openelm_jax.data_report --run runs/tiny
python -m openelm_jax.data_report --exp tiny --sample 100
python -m openelm_jax.data_report --exp 3b --data.root DIR --tokenizer tokenizer.model --json
"""
SAMPLE = 1000
WIDTH = 100


def main(argv: list[str]) -> None:
    """Print the audit of `--run`, or of a sample of the data of `--exp`."""
    flags, experiment = _parse(argv)
    title, audit = _audit_run(flags.run) if experiment is None else _audit_sample(flags, experiment)

    from rich.console import Console

    from openelm_jax.data.audit import to_json
    from openelm_jax.data.audit_tables import print_audit

    if flags.json:
        print(json.dumps({"of": title} | to_json(audit)))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    with console.capture() as captured:
        print_audit(audit, console)
    print(title, "", *(line.rstrip() for line in captured.get().splitlines()), sep="\n")


def _audit_run(where: str) -> tuple[str, Audit]:
    from openelm_jax.data.audit import audit_position
    from openelm_jax.data.position import Position
    from openelm_jax.weights.load import choose_step, split_step
    from openelm_jax.weights.orbax import load_data_position, step_directory

    directory, step = split_step(where)
    if not (directory / "experiment.json").is_file():
        what = "it holds no run (no experiment.json)" if directory.is_dir() else "it is not there"
        raise UserError(
            f"--run {where}: {what}; give the directory of a training run, or RUN@STEP."
        )
    step = choose_step(directory, step)
    position = Position.from_json(load_data_position(step_directory(directory, step)))
    return f"{directory} at step {step:,}", audit_position(position)


def _audit_sample(flags: argparse.Namespace, experiment: Experiment) -> tuple[str, Audit]:
    from rich.console import Console

    from openelm_jax.data.sample import sample_mixture

    with (
        tempfile.TemporaryDirectory() as folder,
        Console(stderr=True).status("looking at the data") as status,
    ):
        tokenizer = _open_tokenizer(experiment, Path(folder))
        audit = sample_mixture(
            experiment.data,
            tokenizer,
            row_length=experiment.model.context_length + 1,
            global_batch_size=experiment.training.global_batch_size,
            steps=experiment.training.steps,
            num_records=flags.sample,
            starting=lambda source: status.update(f"reading {source}"),
        )
    title = f"experiment {experiment.name}: at most {flags.sample:,} documents of each source"
    return title, audit


def _open_tokenizer(experiment: Experiment, folder: Path) -> Tokenizer:
    from openelm_jax.data.pipeline import training_texts
    from openelm_jax.tokenizer import load_tokenizer, train_tokenizer

    path, pieces = experiment.tokenizer.path, experiment.tokenizer.vocab_size
    if path is not None:
        return load_tokenizer(path, experiment.model.vocab_size)
    if pieces is None:
        raise UserError(
            f"--exp {experiment.name} names no tokenizer: give a SentencePiece model with "
            "--tokenizer FILE."
        )
    print(
        f"tokenizer: {pieces:,} pieces, trained now on the training text as a run would do, "
        "and not kept",
        file=sys.stderr,
    )
    return train_tokenizer(training_texts(experiment.data), pieces, folder / "tokenizer.model")


def _parse(argv: list[str]) -> tuple[argparse.Namespace, Experiment | None]:
    """Return the flags, and the experiment of `--exp`; None with `--run`."""
    given = {argument.partition("=")[0] for argument in argv}
    if given & {"--exp", "--help", "-h"} and "--run" not in given:
        flags, experiment = parse("data_report", PURPOSE, EXAMPLES, _add_flags, argv)
        if flags.sample is None:
            flags.sample = SAMPLE
        if flags.tokenizer is not None:
            chosen = dataclasses.replace(experiment.tokenizer, path=flags.tokenizer)
            experiment = dataclasses.replace(experiment, tokenizer=chosen)
        return flags, experiment
    parser = command_parser("data_report", PURPOSE, EXAMPLES, "--run RUN | --exp NAME [...]")
    _add_flags(parser)
    if "--run" not in given:
        parser.error("give --run RUN, or --exp NAME for a sample of what it would read")
    if "--exp" in given:
        parser.error("give --run or --exp, not both: a run knows its experiment")
    flags = parser.parse_args(argv)
    if flags.sample is not None or flags.tokenizer is not None:
        parser.error("--sample and --tokenizer go with --exp: the figures of a run are in it")
    return flags, None


def _add_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--run", metavar="RUN", help="a run directory (its latest step), or RUN@STEP")
    flag(
        "--sample",
        type=_positive,
        metavar="N",
        help=f"with --exp: documents read of each source ({SAMPLE:,})",
    )
    flag("--tokenizer", metavar="FILE", help="with --exp: SentencePiece model")
    flag("--json", action="store_true", help="print one JSON object")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


if __name__ == "__main__":
    run(main)

"""What every verb's command line shares: flags, experiments, overrides, errors, exit codes.

Nothing here imports jax, and a verb imports it only after its arguments are parsed, so help and
mistakes answer at once. Exit codes: 0 done; 1 a user's mistake; 2 usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from openelm_jax.config import Experiment
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import experiment_names, load_experiment

VERBS = {
    "train": "pre-train, or continue where a run stopped",
    "generate": "text from a checkpoint",
    "sample_pairs": "preference pairs of a model's own answers, by rejection sampling",
    "evaluate": "the paper's suites, or any task of lm-evaluation-harness",
    "export": "weights for PyTorch, Hugging Face, MLX, llama.cpp, CoreNet",
    "average": "the mean of a run's last checkpoints",
    "plan": "layers, parameters and FLOPs of an experiment",
    "benchmark": "how fast, beside targets and other programs",
    "data_report": "documents and tokens of a run or mixture, kept and dropped",
}


def parse(
    verb: str,
    purpose: str,
    examples: str,
    flags: Callable[[argparse.ArgumentParser], None],
    argv: list[str],
) -> tuple[argparse.Namespace, Experiment]:
    """Return the verb's own flags and the experiment of `--exp` with the overrides applied.

    `flags` adds the verb's own flags to the parser. Everything else is an override by dotted path
    (`--optimizer.peak-lr 1e-3`), at any place. Exits with 2 on an unknown flag, field or
    unreadable value, with 0 after help; raises UserError for an unknown experiment or a value
    that the experiment refuses.
    """
    parser = command_parser(verb, purpose, examples, "--exp NAME [--GROUP.FIELD VALUE ...]")
    parser.add_argument("--exp", metavar="NAME", help="experiment, or a .py file that defines one")
    flags(parser)
    parser.add_argument(
        "--help-fields", action="store_true", help="list the experiment's fields and values"
    )
    parser.epilog = (
        f"groups of fields: {', '.join(_groups())}\nexperiments: {', '.join(experiment_names())}"
    )
    known, overrides = parser.parse_known_args(argv)
    if known.exp is None:
        parser.error(f"--exp NAME is missing; known are {', '.join(experiment_names())}")
    experiment = load_experiment(known.exp)
    if known.help_fields:
        _apply(experiment, ["--help"], parser.prog, known.exp)
    _refuse_unknown(parser, experiment, overrides)
    if overrides:
        experiment = _apply(experiment, overrides, parser.prog, known.exp)
    return known, experiment


def command_parser(
    verb: str, purpose: str, examples: str, usage: str = "[--FLAG VALUE ...]"
) -> argparse.ArgumentParser:
    """Return a parser that only lacks flags, for verbs whether or not they have an experiment."""
    prog = f"python -m openelm_jax.{verb}"
    return argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} {usage}",
        description=f"{purpose}\n\nexamples:\n" + _indent(examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def run(main: Callable[[list[str]], None], argv: list[str] | None = None) -> NoReturn:
    """Call a verb's `main` with the process's arguments and exit with the code that fits its end.

    A UserError becomes one line on stderr, without a traceback.
    """
    try:
        main(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except UserError as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # `plan | head`: the reader has gone; without this the interpreter's last flush complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    sys.exit(0)


def openelm() -> NoReturn:
    """Run `openelm VERB ...` as `python -m openelm_jax.VERB ...`."""
    verb, *argv = sys.argv[1:] or ["--help"]
    if verb in ("-h", "--help"):
        print("usage: openelm VERB [--help | --FLAG VALUE ...]\n")
        print("\n".join(f"  {name:<13}{purpose}" for name, purpose in VERBS.items()))
        sys.exit(0)
    if verb not in VERBS:
        near = _nearest(verb, list(VERBS))
        print(f"error: no verb {verb}; {near}known are {', '.join(VERBS)}.", file=sys.stderr)
        sys.exit(2)
    run(importlib.import_module(f"openelm_jax.{verb}").main, argv)


def _apply(experiment: Experiment, overrides: list[str], prog: str, name: str) -> Experiment:
    import tyro

    return tyro.cli(
        Experiment,
        default=experiment,
        args=overrides,
        prog=f"{prog} --exp {name}",
        description="Fields of the experiment, with its values; set any by its flag.",
    )


def _refuse_unknown(
    parser: argparse.ArgumentParser, experiment: Experiment, overrides: list[str]
) -> None:
    fields = list(_field_flags(experiment))
    flags = [option for option in parser._option_string_actions if option.startswith("--")]
    for argument in overrides:
        flag = argument.partition("=")[0].replace("_", "-")
        if flag.startswith("--") and flag not in fields:
            # `--peak-lr` is near `--optimizer.peak-lr`: compare with the bare names as well.
            by_bare_name = {"--" + field.rpartition(".")[2].lstrip("-"): field for field in fields}
            near = by_bare_name.get(flag) or _nearest_of(flag, [*fields, *flags])
            hint = f"did you mean {near}? " if near else ""
            parser.error(
                f"no flag or field {argument.partition('=')[0]}; "
                f"{hint}--help lists the flags, --help-fields the fields"
            )


def _field_flags(value: Any, prefix: str = "--") -> Iterator[str]:
    """Yield the flags by which the fields of `value` are overridden."""
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        name = field.name.replace("_", "-")
        if dataclasses.is_dataclass(inner):
            yield from _field_flags(inner, f"{prefix}{name}.")
        elif isinstance(inner, tuple) and inner and dataclasses.is_dataclass(inner[0]):
            for i, element in enumerate(inner):
                yield from _field_flags(element, f"{prefix}{name}.{i}.")
        else:
            yield prefix + name
            if isinstance(inner, bool):
                yield f"{prefix}no-{name}"


def _groups() -> list[str]:
    return [field.name for field in dataclasses.fields(Experiment) if field.name != "name"]


def _nearest(name: str, names: list[str]) -> str:
    near = _nearest_of(name, names)
    return f"did you mean {near}? " if near else ""


def _nearest_of(name: str, names: list[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, names, n=1)), None)


def _indent(text: str) -> str:
    return "\n".join(f"  {line.strip()}" for line in text.strip().splitlines())

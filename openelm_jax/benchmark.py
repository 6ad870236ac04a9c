"""How fast, on your own text and machine? `python -m openelm_jax.benchmark SUBJECT ...`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from openelm_jax.command_line import command_parser, parse, run
from openelm_jax.config import Experiment

SUBJECTS = {
    "data": (
        "The data pipeline on the text of an experiment: time in the tokenizer, workers,\n"
        "restoring, memory, mixture, each beside its target. Trains nothing, writes nothing.",
        """
        python -m openelm_jax.benchmark data --exp tiny
        python -m openelm_jax.benchmark data --exp 3b --data.root DIR --tokenizer FILE --json
        """,
    ),
    "train": (
        "A training step beside PyTorch's on this machine's CPU, by turns, and the trainer's\n"
        "loop beside its bare step; what the step takes to compile and to run. Random tokens,\n"
        "no files: nothing is read but by the part text, and nothing stays.",
        """
        python -m openelm_jax.benchmark train --exp sotu --model.model-dim 384
        python -m openelm_jax.benchmark train --exp 270m --data.lanes 1 \\
            --training.global-batch-size 1 --model.context-length 256 --part step
        """,
    ),
    "generate": (
        "The paper's Table 7: how fast OpenELM generates in JAX, PyTorch and MLX, by turns with\n"
        "the same random weights, and other models; beside what this machine's memory allows.",
        """
        python -m openelm_jax.benchmark generate --size 270m,10m
        python -m openelm_jax.benchmark generate --backend jax,torch --dtype bfloat16 --others all
        python -m openelm_jax.benchmark generate --backend jax --batch 1,8 --new-tokens 256 --json
        """,
    ),
    "norms": (
        "The paper's Table 8: what the norms of a forward pass cost op by op, fused, and in one\n"
        "program, for the shapes of OpenELM 1.1B (113 norms) and OLMo 1.18B (33), by turns.",
        """
        python -m openelm_jax.benchmark norms
        python -m openelm_jax.benchmark norms --dtype float32 --in-model 270m
        python -m openelm_jax.benchmark norms --backend jax --dtype float32,bfloat16 --json
        """,
    ),
    "evaluate": (
        "How fast the requests of tasks are scored, by us and by lm-evaluation-harness' own\n"
        "backend hf with the same float32 weights on this machine's CPU, by turns; and whether\n"
        "both find the same.",
        """
        python -m openelm_jax.benchmark evaluate --size 270m --tokenizer FILE --tasks piqa
        python -m openelm_jax.benchmark evaluate --from runs/tiny --data DIR --tasks hellaswag,mmlu
        """,
    ),
    "accelerator": (
        "The published models on this machine's first GPU or TPU, in ten minutes: kernels against\n"
        "the portable one, decoding, norms, largest batch, speed, memory, compiling, saving.\n"
        "Writes one JSON file.",
        """
        python -m openelm_jax.benchmark accelerator --out docs/results
        python -m openelm_jax.benchmark accelerator --part decode,norms
        python -m openelm_jax.benchmark accelerator --sizes 3b --data.root DIR --tokenizer FILE
        """,
    ),
}
DATA_PARTS = ("encode", "workers", "restore", "memory", "mixture")
TRAIN_PARTS = ("step", "loop", "text", "program")
ACCELERATOR_PARTS = ("kernels", "decode", "norms", "train")
DTYPES = ("float32", "bfloat16")
BACKENDS = ("jax", "torch", "mlx")
SIZES = ("270m", "450m", "1_1b", "3b")
PRECISIONS = (*DTYPES, "int8", "int4")
GENERATION_SIZES = (*SIZES, "10m")
NORM_BACKENDS = ("jax", "torch")
OTHERS = (
    *("uniform", "opt_350m", "mobillama_0_5b", "mobillama_0_8b"),
    *("pythia_1_4b", "mobillama_1_26b", "olmo_1_18b"),
)


def main(argv: list[str]) -> None:
    """Print the figures of a subject, as text or as JSON."""
    subject, arguments, experiment = _parse(argv)
    if experiment is None:
        alone = {
            "generate": _measure_generation,
            "norms": _measure_norms,
            "evaluate": _measure_evaluation,
            "accelerator": _measure_accelerator,
        }
        alone[subject](arguments)
        return

    from openelm_jax.benchmarks.report import describe_machine, format_figures

    if subject == "data":
        from openelm_jax.benchmarks.data import measure

        if arguments.tokenizer is not None:
            chosen = dataclasses.replace(experiment.tokenizer, path=arguments.tokenizer)
            experiment = dataclasses.replace(experiment, tokenizer=chosen)
        machine = describe_machine(("sentencepiece", "grain", "numpy", "pyarrow"))
        figures = measure(
            experiment, arguments.part, seconds=arguments.seconds, long_steps=arguments.long_steps
        )
    else:
        from openelm_jax.benchmarks.training import measure_training

        machine = describe_machine(("jax", "flax", "optax", "numpy", "torch"))
        figures = measure_training(
            experiment, arguments.part, dtypes=arguments.dtype, seconds=arguments.seconds
        )
    if arguments.json:
        plain = [dataclasses.asdict(figure) for figure in figures]
        print(json.dumps({"machine": machine, "experiment": experiment.name, "figures": plain}))
    else:
        print(format_figures(machine, figures))


def _measure_generation(arguments: argparse.Namespace) -> None:
    from openelm_jax.benchmarks.generation import Protocol, measure_generation
    from openelm_jax.benchmarks.generation_report import as_json, format_generation
    from openelm_jax.benchmarks.report import commit, describe_machine

    packages = ("jax", "jaxlib", "numpy", "torch", "transformers", "mlx", "mlx-lm")
    machine = describe_machine(packages)
    protocol = Protocol(
        new_tokens=arguments.new_tokens, rounds=arguments.rounds, batches=arguments.batch
    )
    found = measure_generation(
        arguments.size, arguments.backend, arguments.dtype, arguments.others, protocol, _say
    )
    if arguments.json:
        print(json.dumps(as_json(machine, commit(), found)))
    else:
        print(format_generation(machine, commit(), found))


def _measure_norms(arguments: argparse.Namespace) -> None:
    from openelm_jax.benchmarks.generation import Protocol
    from openelm_jax.benchmarks.norms import format_norms, measure_norms
    from openelm_jax.benchmarks.norms_in_model import (
        ModelRow,
        format_in_model,
        measure_in_model,
    )
    from openelm_jax.benchmarks.report import Figure, commit, describe_machine

    machine = describe_machine(("jax", "jaxlib", "flax", "numpy", "torch"))
    dtypes = arguments.dtype
    protocol = Protocol(new_tokens=arguments.new_tokens, rounds=arguments.rounds)
    rows = measure_norms(arguments.backend, dtypes, protocol.rounds, _say)
    in_model: list[ModelRow] = []
    figures: list[Figure] = []
    if arguments.in_model is not None:
        in_model, figures = measure_in_model(arguments.in_model, dtypes, protocol, _say)
    if arguments.json:
        plain = {
            "rows": [dataclasses.asdict(row) for row in rows],
            "in_model": [dataclasses.asdict(row) for row in in_model],
            "figures": [dataclasses.asdict(figure) for figure in figures],
        }
        print(json.dumps({"machine": machine, "commit": commit(), **plain}))
    else:
        below = format_in_model(in_model, figures) if in_model else []
        print(format_norms(machine, commit(), rows, below))


def _measure_evaluation(arguments: argparse.Namespace) -> None:
    from openelm_jax.benchmarks.evaluation import measure_evaluation
    from openelm_jax.benchmarks.report import commit, describe_machine, format_figures

    machine = describe_machine(("jax", "jaxlib", "numpy", "torch", "transformers", "lm-eval"))
    figures = measure_evaluation(
        arguments.where,
        arguments.size,
        arguments.tasks.split(","),
        None if arguments.data is None else Path(arguments.data),
        shots=arguments.shots,
        limit=arguments.limit,
        rounds=arguments.rounds,
        tokenizer=arguments.tokenizer,
        say=_say,
    )
    if arguments.json:
        plain = [dataclasses.asdict(figure) for figure in figures]
        print(json.dumps({"machine": machine, "commit": commit(), "figures": plain}))
    else:
        print(format_figures(machine, figures))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _measure_accelerator(arguments: argparse.Namespace) -> None:
    from openelm_jax.benchmarks.accelerator import measure_accelerator
    from openelm_jax.xla_flags import set_flags

    file = measure_accelerator(
        tuple(dict.fromkeys(arguments.sizes.split(","))),
        Path(arguments.out),
        root=arguments.root,
        tokenizer=arguments.tokenizer,
        parts=arguments.part,
        minutes=arguments.minutes,
        steps=arguments.steps,
        flags=set_flags(),
        say=_say,
    )
    print(file)


def _parse(argv: list[str]) -> tuple[str, argparse.Namespace, Experiment | None]:
    without_experiment = {
        "generate": _add_generation_flags,
        "norms": _add_norms_flags,
        "evaluate": _add_evaluation_flags,
        "accelerator": _add_accelerator_flags,
    }
    if argv and argv[0] in without_experiment:
        subject = argv[0]
        parser = command_parser(f"benchmark {subject}", *SUBJECTS[subject])
        without_experiment[subject](parser)
        return subject, parser.parse_args(argv[1:]), None
    flags = {"data": _add_data_flags, "train": _add_train_flags}
    if argv and argv[0] in SUBJECTS:
        subject = argv[0]
        purpose, examples = SUBJECTS[subject]
        parsed = parse(f"benchmark {subject}", purpose, examples, flags[subject], argv[1:])
        return subject, *parsed
    purpose = "\n".join(purpose for purpose, _ in SUBJECTS.values())
    examples = "\n".join(examples.strip() for _, examples in SUBJECTS.values())
    parser = command_parser("benchmark", purpose, examples, "SUBJECT [--FLAG VALUE ...]")
    parser.add_argument("subject", choices=tuple(SUBJECTS), help="what is measured")
    parser.parse_args(argv[:1])
    raise AssertionError("a subject that is known is taken above")


def _add_data_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer", metavar="FILE", help="SentencePiece model")
    _add_choice(parser, "--part", DATA_PARTS)
    _add_seconds(parser, "about so long a part")
    parser.add_argument(
        "--long-steps", type=int, default=10_000, metavar="N", help="a late restore (10000)"
    )


def _add_train_flags(parser: argparse.ArgumentParser) -> None:
    _add_choice(parser, "--part", TRAIN_PARTS, [part for part in TRAIN_PARTS if part != "text"])
    _add_choice(parser, "--dtype", DTYPES)
    _add_seconds(parser, "about so long a part and compute type, after compiling")


def _add_generation_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size",
        type=_some_of("--size", GENERATION_SIZES),
        default=("270m",),
        metavar="A,B",
        help=f"{','.join(GENERATION_SIZES)} (270m)",
    )
    _add_choice(parser, "--backend", BACKENDS)
    parser.add_argument(
        "--dtype",
        type=_some_of("--dtype", PRECISIONS),
        default=DTYPES,
        metavar="A,B",
        help=f"{','.join(PRECISIONS)}: the last two hold weights in 8 and 4 bits, jax only "
        f"({','.join(DTYPES)})",
    )
    parser.add_argument(
        "--others",
        type=_some_of("--others", OTHERS, everything="all"),
        default=(),
        metavar="A,B",
        help=f"other models, in PyTorch, and a uniform one in JAX: all, or {','.join(OTHERS)}",
    )
    parser.add_argument(
        "--batch",
        type=_whole_numbers,
        default=(1,),
        metavar="A,B",
        help="texts at a time (1); mlx has one at a time only",
    )
    _add_new_tokens(parser, 1024)
    _add_rounds(parser, 3)


def _add_norms_flags(parser: argparse.ArgumentParser) -> None:
    _add_choice(parser, "--backend", NORM_BACKENDS)
    _add_choice(parser, "--dtype", DTYPES)
    parser.add_argument(
        "--in-model",
        choices=GENERATION_SIZES,
        metavar="SIZE",
        help="generate in jax with this size too, with RMSNorm, with LayerNorm, and without norms: "
        + ", ".join(GENERATION_SIZES),
    )
    _add_new_tokens(parser, 256)
    _add_rounds(parser, 5)


def _add_evaluation_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from", dest="where", metavar="WHERE", help="weights of any kind (random ones)"
    )
    parser.add_argument(
        "--size",
        choices=GENERATION_SIZES,
        default="270m",
        metavar="SIZE",
        help=f"of random weights: {', '.join(GENERATION_SIZES)} (270m)",
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="SentencePiece model")
    parser.add_argument(
        "--tasks", default="piqa,hellaswag,arc_easy,winogrande", metavar="A,B", help="of lm-eval"
    )
    parser.add_argument(
        "--data", metavar="DIR", help="copies of the tasks' data, as for evaluate (the Hub)"
    )
    parser.add_argument("--shots", type=int, metavar="N", help="examples before each item")
    parser.add_argument(
        "--limit", type=int, default=100, metavar="N", help="items of each task (100)"
    )
    _add_rounds(parser, 3)


def _add_new_tokens(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument(
        "--new-tokens", type=int, default=default, metavar="N", help=f"of each text ({default})"
    )


def _add_rounds(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument(
        "--rounds",
        type=int,
        default=default,
        metavar="N",
        help=f"turns of each side ({default})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _whole_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(number) for number in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no list of whole numbers like 1,8") from None


def _add_accelerator_flags(parser: argparse.ArgumentParser) -> None:
    sizes = ",".join(SIZES)
    parser.add_argument("--out", default="docs/results", metavar="DIR", help="docs/results")
    parser.add_argument("--sizes", default=sizes, metavar="A,B", help=f"experiments ({sizes})")
    _add_choice(parser, "--part", ACCELERATOR_PARTS)
    parser.add_argument("--minutes", type=float, default=9, metavar="M", help="in all (9)")
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="of each size (40)")
    parser.add_argument(
        "--data.root", dest="root", metavar="DIR", help="text files (the demo corpus)"
    )
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="SentencePiece model (one trained on the text)"
    )


def _add_seconds(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument("--seconds", type=float, default=30, metavar="S", help=f"{meaning} (30)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_choice(
    parser: argparse.ArgumentParser,
    flag: str,
    known: tuple[str, ...],
    default: Sequence[str] | None = None,
) -> None:
    parser.add_argument(
        flag,
        type=_some_of(flag, known),
        default=known if default is None else default,
        metavar="A,B",
        help=",".join(known) + ("" if default is None else f" ({','.join(default)})"),
    )


def _some_of(
    flag: str, known: tuple[str, ...], *, everything: str | None = None
) -> Callable[[str], tuple[str, ...]]:
    def some(names: str) -> tuple[str, ...]:
        if names == everything:
            return known
        chosen = tuple(dict.fromkeys(names.split(",")))
        unknown = [name for name in chosen if name not in known]
        if unknown:
            kind = flag.removeprefix("--")
            raise argparse.ArgumentTypeError(
                f"no {kind} {unknown[0]}; known are {', '.join(known)}"
            )
        return chosen

    return some


if __name__ == "__main__":
    run(main)

"""Weights for other programs: `python -m openelm_jax.export --from W --to hf --out DIR`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from openelm_jax.command_line import command_parser, run
from openelm_jax.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from openelm_jax.weights.stored import StoredWeights

EXAMPLES = """
python -m openelm_jax.export --from runs/tiny --to hf --out exports/tiny --with-code
python -m openelm_jax.export --from runs/270m@345000 --to mlx --quantize 4 --out exports/270m-4bit
python -m openelm_jax.export --from hf://apple/OpenELM-1_1B --to gguf --out 1_1b --tokenizer t.model
python -m openelm_jax.export --from exports/270m --adapter LORA --to mlx-adapter --out 270m-adapter
"""
TARGETS = ("hf", "mlx", "gguf", "corenet", "orbax", "mlx-adapter")
# Which target takes a flag.
TAKES = {
    "dtype": ("hf", "mlx", "corenet"),
    "outtype": ("gguf",),
    "quantize": ("mlx",),
    "group_size": ("mlx",),
    "with_code": ("hf",),
}


def main(argv: list[str]) -> None:
    """Write the weights of `--from` in the layout of `--to`, and say on stderr what was done."""
    arguments = _parse(argv)
    out = Path(arguments.out)

    from openelm_jax.training.run_summary import summarize_run
    from openelm_jax.weights.load import open_weights
    from openelm_jax.weights.model_card import write_model_card
    from openelm_jax.weights.new_directory import new_directory, require_new
    from openelm_jax.weights.vocabulary import cut_to_tokenizer

    require_new(out)
    if arguments.to == "mlx-adapter":
        _export_adapters(out, arguments)
        return
    opened = open_weights(arguments.where, arguments.tokenizer, arguments.exp, arguments.adapter)
    with opened as stored:
        if arguments.to == "mlx":
            _refuse_what_mlx_lm_lacks(stored)
        for line in _warnings(arguments.to, stored):
            _say(f"warning: {line}")
        if stored.saved is not None:
            stored = dataclasses.replace(stored, record=summarize_run(*stored.saved))
        if arguments.to in ("hf", "mlx", "gguf"):  # the others keep the rows of training
            stored = cut_to_tokenizer(stored)
        if arguments.compare_on:
            from openelm_jax.generation.text_loss import text_tokens

            tokens = text_tokens(stored, Path(arguments.compare_on))
        with new_directory(out) as partial:
            written_as = _write(partial, stored, arguments)
            write_model_card(partial, stored, target=arguments.to, written_as=written_as)
        _say(f"{stored.source} written to {out} ({arguments.to}, {written_as})")
        if arguments.to == "hf" and not arguments.with_code:
            _say("transformers needs the model's code as well: export --with-code")
        if arguments.compare_on:
            _compare(stored, out, tokens, arguments.compare_on)


def _export_adapters(out: Path, arguments: argparse.Namespace) -> None:
    """Write the adapters of `--adapter` alone, as mlx-lm loads them beside the exported model."""
    from openelm_jax.weights.load import open_adapters, open_weights
    from openelm_jax.weights.mlx_adapters import write_mlx_adapters
    from openelm_jax.weights.new_directory import new_directory
    from openelm_jax.weights.vocabulary import cut_to_tokenizer

    with open_weights(arguments.where, arguments.tokenizer, arguments.exp) as stored:
        _refuse_what_mlx_lm_lacks(stored)
        stored = cut_to_tokenizer(stored)
        given = open_adapters(arguments.adapter, stored)
        with new_directory(out) as partial:
            write_mlx_adapters(partial, stored.config, given)
    _say(f"the adapters of {given.source} written to {out}, for mlx-lm's --adapter-path")


def _write(directory: Path, stored: StoredWeights, arguments: argparse.Namespace) -> str:
    """Write the files of a target, and return in words how the weights are stored."""
    dtype = arguments.dtype
    match arguments.to:
        case "hf" | "mlx":
            from openelm_jax.weights.huggingface import write_huggingface
            from openelm_jax.weights.mlx_quantized import Quantization
            from openelm_jax.weights.torch_model import refuse_what_it_does_not_compute, write_code

            if arguments.with_code:
                refuse_what_it_does_not_compute(stored.config)
            bits, group_size = arguments.quantize, arguments.group_size or 64
            written = write_huggingface(
                directory,
                stored,
                dtype=dtype or "bfloat16",
                quantization=Quantization(bits, group_size) if bits else None,
            )
            if arguments.with_code:
                write_code(directory)
            for name in written.unquantized:
                _say(f"not quantised, since groups of {group_size} do not divide its rows: {name}")
            if not bits:
                return dtype or "bfloat16"
            return f"{bits} bits, {written.bits_per_weight:.3f} a weight with scales and biases"
        case "gguf":
            from openelm_jax.weights.gguf_file import write_gguf

            write_gguf(directory, stored, outtype=arguments.outtype or "bf16")
            return arguments.outtype or "bf16"
        case "corenet":
            from openelm_jax.weights.corenet import write_corenet

            write_corenet(directory, stored, dtype=dtype)
            return dtype or "as stored"
        case _:
            from openelm_jax.weights.orbax import write_weights_directory

            write_weights_directory(directory, stored)
            return "as stored"


def _refuse_what_mlx_lm_lacks(stored: StoredWeights) -> None:
    from openelm_jax.weights.huggingface_config import what_mlx_lm_lacks

    if lacking := what_mlx_lm_lacks(stored.config):
        raise UserError(
            f"mlx-lm's openelm cannot run a model with {' and '.join(lacking)}; export --to hf."
        )


def _warnings(target: str, stored: StoredWeights) -> list[str]:
    from openelm_jax.weights.huggingface_config import differing_readers

    lines = differing_readers(stored.config) if target == "hf" else []
    if stored.tokenizer is None and target != "gguf":
        lines.insert(
            0,
            f"no tokenizer: all {stored.config.vocab_size} rows of the vocabulary are kept, and "
            "none is copied; --tokenizer FILE gives one.",
        )
    return lines


def _compare(stored: StoredWeights, out: Path, tokens: np.ndarray, text: str) -> None:
    """Say what a text costs before and after, in nats a token."""
    from openelm_jax.generation.text_loss import text_loss
    from openelm_jax.weights.load import open_weights

    before = text_loss(stored, tokens)
    with open_weights(out) as written:
        after = text_loss(written, tokens)
    _say(
        f"{text}: {before:.4f} nats a token as given, {after:.4f} as written "
        f"({after - before:+.4f})"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(
        "export",
        "Weights in a layout that other programs load with their own tools.",
        EXAMPLES,
        "--from WHERE --to FORMAT --out DIR [--FLAG VALUE ...]",
    )
    flag = parser.add_argument
    flag(
        "--from",
        dest="where",
        metavar="WHERE",
        required=True,
        help="a run directory, RUN@STEP, anything exported or averaged, a Hugging Face or MLX "
        "directory, .gguf, CoreNet's .pt, hf://OWNER/NAME[@REVISION]",
    )
    flag(
        "--to",
        choices=TARGETS,
        required=True,
        help="hf: mlx-lm, and transformers --with-code; mlx: mlx-lm, quantised too; gguf: "
        "llama.cpp; corenet: Apple's trainer; orbax: our own; mlx-adapter: --adapter alone, for "
        "mlx-lm's --adapter-path",
    )
    flag("--out", metavar="DIR", required=True, help="a new directory")
    flag(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="hf, mlx: type of the written tensors (bfloat16); corenet: (as stored)",
    )
    flag("--outtype", choices=["f32", "f16", "bf16", "q8_0"], help="the same for gguf (bf16)")
    flag("--quantize", type=int, choices=[4, 8], help="mlx: bits of a weight")
    flag(
        "--group-size",
        type=int,
        choices=[32, 64, 128],
        help="mlx: weights that share a scale and a bias (64)",
    )
    flag(
        "--with-code",
        action="store_true",
        help="hf: add the model's PyTorch code, which transformers needs",
    )
    flag("--tokenizer", metavar="FILE", help="SentencePiece file, if WHERE has none or another")
    flag("--exp", metavar="NAME", help="the experiment that a CoreNet .pt without .yaml is of")
    flag("--adapter", metavar="DIR", help="merge the LoRA or DoRA that peft saved there, or hf://")
    flag(
        "--compare-on",
        metavar="FILE",
        help="say what this text costs before and after, in nats a token",
    )
    arguments = parser.parse_args(argv)
    for name, targets in TAKES.items():
        if getattr(arguments, name) and arguments.to not in targets:
            instead = "; --to gguf takes --outtype" if name == "dtype" else ""
            parser.error(f"--{name.replace('_', '-')} is for --to {' and '.join(targets)}{instead}")
    if arguments.group_size and not arguments.quantize:
        parser.error("--group-size says how to --quantize: give both")
    if arguments.to == "mlx-adapter" and (not arguments.adapter or arguments.compare_on):
        parser.error("--to mlx-adapter writes the adapters of --adapter DIR, and compares nothing")
    if arguments.compare_on and not Path(arguments.compare_on).is_file():
        raise UserError(f"--compare-on {arguments.compare_on}: there is no such file.")
    return arguments


if __name__ == "__main__":
    run(main)

"""Weights for other programs: `python -m openelm_jax.export --from W --to hf --out DIR`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from openelm_jax.command_line import command_parser, run

EXAMPLES = """
python -m openelm_jax.export --from runs/tiny --to hf --out exports/tiny
python -m openelm_jax.export --from runs/270m@345000 --to hf --out exports/270m --dtype bfloat16
"""


def main(argv: list[str]) -> None:
    """Write the weights of `--from` in the layout of `--to`, and say on stderr what was done."""
    arguments = _parse(argv)
    out = Path(arguments.out)

    from openelm_jax.weights.huggingface import write_huggingface
    from openelm_jax.weights.huggingface_config import differing_readers
    from openelm_jax.weights.load import load_weights
    from openelm_jax.weights.new_directory import require_new

    require_new(out)
    weights = load_weights(arguments.where, arguments.tokenizer)
    if weights.tokenizer is None:
        print(
            f"warning: no tokenizer: all {weights.config.vocab_size} rows of the vocabulary are "
            "kept, and none is copied; --tokenizer FILE gives one.",
            file=sys.stderr,
        )
    for line in differing_readers(weights.config):
        print(f"warning: {line}", file=sys.stderr)
    write_huggingface(
        out,
        weights.config,
        weights.params,
        dtype=arguments.dtype,
        tokenizer=weights.tokenizer,
    )
    print(f"{weights.source} written to {out} in {arguments.dtype}", file=sys.stderr)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(
        "export",
        "Weights in a layout that other programs load with their own tools.",
        EXAMPLES,
        "--from WHERE --to hf --out DIR [--FLAG VALUE ...]",
    )
    flag = parser.add_argument
    flag(
        "--from",
        dest="where",
        metavar="WHERE",
        required=True,
        help="a run directory, RUN@STEP, or a Hugging Face or MLX directory",
    )
    flag(
        "--to",
        choices=["hf"],
        required=True,
        help="hf: config.json and safetensors, for Apple's code and mlx-lm",
    )
    flag("--out", metavar="DIR", required=True, help="a new directory")
    flag(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="type of the written tensors (float32)",
    )
    flag("--tokenizer", metavar="FILE", help="SentencePiece file, if WHERE has none or another")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run(main)

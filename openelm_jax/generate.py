"""Text from a checkpoint: `python -m openelm_jax.generate --from runs/tiny --prompt "..."`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from openelm_jax.command_line import command_parser, run
from openelm_jax.errors import UserError

if TYPE_CHECKING:
    from openelm_jax.generation.language_model import Completion, Prompt

EXAMPLES = """
python -m openelm_jax.generate --from runs/tiny --prompt "The state of the Union"
python -m openelm_jax.generate --from runs/tiny@800 --prompt-file prompts.txt --json
python -m openelm_jax.generate --from exports/instruct --chat --prompt "Why is the sky blue?"
python -m openelm_jax.generate --from exports/3b --draft exports/270m --prompt "We must" --stream
"""


def main(argv: list[str]) -> None:
    """Print each prompt with its continuation, or one JSON object a prompt."""
    arguments = _parse(argv)
    prompts = _prompts(arguments)

    from openelm_jax.data.chat import ChatForm, Message, encode_prompt
    from openelm_jax.generation.language_model import load
    from openelm_jax.generation.sampling import Sampling
    from openelm_jax.generation.speculative import Tally, proposal_count

    proposal_count(arguments.prompt_lookup, arguments.draft is not None, arguments.draft_tokens)
    sampling = Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        repetition_penalty=arguments.repetition_penalty,
    )
    how = {
        "dtype": arguments.dtype,
        "quantize": arguments.quantize,
        "replica": arguments.replica,
        "tensor": arguments.tensor,
    }
    model = load(
        arguments.where, arguments.tokenizer, exp=arguments.exp, adapter=arguments.adapter, **how
    )
    draft = load(arguments.draft, arguments.tokenizer, **how) if arguments.draft else None
    speculation = model.speculation(arguments.prompt_lookup, draft, arguments.draft_tokens)
    tally = Tally()
    asked: list[Prompt] = list(prompts)
    if arguments.chat:
        form = ChatForm(empty_system=not arguments.no_system)
        tokenizer = model.require_tokenizer()
        asked = [
            encode_prompt(tokenizer, [Message("user", text)], form).tolist() for text in prompts
        ]
    between = "\n" if arguments.chat else ""

    if arguments.stream:
        for row, prompt in enumerate(prompts):
            print(prompt, end=between, flush=True)
            pieces = model.stream(
                asked[row], arguments.max_tokens, sampling, row, speculation, tally
            )
            for piece in pieces:
                print(piece, end="", flush=True)
            print("\n" if row + 1 < len(prompts) else "", flush=True)
    else:
        completions = model.complete(asked, arguments.max_tokens, sampling, speculation, tally)
        _print(prompts, completions, between, as_json=arguments.json)
    if speculation is not None:
        print(tally, file=sys.stderr)


def _print(
    prompts: list[str], completions: list[Completion], between: str, *, as_json: bool
) -> None:
    pairs = list(zip(prompts, completions, strict=True))
    if not as_json:
        print("\n\n".join(prompt + between + completion.text for prompt, completion in pairs))
        return
    for prompt, completion in pairs:
        fields = {
            "prompt": prompt,
            "text": completion.text,
            "tokens": completion.tokens,
            "finish_reason": completion.finish_reason,
        }
        print(json.dumps(fields, ensure_ascii=False))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(
        "generate",
        "Text from a checkpoint: each prompt with its continuation, on stdout.",
        EXAMPLES,
        "--from WHERE --prompt TEXT [--FLAG VALUE ...]",
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
    flag("--prompt", action="append", metavar="TEXT", help="again for a batch of them")
    flag("--prompt-file", metavar="FILE", help="one prompt a line")
    flag(
        "--chat",
        action="store_true",
        help="the prompt is a user's turn, to be answered: for models tuned on conversations",
    )
    flag(
        "--no-system",
        action="store_true",
        help="with --chat: no empty system turn in front, for models tuned without",
    )
    flag("--max-tokens", type=int, default=128, metavar="N", help="new tokens at most (128)")
    flag("--temperature", type=float, default=0.8, metavar="X", help="0 is greedy (0.8)")
    flag("--top-k", type=int, default=0, metavar="K", help="only the K likeliest tokens; 0: all")
    flag("--top-p", type=float, default=0.95, metavar="P", help="only the top share P (0.95)")
    flag("--seed", type=int, default=0, metavar="N", help="same seed, same text (0)")
    flag(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="above 1: tokens that the text has are less likely; 1: none (1)",
    )
    flag(
        "--prompt-lookup",
        type=int,
        nargs="?",
        const=10,
        metavar="K",
        help="faster where a text repeats itself: propose the K tokens (10) that followed where "
        "its last ones stood before",
    )
    flag("--draft", metavar="WHERE", help="faster: a smaller model that proposes tokens to this")
    flag("--draft-tokens", type=int, metavar="K", help="how many at a time (4)")
    flag("--dtype", choices=("float32", "bfloat16"), help="float32 on a CPU, bfloat16 elsewhere")
    flag("--quantize", type=int, choices=(8, 4), help="bits of a weight: less memory to read")
    flag("--mesh.replica", dest="replica", type=int, default=1, metavar="N", help="divides prompts")
    flag("--mesh.tensor", dest="tensor", type=int, default=1, metavar="N", help="divides matrices")
    flag("--tokenizer", metavar="FILE", help="SentencePiece file, if WHERE has none or another")
    flag("--adapter", metavar="DIR", help="merge the LoRA or DoRA that peft saved there, or hf://")
    flag("--exp", metavar="NAME", help="the experiment that a CoreNet .pt without .yaml is of")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--stream", action="store_true", help="print the text as it comes")
    output.add_argument("--json", action="store_true", help="one JSON object a prompt")
    arguments = parser.parse_args(argv)
    if not arguments.prompt and not arguments.prompt_file:
        parser.error("give --prompt TEXT or --prompt-file FILE")
    if arguments.max_tokens < 1:
        parser.error("--max-tokens: give a number of new tokens, 1 or more")
    if arguments.no_system and not arguments.chat:
        parser.error("--no-system is for --chat")
    return arguments


def _prompts(arguments: argparse.Namespace) -> list[str]:
    prompts = list(arguments.prompt or [])
    if arguments.prompt_file:
        try:
            text = Path(arguments.prompt_file).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UserError(
                f"--prompt-file {arguments.prompt_file}: there is no such file."
            ) from None
        except (OSError, UnicodeDecodeError) as fault:
            raise UserError(
                f"--prompt-file {arguments.prompt_file}: {fault}; give a text file in UTF-8."
            ) from None
        prompts += [line for line in text.split("\n") if line]
        if not prompts:
            raise UserError(f"--prompt-file {arguments.prompt_file} holds no prompt.")
    return prompts


if __name__ == "__main__":
    run(main)

"""How fast programs generate, and how fast memory would let them: `benchmark generate`.

The paper's protocol (Table 7): a prompt of 36 tokens, 1,024 new ones, greedily,
with a cache of fixed length; one dry run, and a warm-up before what is counted. Each program,
model and compute type is a process of its own. Those of one size hold the same random weights and
take turns, so that a ratio is of neighbouring turns, and what is quoted is the median of several.

Legend: B batch, T time, I new tokens.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from openelm_jax.benchmarks.bandwidth import READ_BYTES, serve_bandwidth
from openelm_jax.benchmarks.generation_models import (
    OTHERS,
    UNIFORM,
    model_of,
    uniform,
    write_random,
)
from openelm_jax.benchmarks.generation_report import (
    Generation,
    Key,
    Result,
    bound_of,
    make_ratios,
    make_row,
    make_shares,
)
from openelm_jax.benchmarks.generation_sides import BITS, Facts, Turn, serve_generation
from openelm_jax.benchmarks.processes import Ask, process
from openelm_jax.config import DType
from openelm_jax.errors import UserError

BENCHMARK = "benchmark generate"
PROMPT_TOKENS = 36
BOS_ID = 1
EXTRAS = {"torch": "torch", "transformers": "torch", "mlx": "mlx"}
"""Of this package, by program."""
PACKAGES = {"torch": ("torch", "transformers"), "mlx": ("mlx", "mlx_lm")}
"""That an extra installs."""
CURE = (
    "if memory ran out, take fewer programs with --backend, fewer types with --dtype or a smaller "
    "--size"
)
NO_PREALLOCATION = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Several programs share a GPU's memory."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What every side does in a turn, and how often; UserError for what cannot be timed."""

    new_tokens: int = 1024
    rounds: int = 3
    batches: tuple[int, ...] = (1,)
    prompt_tokens: int = PROMPT_TOKENS

    def __post_init__(self) -> None:
        if self.new_tokens < 2:
            raise UserError(f"--new-tokens is {self.new_tokens}: it must be at least 2.")
        if self.rounds < 1:
            raise UserError(f"--rounds is {self.rounds}: it must be at least 1.")
        if min(self.batches) < 1:
            raise UserError(f"--batch is {min(self.batches)}: it must be at least 1.")


class Entry(NamedTuple):
    """A side of a comparison: a model in a program, in a precision, from its weights."""

    model: str
    program: str
    precision: str
    source: str


def measure_generation(
    sizes: tuple[str, ...],
    programs: tuple[str, ...],
    precisions: tuple[str, ...],
    others: tuple[str, ...],
    protocol: Protocol,
    say: Callable[[str], None],
) -> Generation:
    """Return what is measured of OpenELM's sizes in some programs, and of other models.

    Raises UserError for a package that is not installed, and for a process that ends early.
    """
    _check(programs, precisions, others, protocol)
    results: list[Result] = []
    bandwidths: dict[str, float] = {}
    with process(
        *(serve_bandwidth, READ_BYTES), benchmark=BENCHMARK, cure=CURE, environment=NO_PREALLOCATION
    ) as ask_bandwidth:

        def measure_bandwidth() -> None:
            device, found = ask_bandwidth("read")
            bandwidths[device] = max(found, bandwidths.get(device, 0.0))

        for size in sizes:
            with _size_group(size, programs, precisions, UNIFORM in others, protocol, say) as group:
                results += _measure_group(group, protocol, measure_bandwidth, say)
        for name in others:
            if name != UNIFORM:
                group = [
                    Entry(name, "transformers", precision, name)
                    for precision in precisions
                    if precision not in BITS
                ]
                results += _measure_group(group, protocol, measure_bandwidth, say)
    bounds = [bound_of(result, bandwidths) for result in results]
    figures = [*make_ratios(results), *make_shares(results, bounds)]
    figures.sort(key=lambda pair: pair[0].part)
    return Generation(
        new_tokens=protocol.new_tokens,
        prompt_tokens=protocol.prompt_tokens,
        rounds=protocol.rounds,
        bandwidths=bandwidths,
        rows=tuple(map(make_row, results, bounds)),
        figures=tuple(figure for figure, is_shown in figures if is_shown),
        further=tuple(figure for figure, is_shown in figures if not is_shown),
    )


def prompts_of(protocol: Protocol, vocab_size: int) -> dict[int, np.ndarray]:
    """Return random prompts [B, T] by batch size, each with <s>, the same every time."""
    random = np.random.default_rng(0)
    rows_BT = random.integers(
        3, vocab_size, (max(protocol.batches), protocol.prompt_tokens), dtype=np.int32
    )
    rows_BT[:, 0] = BOS_ID
    return {batch: rows_BT[:batch] for batch in protocol.batches}


@contextmanager
def _size_group(
    size: str,
    programs: tuple[str, ...],
    precisions: tuple[str, ...],
    with_uniform: bool,
    protocol: Protocol,
    say: Callable[[str], None],
) -> Iterator[list[Entry]]:
    """Give the sides of an OpenELM size, and of its uniform twin in our own code."""
    config = model_of(size)
    length = protocol.prompt_tokens + protocol.new_tokens
    if length > config.context_length:
        say(f"note: {size} is made for texts of {config.context_length} tokens, not {length}")
        config = dataclasses.replace(config, context_length=length)
    stored: DType = "bfloat16" if precisions == ("bfloat16",) else "float32"
    with tempfile.TemporaryDirectory() as folder:
        say(f"{size}: writing random weights")
        own, twin = Path(folder, size), Path(folder, UNIFORM)
        write_random(own, config, stored)
        group = [
            Entry(size, program, precision, str(own))
            for precision in precisions
            for program in programs
            if program == "jax" or precision not in BITS
        ]
        if with_uniform:
            write_random(twin, uniform(config), stored)
            group += [
                Entry(f"{size}_{UNIFORM}", "jax", precision, str(twin)) for precision in precisions
            ]
        yield group


def _measure_group(
    group: list[Entry],
    protocol: Protocol,
    measure_bandwidth: Callable[[], None],
    say: Callable[[str], None],
) -> list[Result]:
    """Return the turns of sides that are in memory together: A B C, C B A, A B C, ..."""
    prompts = prompts_of(protocol, _vocabulary(group[0]))
    with ExitStack() as stack:
        asks: dict[Entry, Ask] = {
            entry: stack.enter_context(
                process(
                    serve_generation,
                    *(entry.program, entry.source, entry.precision, prompts, protocol.new_tokens),
                    benchmark=BENCHMARK,
                    cure=CURE,
                    environment=NO_PREALLOCATION,
                )
            )
            for entry in group
        }
        facts: dict[Entry, Facts] = {}
        for entry, ask in asks.items():
            say(f"{entry.model}: loading into {entry.program}, {entry.precision}")
            facts[entry] = ask("facts")
        say(f"{group[0].model}: dry run")
        asks[group[0]](("dry", protocol.batches[0]))
        keys = [
            (entry, batch)
            for entry in group
            for batch in protocol.batches
            if entry.program != "mlx" or batch == 1
        ]
        say(f"{group[0].model}: first tokens")
        firsts = {key: asks[key[0]](("first", key[1])) for key in keys}
        _check_same(firsts)
        turns: dict[tuple[Entry, int], list[Turn]] = {key: [] for key in keys}
        for number in range(protocol.rounds):
            say(f"{group[0].model}: round {number + 1} of {protocol.rounds}")
            measure_bandwidth()
            for entry, batch in keys[:: -1 if number % 2 else 1]:
                turns[entry, batch].append(asks[entry](("turn", batch)))
    return [
        Result(
            key=Key(entry.model, entry.program, entry.precision, batch),
            facts=facts[entry],
            turns=tuple(turns[entry, batch]),
            prompt_tokens=protocol.prompt_tokens,
            new_tokens=protocol.new_tokens,
        )
        for entry, batch in keys
    ]


def _check_same(firsts: dict[tuple[Entry, int], np.ndarray]) -> None:
    """Assert that in float32, where rounding changes no choice, all programs choose the same."""
    chosen: dict[tuple[str, int], np.ndarray] = {}
    for (entry, batch), first_BI in firsts.items():
        if entry.precision == "float32":
            same = np.array_equal(chosen.setdefault((entry.model, batch), first_BI), first_BI)
            assert same, f"{entry.program} generates other tokens of {entry.model}"


def _vocabulary(entry: Entry) -> int:
    """Return how many tokens the models of a group know at least."""
    size = entry.model
    return OTHERS[size].fields["vocab_size"] if size in OTHERS else model_of(size).vocab_size


def _check(
    programs: tuple[str, ...],
    precisions: tuple[str, ...],
    others: tuple[str, ...],
    protocol: Protocol,
) -> None:
    needed = [*programs, *(["transformers"] if set(others) - {UNIFORM} else [])]
    for program in needed:
        extra = EXTRAS.get(program)
        missing = [package for package in PACKAGES.get(extra or "", ()) if _is_missing(package)]
        if missing:
            raise UserError(
                f"{BENCHMARK}: {program} needs {missing[0]}, which is not installed: "
                f"pip install 'openelm_jax[{extra}]', or leave {program} out of --backend"
                f"{' and --others away' if program == 'transformers' else ''}."
            )
    if set(precisions) <= BITS.keys() and ("jax" not in programs or set(others) - {UNIFORM}):
        raise UserError(
            f"--dtype is {','.join(precisions)}: only jax has weights in so few bits here; have "
            "jax in --backend, and float32 or bfloat16 in --dtype for --others."
        )
    if programs == ("mlx",) and 1 not in protocol.batches:
        raise UserError("mlx-lm generates one text at a time: have 1 in --batch.")


def _is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None

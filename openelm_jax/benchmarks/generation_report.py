"""What `benchmark generate` found: rates with their spread, bounds, ratios, and a table of them.

A rate is in tokens a second, of all rows of a batch together. The first new token belongs to the
prompt: it comes out of the pass that reads it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from openelm_jax.benchmarks.generation_models import OTHERS, UNIFORM
from openelm_jax.benchmarks.generation_sides import Facts, Turn
from openelm_jax.benchmarks.paper_tables import MACHINE, TABLE_7
from openelm_jax.benchmarks.report import (
    Figure,
    format_machine,
    format_parts,
    format_table,
    median_figure,
    short,
)

TARGETS = {
    ("generation", "270m", "float32", "torch", "float32"): 2.2,
    ("generation", "270m", "float32", "torch", "bfloat16"): 1.1,
    ("generation", "270m", "float32", "mlx", "float32"): 5.0,
    ("generation", "270m", "bfloat16", "jax", "float32"): 0.7,
    ("generation", "270m", "int8", "jax", "float32"): 0.9,
    ("generation", "10m", "float32", "torch", "float32"): 2.5,
    ("prompt", "270m", "float32", "torch", "float32"): 2.0,
}
"""Least ratios on a CPU with batch 1: (rate, model, our type, their program, their type)."""
BATCH_TARGETS = {("270m", "float32", 8): 4.0}
"""Least ratios of our generation to that with batch 1: (model, type, batch)."""
SHARE_TARGETS = {("270m", "float32"): 50.0}
"""Least shares of the bound, in percent, on a CPU with batch 1: (model, type)."""


class Key(NamedTuple):
    """What was measured: a model in a program, a precision and a batch."""

    model: str
    program: str
    dtype: str
    batch: int

    def __str__(self) -> str:
        return f"{self.program} {self.dtype}" + (f" batch {self.batch}" if self.batch > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Result:
    """The turns of a side."""

    key: Key
    facts: Facts
    turns: tuple[Turn, ...]
    prompt_tokens: int
    new_tokens: int

    def rates(self) -> dict[str, list[float]]:
        """Return tokens a second of each turn: prompt, generation and both."""
        return rates_of(self.turns, self.key.batch, self.prompt_tokens, self.new_tokens)


def rates_of(
    turns: Iterable[Turn], batch: int, prompt_tokens: int, new_tokens: int
) -> dict[str, list[float]]:
    """Return tokens a second of each turn: prompt, generation and both."""
    rates: dict[str, list[float]] = {"prompt": [], "generation": [], "total": []}
    for turn in turns:
        rates["prompt"].append(batch * prompt_tokens / turn.prompt_seconds)
        after_prompt = turn.seconds - turn.prompt_seconds
        rates["generation"].append(batch * (new_tokens - 1) / after_prompt)
        rates["total"].append(batch * (prompt_tokens + new_tokens) / turn.seconds)
    return rates


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median of some turns, with the smallest and the largest."""

    median: float
    low: float
    high: float


def spread_of(values: list[float]) -> Spread:
    return Spread(median=statistics.median(values), low=min(values), high=max(values))


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What memory alone allows: bytes that a step reads, and the tokens a second that follow."""

    weight_bytes: int
    cache_bytes: int
    """Of all rows, in the middle of the generation."""
    tokens_per_second: float | None
    """None where the device's bandwidth was not measured."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table."""

    model: str
    title: str
    parameters: int
    program: str
    dtype: str
    batch: int
    device: str
    prompt: Spread
    generation: Spread
    total: Spread
    bound: Bound
    share: float | None
    """Of the bound that generation reaches."""
    paper: float | None
    """Tokens a second of generation that the paper measured of the model, on its machine."""
    turns: tuple[Turn, ...]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """All that was measured in one run."""

    prompt_tokens: int
    new_tokens: int
    rounds: int
    bandwidths: dict[str, float]
    """Bytes a second by platform, the best of all rounds."""
    rows: tuple[Row, ...]
    figures: tuple[Figure, ...]
    """Ratios of neighbouring turns, and shares of bounds that have a target."""
    further: tuple[Figure, ...]
    """All others; for programs."""


def bound_of(result: Result, bandwidths: Mapping[str, float]) -> Bound:
    """Return the bound of a step: all weights, and of each row the cache of a mean length."""
    facts, batch = result.facts, result.key.batch
    weight_bytes = facts.weight_bytes
    mean_length = result.prompt_tokens + result.new_tokens / 2
    cache_bytes = round(batch * facts.cache_bytes * mean_length)
    bandwidth = bandwidths.get(facts.device)
    allowed = None if bandwidth is None else batch * bandwidth / (weight_bytes + cache_bytes)
    return Bound(weight_bytes=weight_bytes, cache_bytes=cache_bytes, tokens_per_second=allowed)


def make_row(result: Result, bound: Bound) -> Row:
    """Return the row of a side."""
    key = result.key
    prompt, generation, total = map(spread_of, result.rates().values())
    allowed = bound.tokens_per_second
    return Row(
        model=key.model,
        program=key.program,
        dtype=key.dtype,
        batch=key.batch,
        prompt=prompt,
        generation=generation,
        total=total,
        title=title_of(key.model),
        parameters=result.facts.parameters,
        device=result.facts.device,
        bound=bound,
        share=None if allowed is None else generation.median / allowed,
        paper=TABLE_7.get(key.model),
        turns=result.turns,
    )


def title_of(model: str) -> str:
    """Return what people call a model."""
    if model in OTHERS:
        return OTHERS[model].title
    size, _, kind = model.partition(f"_{UNIFORM}")
    title = f"OpenELM {size.upper().replace('_', '.')}"
    return f"uniform, as {title}" if kind or model != size else title


def make_ratios(results: list[Result]) -> Iterator[tuple[Figure, bool]]:
    """Yield each of our sides to each other one of its size, as ratios of neighbouring turns.

    To another program of the same model with the same batch; to ourselves in float32, with a
    smaller batch, or with a uniform model. Each with whether readers are shown it: those with a
    target, those to the same type or a uniform model, and those to our float32.
    """
    for ours in results:
        if ours.key.program != "jax":
            continue
        for theirs in results:
            if not _is_compared(ours.key, theirs.key):
                continue
            for rate in ("prompt", "generation"):
                pairs = zip(ours.rates()[rate], theirs.rates()[rate], strict=True)
                names = (rate, *ours.key, "to", *theirs.key)
                figure = median_figure(
                    title_of(ours.key.model),
                    "_".join(map(str, names)),
                    [our_rate / their_rate for our_rate, their_rate in pairs],
                    "x",
                    f"{rate}: {ours.key} to {_name_of(theirs.key, ours.key)}",
                    least=_target(rate, ours, theirs),
                )
                yield figure, figure.least is not None or _is_shown(ours.key, theirs.key)


def make_shares(results: list[Result], bounds: list[Bound]) -> Iterator[tuple[Figure, bool]]:
    """Yield how much of its bound each of our sides reaches, in percent.

    Those with a target are for readers: the table has all of them.
    """
    for result, bound in zip(results, bounds, strict=True):
        key, allowed = result.key, bound.tokens_per_second
        if key.program != "jax" or allowed is None:
            continue
        is_target = result.facts.device == "cpu" and key.batch == 1
        figure = median_figure(
            title_of(key.model),
            "_".join(map(str, ("share", *key))),
            [100 * rate / allowed for rate in result.rates()["generation"]],
            "%",
            f"generation: {key}, of what memory allows",
            least=SHARE_TARGETS.get((key.model, key.dtype)) if is_target else None,
        )
        yield figure, figure.least is not None


def _is_compared(ours: Key, theirs: Key) -> bool:
    if ours.model != theirs.model:
        twin = theirs.model == f"{ours.model}_{UNIFORM}"
        return twin and ours[1:] == theirs[1:]
    if theirs.program != "jax":
        return ours.batch == theirs.batch
    if ours.dtype != theirs.dtype:
        return ours.batch == theirs.batch and theirs.dtype == "float32"
    return theirs.batch < ours.batch


def _is_shown(ours: Key, theirs: Key) -> bool:
    if ours.batch != theirs.batch or ours.model.endswith(UNIFORM):
        return False
    return ours.dtype == theirs.dtype or theirs.program == "jax"


def _name_of(theirs: Key, ours: Key) -> str:
    return str(theirs) if theirs.model == ours.model else f"{title_of(theirs.model)}, {theirs}"


def _target(rate: str, ours: Result, theirs: Result) -> float | None:
    if {ours.facts.device, theirs.facts.device} != {"cpu"} or ours.key.model != theirs.key.model:
        return None
    model, _, dtype, batch = ours.key
    if batch != theirs.key.batch:
        is_target = rate == "generation" and theirs.key.batch == 1
        return BATCH_TARGETS.get((model, dtype, batch)) if is_target else None
    key = (rate, model, dtype, theirs.key.program, theirs.key.dtype)
    return TARGETS.get(key) if batch == 1 else None


def as_json(machine: dict[str, str], commit: str | None, found: Generation) -> dict[str, Any]:
    """Return all of it as plain values."""
    plain = dataclasses.asdict(found)
    for row in plain["rows"]:
        row["turns"] = [turn._asdict() for turn in row["turns"]]
    return {"machine": machine, "commit": commit, **plain, "paper": {"table_7": MACHINE}}


def format_generation(machine: dict[str, str], commit: str | None, found: Generation) -> str:
    """Return the lines that people read."""
    bandwidths = ", ".join(
        f"{rate / 1e9:.3g} GB/s ({device})" for device, rate in found.bandwidths.items()
    )
    lines = [
        *format_machine(machine),
        f"commit: {commit or 'unknown'}",
        f"memory read: {bandwidths}",
        "",
        f"A prompt of {found.prompt_tokens} tokens, {found.new_tokens:,} new ones, greedily: "
        f"tokens a second, medians of {found.rounds} turns (smallest to largest).",
        "At most: what memory read so fast allows, for the weights and the mean cache of a token.",
        "",
        *_table(found.rows),
        "",
        f"paper: generation, Table 7, {MACHINE}",
    ]
    return "\n".join([*lines, *format_parts(list(found.figures))])


def _table(rows: tuple[Row, ...]) -> list[str]:
    heading = [
        *("model", "program", "type", "batch", "parameters", "prompt", "generation", "", "total"),
        *("at most", "share", "paper"),
    ]
    return format_table(heading, [_cells(row) for row in rows], left=3)


def _cells(row: Row) -> list[str]:
    allowed, spread = row.bound.tokens_per_second, row.generation
    return [
        *(row.title, row.program, row.dtype, str(row.batch), f"{row.parameters:,}"),
        *(short(row.prompt.median), short(spread.median)),
        *(f"({short(spread.low)} to {short(spread.high)})", short(row.total.median)),
        "-" if allowed is None else short(allowed),
        "-" if row.share is None else f"{row.share:.0%}",
        "-" if row.paper is None else f"{row.paper:g}",
    ]

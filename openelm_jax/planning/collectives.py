"""What devices send each other in a step: kinds and types, and how they read in XLA's text."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass

SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
NAMES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "s32": "int32", "u32": "uint32"}
KINDS = (
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip

# `%name = bf16[8,1280]{1,0:T(8,128)} all-gather(%operand), ...`, or a tuple of such types.
INSTRUCTION = re.compile(
    rf"^\s*(?:ROOT )?%?[\w.-]+ = (?P<types>\(.*?\)|\S+) (?P<kind>{'|'.join(KINDS)})"
    r"(?P<start>-start)?\((?P<operands>[^)]*)\)",
)
COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.-]+) \(.*\{\s*$")
ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Transfers of one kind: `count` of them, `bytes` the whole arrays' that a device takes part
    in, all of them together. `axes` and `purpose` are of those that were planned, not counted.
    """

    kind: str
    dtype: str
    count: int
    bytes: int
    axes: str = ""
    purpose: str = ""


def collectives_in(program: str) -> tuple[Collective, ...]:
    """Return the collectives in the text of a compiled program, added up by kind and type.

    An all-reduce of which each device keeps a part (a fusion called all-reduce-scatter, which is
    how the TPU compiler spells it) counts as the reduce-scatter that it is.
    """
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    computation = ""
    for line in program.splitlines():
        if match := COMPUTATION.match(line):
            computation = match["name"]
        if match := INSTRUCTION.match(line):
            kind = match["kind"]
            if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"
            arrays = [
                (name, SIZES[name] * math.prod(int(n) for n in shape.split(",") if n))
                for name, shape in ARRAY.findall(match["types"])
                if name in SIZES
            ]
            if not arrays:
                continue
            dtype, size = _whole(kind, arrays, bool(match["start"]), match["operands"], line)
            counts[kind, NAMES.get(dtype, dtype)][0] += 1
            counts[kind, NAMES.get(dtype, dtype)][1] += size
    return tuple(
        Collective(kind=kind, dtype=dtype, count=count, bytes=size)
        for (kind, dtype), (count, size) in sorted(counts.items())
    )


def _whole(
    kind: str, arrays: list[tuple[str, int]], started: bool, operands: str, line: str
) -> tuple[str, int]:
    """Return the type and the bytes of the whole array: what is gathered, or is to be scattered."""
    if started and kind != "all-reduce" and len(arrays) > 1:
        # (operands, results, ...), as many results as operands: the larger ones are the whole.
        num_operands = max(operands.count("%"), 1)
        sides = arrays[:num_operands], arrays[num_operands : 2 * num_operands]
        arrays = max(sides, key=lambda side: sum(size for _, size in side))
        started_whole = True
    else:
        started_whole = False
    dtype = max(arrays, key=lambda array: array[1])[0]
    size = sum(size for _, size in arrays)
    if kind == "reduce-scatter" and f" {kind}" in line and not started_whole:
        size *= _group_size(line)
    return dtype, size


def _group_size(line: str) -> int:
    """Return how many devices take part: `replica_groups={{0,1},{2,3}}` or `[2,2]<=[4]`."""
    if groups := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(groups[1])
    groups = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    assert groups is not None, line
    return groups[1].count(",") + 1

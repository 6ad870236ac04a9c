"""docs/plans.md: the published sizes on some TPUs, estimated and compiled.

`python -m openelm_jax.planning.table > docs/plans.md` writes the page from what the cache of
compiled plans has; with `--compile` it first compiles what is missing, the smallest model first.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

from openelm_jax.config import Experiment
from openelm_jax.experiment_file import load_experiment
from openelm_jax.planning.compiled import CompiledStep, compile_on, known_steps
from openelm_jax.planning.estimate import Estimate, estimate
from openelm_jax.planning.topologies import GIB, Topology, parse_topology

# Experiment, topology, parts a batch is cut into, and what layers compute again: the first rows of
# `plan --search` whose parts are large enough to keep a chip's matrix units busy.
ROWS = (
    ("270m", "v5e:2x4", 32, "dots"),
    ("1_1b", "v5e:4x4", 32, "dots"),
    ("3b", "v6e:4x4", 32, "dots"),
    ("3b", "v5p:4x4x4", 8, "dots"),
    ("3b", "v5e:16x16", 4, "dots"),
)
PAGE = """# Plans

What the published sizes need on some slices of TPUs, found without one. Every row has the paper's
2,048 rows of 2,048 tokens, 4,194,304, in each of its 350,000 steps. This page is written by
`openelm_jax/planning/table.py`.

{table}

- *rows x parts*: rows that a device computes at a time, and how often in a step
  (`training.accumulation`).
- *estimated*: the bytes of a device by `plan --topology`, from the shapes. *compiled*: arguments
  and temporaries of the program that XLA's compiler for that TPU makes of the step, for devices
  that are not here (`plan --compile`); *quick* spares optimisations, *full* is what a run gets.
  *of* is what a program may use.
- *binds*: what is busy longest if everything goes on at the same time, by the peaks of the makers'
  data sheets. *MFU at most*, *days*: what follows from that. It is a bound, and no measurement: a
  good program reaches some three quarters of it. *days, exposed*: if nothing is computed while
  devices send each other something.

{provenance}

Every row is one command:

```sh
{commands}
```
"""


def main(argv: list[str]) -> None:
    """Print the page; with --compile, compile first what the cache lacks."""
    parser = argparse.ArgumentParser(prog="python -m openelm_jax.planning.table")
    parser.add_argument("--compile", choices=("full", "quick"))
    parser.add_argument("--python", metavar="FILE")
    arguments = parser.parse_args(argv)
    planned = [_row(*row) for row in ROWS]
    if arguments.compile:
        for experiment, topology, _ in planned:
            compile_on(topology, experiment, arguments.compile, arguments.python)
    steps = [_best_known(experiment, topology) for experiment, topology, _ in planned]
    print(
        PAGE.format(
            table=_table([figures for _, _, figures in planned], steps),
            provenance=_provenance([step for step in steps if step is not None]),
            commands="\n".join(_command(*row) for row in ROWS),
        ),
        end="",
    )


def _row(
    name: str, topology_name: str, accumulation: int, remat: str
) -> tuple[Experiment, Topology, Estimate]:
    experiment = load_experiment(name)
    training = dataclasses.replace(
        experiment.training,
        accumulation=accumulation,
        remat=remat,  # type: ignore[arg-type]
    )
    experiment = dataclasses.replace(experiment, training=training)
    topology = parse_topology(topology_name)
    return experiment, topology, estimate(experiment, topology)


def _best_known(experiment: Experiment, topology: Topology) -> CompiledStep | None:
    """Return the newest full compilation that is known, else the newest quick one."""
    known = known_steps(experiment, topology)
    return next((step for step in known if step.effort == "full"), next(iter(known), None))


def _table(planned: list[Estimate], steps: list[CompiledStep | None]) -> str:
    heading = (
        "model", "topology", "rows x parts", "remat", "fits", "estimated GiB", "compiled GiB",
        "of GiB", "binds", "MFU at most", "tokens/s at most", "days at least", "days, exposed",
    )  # fmt: skip
    lines = [heading, ("---",) * len(heading)]
    for found, step in zip(planned, steps, strict=True):
        bound = found.bound
        exposed = bound.days * bound.exposed_seconds / bound.step_seconds
        fits = found.fits if step is None else step.fits and step.memory <= found.usable_bytes
        lines.append(
            (
                found.experiment,
                found.topology,
                f"{found.rows} x {found.accumulation}",
                found.remat,
                "yes" if fits else "no",
                f"{found.estimated_bytes / GIB:.2f}",
                "-" if step is None else f"{step.memory / GIB:.2f} ({step.effort})",
                f"{found.usable_bytes / GIB:.2f}",
                bound.binds,
                f"{bound.mfu:.0%}",
                f"{bound.tokens_per_second:,.0f}",
                f"{bound.days:.1f}",
                f"{exposed:.1f}",
            )
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _provenance(steps: list[CompiledStep]) -> str:
    if not steps:
        return "Nothing of this has been compiled yet."
    lines = [
        f"{step.experiment} on {step.topology}: compiled on {step.date} with "
        f"{', '.join(f'{name} {version}' for name, version in step.versions.items())} in "
        f"{step.compilation_seconds:.0f} s, attention by {step.kernel}, code {step.code}."
        for step in steps
    ]
    return "\n".join(f"- {line}" for line in lines)


def _command(name: str, topology: str, accumulation: int, remat: str) -> str:
    return (
        f"python -m openelm_jax.plan --exp {name} --topology {topology} "
        f"--training.accumulation {accumulation} --training.remat {remat} --compile quick"
    )


if __name__ == "__main__":
    main(sys.argv[1:])

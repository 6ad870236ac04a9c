"""Estimates and searches as text."""

from __future__ import annotations

from collections.abc import Sequence

from openelm_jax.config import Experiment
from openelm_jax.planning.collectives import Collective
from openelm_jax.planning.compiled import CompiledStep
from openelm_jax.planning.estimate import Estimate, does_not_fit, settings
from openelm_jax.planning.topologies import GIB, Topology


def format_estimate(experiment: Experiment, found: Estimate) -> str:
    """Return what an experiment needs of a topology, paragraph by paragraph."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in found.mesh.items() if size > 1)
    kept = ", ".join(f"{count} {policy}" for policy, count in found.layers_by_remat.items())
    bound = found.bound
    of_bfloat16 = " of the peak in bfloat16" if experiment.training.dtype == "float32" else ""
    lines = [
        f"{found.experiment} on {found.topology}, {found.devices} devices",
        *_table(
            [
                ("mesh", mesh or "one device"),
                ("rows of a device", f"{found.rows}, {found.accumulation} times a step"),
                ("layers by remat", kept),
                *(("note", note) for note in found.notes),
            ]
        ),
        "",
        "memory of a device, GiB",
        *_table(
            [
                *((name, f"{size / GIB:.2f}") for name, size in found.memory.items()),
                (
                    "estimated",
                    f"{found.estimated_bytes / GIB:.2f} of {found.usable_bytes / GIB:.2f}",
                ),
                *(_compiled_rows(found.compiled) if found.compiled else []),
            ],
            right=True,
        ),
        *([] if found.fits else [does_not_fit(found)]),
        "",
        "collectives of a device a step, from the shapes",
        *(_collectives(found.collectives) or ["  none"]),
        *(
            ["", "collectives in the compiled program, those of a loop once"]
            + (_collectives(found.compiled.collectives) or ["  none"])
            if found.compiled and found.compiled.fits
            else []
        ),
        "",
        "a step at best, seconds",
        *_table(
            [
                ("compute", f"{bound.compute_seconds:.3f}"),
                ("HBM", f"{bound.memory_seconds:.3f}"),
                ("interconnect", f"{bound.interconnect_seconds:.3f}"),
                ("network", f"{bound.network_seconds:.3f}"),
                ("a step, all at the same time", f"{bound.step_seconds:.3f}"),
                ("a step, transfers exposed", f"{bound.exposed_seconds:.3f}"),
            ],
            right=True,
        ),
        f"{bound.binds} binds: MFU at most {bound.mfu:.0%}{of_bfloat16}, "
        f"{bound.tokens_per_second:,.0f} tokens/s, "
        f"{bound.days:.1f} days for {experiment.training.steps:,} steps",
        f"recomputed FLOPs: {found.recomputed_flops / found.model_flops:.1%} of the model's "
        f"{found.model_flops:.3e} a device and step",
    ]
    if found.block_alone is not None and found.block_alone[0]:
        layers, times = found.block_alone
        lines.append(
            f"block alone, on {layers} layers, would fit as well and compute "
            + ("what this need not" if times is None else f"{times:.2f} times as much")
            + " again"
        )
    return "\n".join(lines)


def format_search(experiment: Experiment, topology: Topology, found: Sequence[Estimate]) -> str:
    """Return a table of settings, fastest first; and how to set the fastest."""
    if not found:
        return f"{experiment.name} does not fit on {topology.name}, however it is cut."
    rows = [
        ("step s", "exposed s", "MFU <=", "binds", "GiB", "rows", "accumulation", "remat", "mesh"),
        *(
            (
                f"{each.bound.step_seconds:.3f}",
                f"{each.bound.exposed_seconds:.3f}",
                f"{each.bound.mfu:.0%}",
                each.bound.binds,
                f"{each.estimated_bytes / GIB:.1f}",
                str(each.rows),
                str(each.accumulation),
                each.remat,
                " x ".join(f"{axis} {size}" for axis, size in each.mesh.items() if size > 1) or "1",
            )
            for each in found
        ),
    ]
    best = settings(experiment, topology, found[0]) or "the experiment's own settings"
    heading = (
        f"{experiment.name} on {topology.name}: settings that none beats in memory (of "
        f"{found[0].usable_bytes / GIB:.2f} GiB) and time, with transfers hidden or exposed"
    )
    return "\n".join([heading, *_table(rows, right=True), f"the first: {best}"])


def _compiled_rows(compiled: CompiledStep) -> list[tuple[str, str]]:
    if not compiled.fits:
        return [("needed, says XLA", f"{compiled.needed_bytes / GIB:.2f}")]
    figures = (
        ("compiled: arguments", compiled.argument_bytes),
        ("compiled: temporaries", compiled.temporary_bytes),
        ("compiled: both", compiled.memory),
        ("compiled: outputs", compiled.output_bytes),
        ("compiled: outputs in place of arguments", compiled.alias_bytes),
        ("compiled: peak", compiled.peak_bytes),
    )
    return [
        *((name, f"{size / GIB:.2f}") for name, size in figures),
        ("compiled in, s", f"{compiled.compilation_seconds:.0f}"),
    ]


def _collectives(collectives: Sequence[Collective]) -> list[str]:
    return _table(
        [
            (
                each.kind,
                each.dtype,
                each.axes,
                each.purpose,
                f"{each.count:,}",
                f"{each.bytes / GIB:.3f} GiB",
            )
            for each in sorted(collectives, key=lambda each: -each.bytes)
        ]
    )


def _table(rows: Sequence[tuple[str, ...]], right: bool = False) -> list[str]:
    """Return lines of columns, the first to the left, the last to the right if asked for."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if right and i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines

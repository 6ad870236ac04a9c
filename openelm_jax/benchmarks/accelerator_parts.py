"""What `benchmark accelerator` does on the device itself, a part a process.

Legend: B batch, T time, N query heads, K kv heads, H head dim, L = T + 1 tokens of a row.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from openelm_jax.config import CheckpointConfig, Experiment
from openelm_jax.data.pipeline import open_data
from openelm_jax.errors import UserError
from openelm_jax.model.attention import CausalAttend, causal_attend
from openelm_jax.model.scaling import flops_per_token, parameter_count
from openelm_jax.parallel.attention import choose_kernel
from openelm_jax.parallel.devices import memory_bytes, peak_flops
from openelm_jax.parallel.memory import device_bytes, remats_of
from openelm_jax.parallel.mesh import MeshShape, make_mesh
from openelm_jax.parallel.sharding import make_layout
from openelm_jax.tokenizer import load_tokenizer
from openelm_jax.training.checkpoint import Checkpointer
from openelm_jax.training.clock import Clock
from openelm_jax.training.compilation import compile_step
from openelm_jax.training.feed import feed
from openelm_jax.training.loop import Logged, train_loop
from openelm_jax.training.metrics import speed_figures
from openelm_jax.training.program import Program, make_program
from openelm_jax.training.state import TrainState, optimizer_item
from openelm_jax.xla_flags import compiler_options

GIB = 2**30
SHARE = 0.9
"""Of a device's memory, what a program gets where the device does not say; and of a disk's room,
what a checkpoint may take."""
MOST_ROWS = 64
REHEARSAL_ROWS = 2
WARM_UP = 3
"""Steps whose time does not count."""
LEARNING_RATE = 1e-4
SHARE_FOR_STEPS = 0.8
"""Of a size's time, after which no further steps are taken."""
HEAD_DIMS = (64, 128)
"""Those of the published models."""
ERRORS = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest relative error of a kernel, in the norm, that is called equal."""


def describe_device() -> dict[str, Any]:
    device = jax.devices()[0]
    memory = _memory(device)
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "devices": jax.device_count(),
        "memory_gib": None if memory is None else memory / GIB,
        "peak_tflops": (peak_flops(device.device_kind) or 0) / 1e12 or None,
        "runtime": device.client.platform_version,
    }


def check_kernels() -> Iterator[dict[str, Any]]:
    """Yield the errors of the kernel that `auto` takes, against the portable one in float32.

    Forward and by each input, as norms of the difference over norms; and milliseconds of forward
    and backward beside the portable kernel's. Where `auto` takes the portable one in float32 there
    is nothing to compare.
    """
    device = jax.devices()[0]
    platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
    length, heads = (96, 2) if platform == "cpu" else (2048, 12)
    for head_dim in HEAD_DIMS:
        for dtype in ("bfloat16", "float32"):
            for isolating in (False, True):
                name = f"head_dim {head_dim}, {dtype}{', documents apart' if isolating else ''}"
                try:
                    kernel = choose_kernel(
                        "auto",
                        platform=platform,
                        device_kind=device.device_kind,
                        dtype=jnp.dtype(dtype),
                        head_dim=head_dim,
                        context_length=length,
                        isolating=isolating,
                    )
                except UserError as mistake:
                    yield {name: {"refused": str(mistake)}}
                    continue
                if kernel.attend is causal_attend and dtype == "float32":
                    yield {name: {"kernel": kernel.reason, "left_out": "it is the reference"}}
                    continue
                with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
                    errors, milliseconds = _compare(
                        kernel.attend, length, heads, head_dim, dtype, isolating
                    )
                yield {
                    name: {
                        "kernel": kernel.reason,
                        "errors": errors,
                        "equal": all(error <= ERRORS[dtype] for error in errors.values()),
                        "milliseconds": milliseconds,
                    }
                }


def _compare(
    attend: CausalAttend, length: int, heads: int, head_dim: int, dtype: str, isolating: bool
) -> tuple[dict[str, float], dict[str, float]]:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, length, count, head_dim) for count in (4 * heads, heads, heads, 4 * heads)]
    inputs = [
        jax.random.normal(key, shape, jnp.dtype(dtype))
        for key, shape in zip(keys, shapes, strict=True)
    ]
    numbers_BT = jnp.broadcast_to(jnp.arange(length) // (length // 3), (2, length))
    segments = (numbers_BT, numbers_BT) if isolating else None

    def with_gradients(kernel: CausalAttend):
        @jax.jit
        def run(query_BTNH, key_BTKH, value_BTKH, d_mixed_BTNH):
            mixed_BTNH, pull_back = jax.vjp(
                lambda q, k, v: kernel(q, k, v, segments, 0), query_BTNH, key_BTKH, value_BTKH
            )
            return mixed_BTNH, *pull_back(d_mixed_BTNH)

        return run

    ours, portable = with_gradients(attend), with_gradients(causal_attend)
    with jax.default_matmul_precision("highest"):
        exact = portable(*(array.astype(jnp.float32) for array in inputs))
    found = ours(*inputs)
    names = ("output", "by_query", "by_key", "by_value")
    errors = {
        name: float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))
        for name, a, b in zip(names, found, exact, strict=True)
    }
    return errors, {
        "kernel": _milliseconds(ours, inputs),
        "portable": _milliseconds(portable, inputs),
    }


def _milliseconds(function: Any, inputs: list[jax.Array]) -> float:
    jax.block_until_ready(function(*inputs))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        jax.block_until_ready(function(*inputs))
        times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times)


def train_size(
    experiment: Experiment, folder: Path, seconds: float, steps: int
) -> Iterator[dict[str, Any]]:
    """Yield what training this size on the first device is like; a state is saved in `folder`.

    The batch is halved where the estimate was wrong and memory runs out. Steps end after most of
    `seconds`.
    """
    began = time.monotonic()
    device = jax.devices()[0]
    options = compiler_options(device.device_kind)
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    experiment = largest_batch(experiment, _memory(device), device.device_kind)
    yield {
        "parameters": parameter_count(experiment.model),
        "dtype": experiment.training.dtype,
        "context_length": experiment.model.context_length,
    }
    while True:
        rows, remat = experiment.training.global_batch_size, experiment.training.remat
        yield {"rows": rows, "remat": remat}
        try:
            program = make_program(experiment, make_mesh(MeshShape(), [device]))
            yield _estimate(program)
            compiled, compiling = _compile_twice(program, options)
            yield compiling
            yield from _train(program, compiled, folder, steps, began + SHARE_FOR_STEPS * seconds)
            return
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or rows == 1:
                raise
            yield {f"out_of_memory_at_{rows}_rows": True}
            experiment = _with_rows(experiment, rows // 2, remat)


def largest_batch(experiment: Experiment, memory: int | None, device_kind: str) -> Experiment:
    """Return the experiment with the most rows that fit `memory`, a program's bytes, by the shapes.

    Nothing is computed again if two rows fit so; else whole layers are. Without a known memory
    (a CPU) there are two rows. Raises UserError if not even one fits.
    """
    if memory is None:
        return _with_rows(experiment, REHEARSAL_ROWS, "none")
    layout = make_layout(experiment.model, MeshShape())
    for remat, fewest in (("none", 2), ("block", 1)):
        rows = MOST_ROWS
        while rows >= fewest:
            candidate = _with_rows(experiment, rows, remat)
            remats = remats_of(candidate, layout, device_kind)
            needed = device_bytes(candidate, layout, remats, device_kind).total
            if needed <= memory:
                return candidate
            rows //= 2
    raise UserError(
        f"{experiment.name} needs {needed / GIB:.1f} GiB of a device for one row, and this one has "
        f"{memory / GIB:.1f}: train it on several, see docs/scaling.md."
    )


def _with_rows(experiment: Experiment, rows: int, remat: Any) -> Experiment:
    training = dataclasses.replace(
        experiment.training, global_batch_size=rows, accumulation=1, remat=remat
    )
    data = dataclasses.replace(experiment.data, lanes=None)
    return dataclasses.replace(experiment, training=training, data=data)


def _estimate(program: Program) -> dict[str, Any]:
    kind = program.mesh.devices.flat[0].device_kind
    held = device_bytes(program.experiment, program.layout, program.remats, kind)
    return {"kernel": program.kernel.reason, "estimated_gib": held.total / GIB}


def _compile_twice(program: Program, options: dict[str, str]) -> tuple[Any, dict[str, Any]]:
    """Compile without, and then with, what the first time left on the disk."""
    like = (program.state_like(), program.batch_like(), program.rate_like())
    cold = compile_step(program.train_step, *like, options=options)
    jax.clear_caches()
    warm = compile_step(program.train_step, *like, options=options)
    return warm.function, {
        "compile_seconds_cold": cold.seconds,
        "compile_seconds_warm": warm.seconds,
        "compile_cache": warm.cache,
        "compiled_gib": warm.bytes_held / GIB,
    }


def _train(
    program: Program, compiled: Any, folder: Path, steps: int, until: float
) -> Iterator[dict[str, Any]]:
    experiment, device = program.experiment, program.mesh.devices.flat[0]
    model, rows = experiment.model, experiment.training.global_batch_size
    assert experiment.tokenizer.path is not None
    tokenizer = load_tokenizer(experiment.tokenizer.path, model.vocab_size)
    state, clock = program.new_state(), Clock()
    seconds: list[float] = []
    losses: list[float] = []

    def log(logged: Logged) -> None:
        seconds.append(logged.seconds)
        losses.append(float(logged.metrics.loss))

    row_length = model.context_length + 1
    with (
        closing(
            open_data(experiment.data, tokenizer, row_length=row_length, global_batch_size=rows)
        ) as data,
        feed(data, experiment.data.prefetch, mesh=program.mesh, pad_id=data.pad_id) as batches,
    ):
        begin = time.perf_counter()
        state, done = train_loop(
            state,
            train_step=compiled,
            batches=batches,
            learning_rate=lambda step: LEARNING_RATE,
            start=0,
            steps=steps,
            log=log,
            log_every=1,
            save=lambda step, state, position: None,
            save_every=steps,
            should_stop=lambda: time.monotonic() > until,
            place=program.place_rate,
            clock=clock,
        )
        elapsed = time.perf_counter() - begin
    counted = seconds[WARM_UP:] or seconds
    step_seconds = statistics.median(counted)
    peak = peak_flops(device.device_kind)
    speeds = speed_figures(
        rows * model.context_length / step_seconds, 3 * flops_per_token(model), 1, peak
    )
    memory = device.memory_stats() or {}
    yield {
        "steps": done,
        "step_seconds": step_seconds,
        "step_seconds_range": [min(counted), max(counted)],
        "tokens_per_second": speeds["speed/tokens_per_second"],
        "tflops": speeds["speed/tflops_per_device"],
        "mfu": speeds.get("speed/mfu"),
        "data_wait_share": clock.figures()["time/data"] / elapsed,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "peak_gib": memory["peak_bytes_in_use"] / GIB if "peak_bytes_in_use" in memory else None,
    }
    yield from _save(state, done, folder)


def _save(state: TrainState, step: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield for how long a save holds the steps up, and how long it takes in all."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    free = shutil.disk_usage(folder).free
    if size > SHARE * free:
        yield {"save": f"left out: {size / GIB:.1f} GiB, and the disk has {free / GIB:.1f}"}
        return
    nothing_else = CheckpointConfig(every=10**9, keep_every=None)
    with closing(Checkpointer(folder / "run", nothing_else)) as checkpointer:
        begin = time.perf_counter()
        checkpointer.save(step, params=state.params, optimizer=optimizer_item(state), data={})
        yield {"save_stall_seconds": time.perf_counter() - begin, "saved_gib": size / GIB}
        checkpointer.wait()
        yield {"save_seconds": time.perf_counter() - begin}


def _memory(device: jax.Device) -> int | None:
    """Return the bytes that a program may use, None if they are not known."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    whole = memory_bytes(device.device_kind)
    return limit or (int(SHARE * whole) if whole else None)

"""What norms cost, op by op and fused: `benchmark norms` (the paper's Table 8).

The paper finds OpenELM slow because its 113 RMSNorms a token run as many small kernels. Here all
norms of one forward pass are called in order, each on its own shape, in three ways: every
operation by itself, a norm a call, and all norms in one compiled program, as in a compiled model.
The sides are processes of their own that take turns.

Legend: T time, D model, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from openelm_jax.benchmarks.generation import CURE, NO_PREALLOCATION, PROMPT_TOKENS
from openelm_jax.benchmarks.generation_models import OTHERS, model_of
from openelm_jax.benchmarks.generation_report import Spread, spread_of, title_of
from openelm_jax.benchmarks.paper_tables import MACHINE, TABLE_8
from openelm_jax.benchmarks.processes import Ask, process, questions
from openelm_jax.benchmarks.report import format_machine, format_table, num_cores, short
from openelm_jax.config import DType
from openelm_jax.errors import UserError
from openelm_jax.model.scaling import layer_shapes

BENCHMARK = "benchmark norms"
MODELS = ("1_1b", "olmo_1_18b")
"""Those that Table 8 compares."""
TOKENS = (1, PROMPT_TOKENS)
KINDS = {
    "rms_norm_naive": "RMSNorm, op by op",
    "rms_norm_fused": "RMSNorm, a call a norm",
    "layer_norm": "LayerNorm, a call a norm",
    "rms_norm_program": "RMSNorm, all in one program",
    "layer_norm_program": "LayerNorm, all in one program",
}
IN_TORCH = ("rms_norm_naive", "rms_norm_fused", "layer_norm")
KINDS_OF = {"torch": IN_TORCH, "jax": tuple(KINDS)}
SECONDS = 0.1
"""That a turn takes at least, after its warm-up."""
RMS_EPS = 1e-6
LAYER_EPS = 1e-5

Shape = tuple[int, ...]
Pass = Callable[[], Any]
"""All norms of one forward pass, waited for."""


@dataclass(frozen=True, kw_only=True)
class NormRow:
    """What the norms of a model cost in one way."""

    model: str
    title: str
    program: str
    kind: str
    dtype: str
    tokens: int
    invocations: int
    """Norms of one forward pass, which a token has while tokens come one at a time."""
    call_microseconds: Spread
    token_microseconds: Spread


def norm_shapes(model: str, tokens: int) -> list[Shape]:
    """Return what each norm of a forward pass of `tokens` is applied to, in order."""
    if model in OTHERS:
        fields = OTHERS[model].fields
        return [(tokens, fields["hidden_size"])] * (2 * fields["num_hidden_layers"] + 1)
    config = model_of(model)
    shapes: list[Shape] = []
    for layer in layer_shapes(config):
        shapes += [
            (tokens, config.model_dim),
            (tokens, layer.num_query_heads, config.head_dim),
            (tokens, layer.num_kv_heads, config.head_dim),
            (tokens, config.model_dim),
        ]
    return [*shapes, (tokens, config.model_dim)]


def measure_norms(
    programs: tuple[str, ...],
    dtypes: tuple[DType, ...],
    rounds: int,
    say: Callable[[str], None],
) -> list[NormRow]:
    """Return what norms cost in each program and type.

    Raises UserError without PyTorch if it is asked for.
    """
    if "torch" in programs and importlib.util.find_spec("torch") is None:
        raise UserError(
            f"{BENCHMARK}: torch is not installed: pip install 'openelm_jax[torch]', or leave "
            "torch out of --backend."
        )
    rows: list[NormRow] = []
    with ExitStack() as stack:
        asks: dict[str, Ask] = {
            program: stack.enter_context(
                process(
                    *(serve_norms, program),
                    benchmark=BENCHMARK,
                    cure=CURE,
                    environment=NO_PREALLOCATION,
                )
            )
            for program in programs
        }
        sides = [(program, kind) for program in programs for kind in KINDS_OF[program]]
        for model in MODELS:
            for dtype in dtypes:
                for tokens in TOKENS:
                    say(f"{title_of(model)}: {dtype}, {tokens} tokens")
                    seconds: dict[tuple[str, str], list[float]] = {side: [] for side in sides}
                    for number in range(rounds):
                        for program, kind in sides[:: -1 if number % 2 else 1]:
                            took = asks[program]((kind, model, dtype, tokens))
                            seconds[program, kind].append(took)
                    rows += [
                        _row(model, program, kind, dtype, tokens, seconds[program, kind])
                        for program, kind in sides
                    ]
    return rows


def _row(
    model: str, program: str, kind: str, dtype: str, tokens: int, seconds: list[float]
) -> NormRow:
    invocations = len(norm_shapes(model, tokens))
    return NormRow(
        model=model,
        title=title_of(model),
        program=program,
        kind=kind,
        dtype=dtype,
        tokens=tokens,
        invocations=invocations,
        call_microseconds=spread_of([1e6 * each / invocations for each in seconds]),
        token_microseconds=spread_of([1e6 * each / tokens for each in seconds]),
    )


def serve_norms(connection: Connection, program: str) -> None:
    """Answer (kind, model, dtype, tokens) with the seconds of all norms of a forward pass."""
    make = {"jax": jax_pass, "torch": torch_pass}[program]
    made: dict[Any, Pass] = {}
    for question in questions(connection):
        if question not in made:
            kind, model, dtype, tokens = question
            made[question] = make(kind, norm_shapes(model, tokens), dtype)
        connection.send(seconds_of(made[question]))


def seconds_of(run: Pass) -> float:
    """Return the mean of as many passes as take a tenth of a second, the first not counted."""
    run()
    begin, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begin) < SECONDS or count == 0:
        run()
        count += 1
    return elapsed / count


def jax_pass(kind: str, shapes: list[Shape], dtype: str) -> Pass:
    """Return the norms of a pass in jax, on random numbers; it returns the normed arrays."""
    import jax
    import jax.numpy as jnp

    inputs = [jnp.asarray(x, dtype) for x in random_inputs(shapes)]
    scales = [jnp.ones(shape[-1], jnp.float32) for shape in shapes]
    if kind == "rms_norm_naive":
        norm = _naive_in_jax()
    else:
        norm = jax.jit(_in_jax(kind.removesuffix("_program").removesuffix("_fused")))
    if kind.endswith("_program"):
        every = jax.jit(lambda inputs, scales: list(map(norm, inputs, scales)))
        return lambda: jax.block_until_ready(every(inputs, scales))
    return lambda: jax.block_until_ready([*map(norm, inputs, scales)])


def _in_jax(kind: str) -> Callable[[Any, Any], Any]:
    """Return the model's own norm, as a function of input and scale."""
    import jax.numpy as jnp

    from openelm_jax.model.decoder import Norm

    def norm(x: Any, scale: Any) -> Any:
        bias = {"bias": jnp.zeros_like(scale)} if kind == "layer_norm" else {}
        return Norm(kind).apply({"params": {"scale": scale, **bias}}, x)

    return norm


def _naive_in_jax() -> Callable[[Any, Any], Any]:
    """Return RMSNorm with a compiled program for each operation, as PyTorch's eager mode has."""
    import jax
    import jax.numpy as jnp

    widen = jax.jit(lambda x: x.astype(jnp.float32))
    square = jax.jit(jnp.square)
    mean = jax.jit(lambda x: x.mean(axis=-1, keepdims=True))
    add = jax.jit(lambda x: x + RMS_EPS)
    root = jax.jit(jax.lax.rsqrt)
    multiply = jax.jit(jnp.multiply)
    narrow = jax.jit(lambda x, like: x.astype(like.dtype))

    def norm(x: Any, scale: Any) -> Any:
        wide = x if x.dtype == jnp.float32 else widen(x)
        normal = multiply(wide, root(add(mean(square(wide)))))
        if x.dtype == jnp.float32:
            return multiply(normal, scale)
        return narrow(multiply(narrow(normal, x), scale), x)

    return norm


def torch_pass(kind: str, shapes: list[Shape], dtype: str) -> Pass:
    """Return the norms of a pass in PyTorch, eagerly, on the numbers of `jax_pass`."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(num_cores())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    number_type = getattr(torch, dtype)
    inputs = [torch.from_numpy(x).to(device, number_type) for x in random_inputs(shapes)]
    scales = [torch.ones(shape[-1], dtype=number_type, device=device) for shape in shapes]

    def naive(x: Any, scale: Any) -> Any:
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + RMS_EPS)
        return normal.type_as(x) * scale

    norms: dict[str, Callable[[Any, Any], Any]] = {
        "rms_norm_naive": naive,
        "rms_norm_fused": lambda x, scale: functional.rms_norm(x, scale.shape, scale, RMS_EPS),
        "layer_norm": lambda x, scale: functional.layer_norm(x, scale.shape, scale, eps=LAYER_EPS),
    }
    norm = norms[kind]

    def run() -> Any:
        with torch.inference_mode():
            normal = [*map(norm, inputs, scales)]
            if device == "cuda":
                torch.cuda.synchronize()
            return normal

    return run


def random_inputs(shapes: list[Shape]) -> Iterator[np.ndarray]:
    """Yield an array of random numbers for each norm, the same every time."""
    random = np.random.default_rng(0)
    for shape in shapes:
        yield random.standard_normal(shape, np.float32)


def format_norms(
    machine: dict[str, str],
    commit: str | None,
    rows: list[NormRow],
    in_model: list[str],
) -> str:
    """Return the lines that people read, those of `in_model` among them."""
    heading = ["model", "program", "norm", "type", "tokens", "norms", "us a call", "us a token", ""]
    cells = [
        [
            *(row.title, row.program, KINDS[row.kind], row.dtype),
            *(str(row.tokens), str(row.invocations), short(row.call_microseconds.median)),
            short(row.token_microseconds.median),
            f"({short(row.token_microseconds.low)} to {short(row.token_microseconds.high)})",
        ]
        for row in rows
    ]
    lines = [
        *format_machine(machine),
        f"commit: {commit or 'unknown'}",
        "",
        "All norms of a forward pass, medians of turns (smallest to largest).",
        "",
        *format_table(heading, cells, left=4),
        "",
        *in_model,
        *_paper(),
    ]
    return "\n".join(lines)


def _paper() -> list[str]:
    names = {"layer_norm": "LayerNorm", "rms_norm_naive": "RMSNorm naive"}
    names["rms_norm_fused"] = "RMSNorm fused by Apex"
    cells = [
        [
            *(title_of(model), names[kind], str(len(norm_shapes(model, 1)))),
            f"{rate:g}",
        ]
        for (model, kind), rate in TABLE_8.items()
    ]
    heading = ["model", "norm", "norms", "generation"]
    return [
        f"The paper's Table 8, tokens a second of whole models: {MACHINE}",
        "",
        *format_table(heading, cells, left=2),
    ]

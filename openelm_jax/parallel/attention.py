"""Which kernel computes attention where, and attention over the context axis.

A kernel works on the arrays of one device, inside the step's `shard_map`: it never sees a mesh.

Legend: B batch, T time (of one device), S keys' length (of all devices), N query heads, K kv
heads, H head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from openelm_jax.config import AttentionName
from openelm_jax.errors import UserError
from openelm_jax.model.attention import Attend, CausalAttend, causal_attend
from openelm_jax.parallel.kernels import (
    LANES,
    block_of,
    cudnn_attend,
    splash_attend,
    triton_attend,
)
from openelm_jax.parallel.reduce_scatter import reduce_scatter

LONGEST_SQUARE = 2048
"""Tokens up to which an accelerator may hold a matrix of scores without being told to."""
BLOCKS = {"TPU v6": (1024, 1024), "TPU7x": (1024, 1024)}
"""Largest (query, key) block of splash by the start of a `device_kind`."""
OTHER_BLOCKS = (512, 1024)


class Kernel(NamedTuple):
    """What computes attention, and the phrase for it at start-up ("splash, blocks 512 x 1024")."""

    name: str
    attend: CausalAttend
    reason: str


class Place(NamedTuple):
    """What decides whether a kernel can run: the devices and the shape of the work."""

    platform: str
    device_kind: str
    dtype: np.dtype
    head_dim: int
    context_length: int
    isolating: bool
    context: int
    probe: bool
    interpret: bool


def choose_kernel(
    name: AttentionName,
    *,
    platform: str,
    device_kind: str,
    dtype: Any,
    head_dim: int,
    context_length: int,
    isolating: bool,
    context: int = 1,
    probe: bool = True,
    interpret: bool = False,
) -> Kernel:
    """Return the kernel called `name`; `auto` is the first of the platform's that can run.

    `context` counts the devices that share a row of `context_length` tokens. `probe` runs GPU
    kernels once on the first device; `interpret` emulates kernels of other platforms. Raises
    UserError if the kernel asked for cannot run, or if `auto` would hold a square of scores of
    more than 2,048 tokens on an accelerator.
    """
    place = Place(
        *(platform, device_kind, jnp.dtype(dtype), head_dim, context_length, isolating),
        *(context, probe, interpret),
    )
    if name == "portable":
        return Kernel("portable", causal_attend, f"portable, {_square(place)}")
    if name != "auto":
        kernel = KERNELS[name](place)
        if isinstance(kernel, Kernel):
            return kernel
        raise UserError(
            f"training.attention={name} cannot run: {kernel}; use --training.attention portable "
            f"({_square(place)})."
        )
    faults = []
    for candidate in CANDIDATES.get(platform, ()):
        kernel = KERNELS[candidate](place)
        if isinstance(kernel, Kernel):
            return kernel
        faults.append(kernel)
    if platform == "cpu" or context_length <= LONGEST_SQUARE:
        return Kernel("portable", causal_attend, "; ".join(["portable", *faults]))
    raise UserError(
        f"training.attention=auto finds no kernel for rows of {context_length:,} tokens: "
        f"{'; '.join(faults)}; shorten model.context_length to {LONGEST_SQUARE:,} or accept "
        f"{_square(place)} with --training.attention portable."
    )


def _square(place: Place) -> str:
    queries = place.context_length // place.context
    return f"{queries:,} x {place.context_length:,} scores a head in memory"


def over_context(kernel: CausalAttend, axis: str = "context", size: int = 1) -> Attend:
    """Return what a model in a `shard_map` calls, each device holding T of its rows' T * `size`.

    Keys, values and segments are gathered over `axis`, so that every query meets the keys that it
    meets on one device; their gradients are summed in float32.
    """

    def attend(query_BTNH, key_BTKH, value_BTKH, segments_BT=None):
        if size == 1:
            segments = None if segments_BT is None else (segments_BT, segments_BT)
            return kernel(query_BTNH, key_BTKH, value_BTKH, segments, 0)
        key_BSKH, value_BSKH = _all(axis, key_BTKH), _all(axis, value_BTKH)
        segments = None
        if segments_BT is not None:
            segments = segments_BT, jax.lax.all_gather(segments_BT, axis, axis=1, tiled=True)
        first = jax.lax.axis_index(axis) * query_BTNH.shape[1]
        return kernel(query_BTNH, key_BSKH, value_BSKH, segments, first)

    return attend


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all(axis: str, x_BTKH: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x_BTKH, axis, axis=1, tiled=True)


def _all_forward(axis, x_BTKH):
    # Not by `_all`: a remat policy has to see what is in it.
    return jax.lax.all_gather(x_BTKH, axis, axis=1, tiled=True), None


def _all_backward(axis, _, d_x_BSKH):
    d_x_BTKH = reduce_scatter(d_x_BSKH.astype(jnp.float32), axis, dim=1)
    return (d_x_BTKH.astype(d_x_BSKH.dtype),)


_all.defvjp(_all_forward, _all_backward)


def _splash(place: Place) -> Kernel | str:
    """Return JAX's sparse flash attention for TPUs (Pallas), or why it cannot run."""
    if place.platform != "tpu" and not place.interpret:
        return f"splash runs on TPUs and this is a {place.platform.upper()}"
    if place.head_dim % 64:
        return f"splash takes a head_dim of 64 or its multiples, not {place.head_dim}"
    queries = place.context_length // place.context
    if queries % LANES:
        return f"splash takes a multiple of {LANES} tokens a device, not {queries:,}"
    known = [blocks for start, blocks in BLOCKS.items() if place.device_kind.startswith(start)]
    largest = known[0] if known else OTHER_BLOCKS
    block_q, block_kv = block_of(queries, largest[0]), block_of(place.context_length, largest[1])
    attend = functools.partial(splash_attend, largest, place.interpret)
    return Kernel("splash", attend, f"splash, blocks {block_q} x {block_kv}")


def _cudnn(place: Place) -> Kernel | str:
    """Return cuDNN's flash attention, or why it cannot run."""
    fault = _gpu_fault("cuDNN", place)
    if place.isolating:
        fault = fault or "cuDNN's attention keeps no documents apart (data.isolate_documents)"
    if fault is None and place.probe:
        fault = _probe("cuDNN", cudnn_attend, place)
    return fault or Kernel("cudnn", cudnn_attend, "cudnn")


def _triton(place: Place) -> Kernel | str:
    """Return JAX's flash attention for GPUs (Pallas), or why it cannot run."""
    fault = _gpu_fault("Pallas", place)
    if fault is None and place.context_length % LANES:
        fault = f"Pallas takes a multiple of {LANES} tokens, not {place.context_length:,}"
    if fault is None and place.head_dim not in (64, 128):
        fault = f"Pallas takes a head_dim of 64 or 128, not {place.head_dim}"
    attend = functools.partial(triton_attend, place.interpret)
    if fault is None and place.probe:
        fault = _probe("Pallas", attend, place)
    return fault or Kernel("triton", attend, "triton, which keeps documents apart")


def _gpu_fault(maker: str, place: Place) -> str | None:
    if place.platform != "gpu" and not place.interpret:
        return f"{maker}'s attention runs on GPUs and this is a {place.platform.upper()}"
    if place.dtype == jnp.float32 and not place.interpret:
        return f"{maker}'s attention takes bfloat16 and training.dtype is float32"
    if place.head_dim % 8 or place.head_dim > 128:
        return (
            f"{maker}'s attention takes a head_dim up to 128 that 8 divides, not {place.head_dim}"
        )
    if place.context > 1:
        return f"{maker}'s attention does not run over mesh.context={place.context} devices"
    return None


def _probe(maker: str, attend: CausalAttend, place: Place) -> str | None:
    """Return why `attend` fails on the first device or is far from `causal_attend`, or None."""
    rng = np.random.default_rng(0)
    query_BTNH, key_BSKH, value_BSKH = (
        jnp.asarray(rng.normal(size=(1, LANES, heads, place.head_dim)), place.dtype)
        for heads in (2, 1, 1)
    )
    segments_BT = jnp.arange(LANES)[None] // 48
    segments = (segments_BT, segments_BT) if place.isolating else None

    def results(attend):
        def total(query, key, value):
            mixed_BTNH = attend(query, key, value, segments, 0).astype(jnp.float32)
            return jnp.square(mixed_BTNH).sum()

        return jax.jit(jax.value_and_grad(total, (0, 1, 2)))(query_BTNH, key_BSKH, value_BSKH)

    try:
        ours, expected = jax.device_get((results(attend), results(causal_attend)))
    except Exception as error:  # whatever CUDA, cuDNN, XLA or Triton have to say
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"{maker}'s attention fails on this {place.device_kind} ({lines[0][:200]})"
    for actual, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        apart = np.abs(np.float32(actual) - np.float32(wanted)).max()
        if not apart <= 0.05 * np.abs(np.float32(wanted)).max():
            return f"{maker}'s attention computes wrong numbers on this {place.device_kind}"
    return None


KERNELS: dict[str, Callable[[Place], Kernel | str]] = {
    "splash": _splash,
    "cudnn": _cudnn,
    "triton": _triton,
}
CANDIDATES: dict[str, tuple[str, ...]] = {
    "tpu": ("splash",),
    "gpu": ("cudnn", "triton"),
    "cpu": (),
}

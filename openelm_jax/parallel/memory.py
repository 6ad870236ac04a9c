"""What a device of a mesh holds of a step, and which layers compute again so that it fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from openelm_jax.config import Experiment
from openelm_jax.errors import UserError
from openelm_jax.model.memory import (
    FLOAT32,
    GIB,
    Remat,
    StepBytes,
    choose_remat,
    loss_chunk_size,
    step_bytes,
    uniform_block,
)
from openelm_jax.parallel.attention import choose_kernel
from openelm_jax.parallel.devices import memory_bytes
from openelm_jax.parallel.sharding import Layout

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
SHARE_FOR_BUDGET = 0.9
"""Of a device's memory, what `training.remat=budget` fills unless memory_gib says otherwise."""
ATTEMPTS = 16
TPU_LANES = 128
LOOP_SLACK = 1.1
"""What a TPU's compiler allots for activations, over what is alive at any time, if the parts of a
batch are a loop: gaps between arrays. (Seen in docs/plans.md.)"""


def tokens_of_part(experiment: Experiment, layout: Layout) -> int:
    """Return the tokens that a device computes at a time."""
    training, mesh = experiment.training, layout.mesh
    rows = training.global_batch_size // (mesh.row_shards * training.accumulation)
    return rows * experiment.model.context_length // mesh.context


def loss_chunk_of(experiment: Experiment, layout: Layout) -> int:
    """Return the tokens of a device whose logits exist at the same time."""
    tokens = -(-tokens_of_part(experiment, layout) // layout.mesh.tensor)
    return experiment.training.loss_chunk or loss_chunk_size(experiment.model, tokens)


def device_bytes(
    experiment: Experiment, layout: Layout, remats: Sequence[Remat], device_kind: str
) -> StepBytes:
    """Return what one device holds at the worst moment of a step, by parts."""
    training, mesh = experiment.training, layout.mesh
    tokens = tokens_of_part(experiment, layout)
    held = step_bytes(
        experiment.model,
        remats,
        tokens=tokens,
        dtype_bytes=DTYPE_BYTES[training.dtype],
        loss_chunk=min(loss_chunk_of(experiment, layout), tokens),
        shards=shards_of(layout),
        accumulation=training.accumulation,
        first_moment_bytes=DTYPE_BYTES[experiment.optimizer.first_moment_dtype],
        shapes=layout.layers,
        context=mesh.context,
        lanes=lanes_of(device_kind),
    )
    held = dataclasses.replace(held, scores=score_bytes(experiment, layout, device_kind))
    if lanes_of(device_kind) and training.accumulation > 1:
        return dataclasses.replace(held, activations=int(LOOP_SLACK * held.activations))
    return held


def score_bytes(experiment: Experiment, layout: Layout, device_kind: str) -> int:
    """Return what attention's gradient holds of scores in the layer with the most heads.

    Only the portable kernel holds any: the weights and their gradient in float32, and what the
    products read where their type is a narrower one. Raises UserError where `choose_kernel` does.
    """
    model, training, context = experiment.model, experiment.training, layout.mesh.context
    kernel = choose_kernel(
        training.attention,
        platform=_platform(device_kind),
        device_kind=device_kind,
        dtype=training.dtype,
        head_dim=model.head_dim,
        context_length=model.context_length,
        isolating=experiment.data.isolate_documents,
        context=context,
        probe=False,
    )
    if kernel.name != "portable":
        return 0
    heads = max(layer.num_query_heads for layer in layout.layers)
    scores = tokens_of_part(experiment, layout) * heads * model.context_length
    return scores * (2 * FLOAT32 + DTYPE_BYTES[training.dtype] % FLOAT32)


def _platform(device_kind: str) -> str:
    return {"TPU": "tpu", "NVI": "gpu"}.get(device_kind[:3], "cpu")


def shards_of(layout: Layout) -> int:
    """Return among how many devices the parameters are divided; norms, which are not, aside."""
    embedding = layout.placements["embedding"]
    return math.prod(getattr(layout.mesh, axis) for axis in embedding.axes)


def lanes_of(device_kind: str) -> int:
    """Return the width of a TPU's registers, which its arrays are filled up to; 0 for others."""
    return TPU_LANES if device_kind.startswith("TPU") else 0


def remats_of(experiment: Experiment, layout: Layout, device_kind: str) -> tuple[Remat, ...]:
    """Return what each layer computes again on devices of this kind.

    Where weights are gathered, `none` is `dots`: a backward pass that gathers them again has its
    pointwise functions computed again too, which costs no product and halves what is kept.
    Raises UserError where `training.remat` is budget and no choice fits it, or it is not known.
    """
    training = experiment.training
    among: tuple[Remat, ...] = ("dots", "save_attention", "block")
    if shards_of(layout) == 1:
        among = ("none", "dots", "save_attention", "block")
    if training.remat != "budget":
        remat: Remat = training.remat
        return (among[0] if remat == "none" else remat,) * len(layout.layers)
    limit = budget_of(experiment, device_kind)
    block: Remat = "block"
    blocks = (block,) * len(layout.layers)
    held = device_bytes(experiment, layout, blocks, device_kind)
    if held.total > limit:
        raise UserError(
            f"training.remat=budget: {limit / GIB:.3g} GiB of a device are less than the "
            f"{held.total / GIB:.3g} GiB that a step needs with every layer computed again: raise "
            "training.accumulation, training.memory_gib or the number of devices."
        )
    return _fitting(experiment, layout, device_kind, partial(choose_remat, among=among))


def uniform_remats_of(
    experiment: Experiment, layout: Layout, device_kind: str
) -> tuple[Remat, ...]:
    """Return what `block` alone does best in the same budget: some neighbours have it, the others
    what repeats no product, `none` on one device and `dots` on a mesh."""
    rest: Remat = "none" if shards_of(layout) == 1 else "dots"
    return _fitting(experiment, layout, device_kind, partial(uniform_block, rest=rest))


def budget_of(experiment: Experiment, device_kind: str) -> float:
    """Return the bytes that `training.remat=budget` may fill; UserError if they are not known."""
    memory, given = memory_bytes(device_kind), experiment.training.memory_gib
    if given is not None:
        return given * GIB
    if memory is None:
        raise UserError(
            f"training.remat=budget: the memory of a {device_kind} is not known; say how much of "
            "it to fill with --training.memory-gib."
        )
    return SHARE_FOR_BUDGET * memory


def _fitting(
    experiment: Experiment, layout: Layout, device_kind: str, choose: Callable[..., Any]
) -> tuple[Remat, ...]:
    """Return what `choose` takes in the largest budget for activations with which all fits.

    `block` everywhere, which must fit, where there is none.
    """
    limit = budget_of(experiment, device_kind)
    block: Remat = "block"
    blocks = (block,) * len(layout.layers)
    budget = limit - device_bytes(experiment, layout, blocks, device_kind).state
    for _ in range(ATTEMPTS):
        try:
            remats = choose(
                experiment.model,
                tokens=tokens_of_part(experiment, layout),
                budget_bytes=int(budget),
                dtype_bytes=DTYPE_BYTES[experiment.training.dtype],
                shapes=layout.layers,
                context=layout.mesh.context,
                lanes=lanes_of(device_kind),
            )
        except UserError:  # less than blocks need, which fit: the worst moment is another one
            break
        # Activations are not all that a moment holds.
        excess = device_bytes(experiment, layout, remats, device_kind).total - limit
        if excess <= 0:
            return remats
        budget -= excess
    return blocks

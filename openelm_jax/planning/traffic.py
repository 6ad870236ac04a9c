"""What the devices of a mesh send each other in a step, from the table of `parallel/sharding.py`.

Letters: B rows, T tokens of a device, S tokens of a row, D model, K kv heads, H head dim.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from openelm_jax.config import Experiment
from openelm_jax.parallel.sharding import Layout, Placement
from openelm_jax.planning.collectives import Collective

Key = tuple[str, str, str, str]
COMPUTE_BYTES = {"bfloat16": 2, "float32": 4}


def planned_collectives(
    experiment: Experiment, layout: Layout, remats: Sequence[str]
) -> tuple[Collective, ...]:
    """Return the collectives of a step; `remats` is what each layer keeps, by `training.remat`.

    Weights are gathered forward and again backward in the compute type, by each part of the batch,
    and their gradients scattered in float32; what is summed over the copies of the state is summed
    once a step.
    """
    sent: dict[Key, list[int]] = defaultdict(lambda: [0, 0])
    training, model, mesh = experiment.training, experiment.model, layout.mesh
    sizes = mesh._asdict()
    parts = training.accumulation
    local_elements = _local_elements(experiment, layout)

    def send(
        kind: str, dtype: str, axes: Sequence[str], purpose: str, elements: float, times: int
    ) -> None:
        over = [axis for axis in axes if sizes[axis] > 1]
        if over and elements and times:
            entry = sent[kind, dtype, "+".join(over), purpose]
            entry[0] += times
            entry[1] += int(elements * COMPUTE_BYTES[dtype]) * times

    def send_weight(path: str, placement: Placement, gatherings: int) -> None:
        data = [axis for axis in placement.axes if axis != "tensor"]
        whole = math.prod(placement.shape)
        local = local_elements.get(path, whole)
        over_tensor = "tensor" in placement.axes
        exchanged = local // math.prod(sizes[axis] for axis in data)
        for times, kind, dtype, purpose in (
            (gatherings * parts, "all-gather", training.dtype, "weights"),
            (parts, "reduce-scatter", "float32", "gradients"),
        ):
            send(kind, dtype, data, purpose, local, times)
            if over_tensor and placement.columns is not None:
                send("all-to-all", dtype, ["tensor"], purpose, exchanged, times)
            elif over_tensor and (kind == "all-gather" or placement.partial):
                send(kind, dtype, ["tensor"], purpose, exchanged, times)
        stored = whole // math.prod(sizes[axis] for axis in placement.axes)
        send("all-reduce", "float32", placement.summed_at_last, "gradients", stored, 1)

    for path, placement in layout.placements.items():
        if len(placement.shape) == 1:
            axes = placement.summed_at_last
            send("all-reduce", "float32", axes, "norms", placement.shape[0], 1)
        elif path in ("embedding", "head"):
            # Looked up forward, and once more where the loss makes its gradient on the way forward.
            send_weight(path, placement, 1)
            if path == "embedding" and model.tie_embeddings:
                before = {key: list(entry) for key, entry in sent.items()}
                send_weight(path, placement, 1)
                # The sum over the copies is of both gradients together.
                for key, entry in before.items():
                    if key[0] == "all-reduce":
                        sent[key] = entry
        else:
            send_weight(path, placement, 2)

    rows = training.global_batch_size // (mesh.row_shards * parts)
    tokens = rows * model.context_length // mesh.context
    # Backward at its end: each device has the loss of a part of the tokens only.
    send("all-reduce", training.dtype, ["tensor"], "activations", tokens * model.model_dim, parts)
    for shape, kind, remat in zip(layout.layers, layout.attention, remats, strict=True):
        if mesh.tensor > 1:
            # Forward at the end of each half, backward at its beginning; what was not kept again.
            halves = 2 if kind != "whole" else 1
            again = int(remat in ("block", "save_attention") and kind != "whole")
            times = (2 * halves + again) * parts
            hidden = tokens * model.model_dim
            send("all-reduce", training.dtype, ["tensor"], "activations", hidden, times)
        keys = 2 * rows * model.context_length * shape.kv_dim
        if kind == "queries":
            keys = keys * shape.num_query_heads // shape.num_kv_heads
        times = (1 if remat == "none" else 2) * parts
        send("all-gather", training.dtype, ["context"], "keys and values", keys, times)
        send("reduce-scatter", "float32", ["context"], "keys and values", keys, parts)
    return tuple(
        Collective(kind=kind, dtype=dtype, axes=axes, purpose=purpose, count=count, bytes=size)
        for (kind, dtype, axes, purpose), (count, size) in sent.items()
    )


def _local_elements(experiment: Experiment, layout: Layout) -> dict[str, int]:
    """Return the elements of each layer's matrices that a device computes with."""
    halves = 2 if experiment.model.ffn_with_glu else 1
    elements: dict[str, int] = {}
    for number, shape in enumerate(layout.layers):
        name = f"layers_{number}"
        width = shape.model_dim
        elements |= {
            f"{name}/attention/qkv": width * (shape.query_dim + 2 * shape.kv_dim),
            f"{name}/attention/out": width * shape.query_dim,
            f"{name}/ffn/up": width * halves * shape.ffn_dim,
            f"{name}/ffn/down": width * shape.ffn_dim,
        }
    return elements

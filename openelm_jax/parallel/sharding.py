"""The one table from a parameter's path to the mesh: where it lies, and what a device computes.

Where it lies: every matrix is divided along model_dim, over the axes fsdp, context and tensor
together; norms lie everywhere. What a device computes: with a tensor axis, its own heads and FFN
columns of each layer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from openelm_jax.config import ModelConfig
from openelm_jax.model.scaling import LayerShape, layer_shapes
from openelm_jax.parallel.mesh import ROW_AXES, MeshShape, rings_of

STORED_OVER = ("fsdp", "context", "tensor")
"""The axes that may divide a matrix, outermost first."""


class Piece(NamedTuple):
    """Columns `start` to `stop` of a matrix, filled up to `width` with zeros."""

    start: int
    stop: int
    width: int


class Columns(NamedTuple):
    """The columns (or rows) of a matrix that each device of the tensor axis computes with."""

    pieces: tuple[Piece, ...]
    """Those of the first device, then of the second; each has the same number."""
    size: int
    """Columns of the whole matrix."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One parameter on the mesh."""

    shape: tuple[int, ...]
    dim: int | None = None
    """The dimension that is divided, that of model_dim; None for norms."""
    axes: tuple[str, ...] = ()
    """The axes that divide it, outermost first; with none, every device has a whole copy."""
    columns: Columns | None = None
    """What a device computes with of the other dimension; None: all."""
    partial: bool = False
    """Whether the gradients of the tensor axis's devices are parts of a sum, or all the same."""
    rings: tuple[int, ...] = ()
    """Lengths of the rings of TPUs that the fsdp axis is made of, outermost first; () is one."""

    @property
    def spec(self) -> PartitionSpec:
        if self.dim is None or not self.axes:
            return PartitionSpec()
        return PartitionSpec(*[None] * self.dim, self.axes)

    @property
    def summed_at_last(self) -> tuple[str, ...]:
        """The axes over which a step sums the gradient when all parts of the batch are done."""
        axes = [axis for axis in ("replica", "fsdp", "context") if axis not in self.axes]
        if self.partial and "tensor" not in self.axes:
            axes.append("tensor")
        return tuple(axes)


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """A model on a mesh: parameters by path, layers by what a device computes of them."""

    mesh: MeshShape
    placements: dict[str, Placement]
    layers: tuple[LayerShape, ...]
    attention: tuple[str, ...]
    """How each layer's attention is divided by the tensor axis: one of ATTENTION's keys."""


ATTENTION = {
    "whole": "every device computes all heads",
    "heads": "a device computes its own key/value heads and their queries",
    "queries": "a device computes its own query heads, and all key/value heads",
}


def layout_on(config: ModelConfig, mesh: Mesh) -> Layout:
    """Return the layout of a model on a mesh of devices."""
    return make_layout(config, MeshShape(**mesh.shape), rings_of(mesh))


@lru_cache
def make_layout(config: ModelConfig, mesh: MeshShape, rings: tuple[int, ...] = ()) -> Layout:
    """Return where the parameters of a model lie on a mesh and what a device computes.

    `rings` are those of TPUs that the fsdp axis is made of, outermost first.
    """
    placements = {"embedding": _matrix(config, mesh, (config.vocab_size, config.model_dim), 1)}
    placements["embedding"] = dataclasses.replace(placements["embedding"], partial=True)
    if not config.tie_embeddings:
        placements["head"] = placements["embedding"]
    layers, attention = [], []
    for number, shape in enumerate(layer_shapes(config)):
        kind = _attention_kind(shape, mesh.tensor)
        attention.append(kind)
        layers.append(_local_shape(shape, kind, mesh.tensor))
        placements |= _layer(config, mesh, f"layers_{number}", shape, kind)
    placements |= _norm(config, "final_norm", config.model_dim)
    placements = {
        path: dataclasses.replace(placement, rings=rings) for path, placement in placements.items()
    }
    return Layout(
        mesh=mesh, placements=placements, layers=tuple(layers), attention=tuple(attention)
    )


def path_of_leaf(path: tuple[Any, ...]) -> str:
    """Return the parameter's path of a leaf of a tree of parameters, or of their moments."""
    return "/".join(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


def state_specs(layout: Layout, tree: Any) -> Any:
    """Return the PartitionSpec of each leaf: a parameter's, or its moment's; all else is whole.

    So are the parts of matrices of few bits, and adapters.
    """

    def spec(path: tuple[Any, ...], _: Any) -> PartitionSpec:
        placement = layout.placements.get(path_of_leaf(path))
        is_part = bool(path) and not isinstance(path[-1], jax.tree_util.DictKey)
        return PartitionSpec() if placement is None or is_part else placement.spec

    return jax.tree_util.tree_map_with_path(spec, tree)


def state_shardings(layout: Layout, mesh: Mesh, tree: Any) -> Any:
    """Return the NamedSharding of each leaf of a tree of parameters or moments."""
    specs = state_specs(layout, tree)
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Return how a batch lies: divided by rows, each row whole."""
    return NamedSharding(mesh, PartitionSpec(ROW_AXES))


def _layer(
    config: ModelConfig, mesh: MeshShape, name: str, shape: LayerShape, kind: str
) -> dict[str, Placement]:
    model_dim, up_dim = config.model_dim, (2 if config.ffn_with_glu else 1) * shape.ffn_dim
    qkv_dim = shape.query_dim + 2 * shape.kv_dim
    qkv, out = _attention_columns(shape, kind, mesh.tensor)
    up, down = _ffn_columns(config, shape, mesh.tensor)
    attention = f"{name}/attention"
    placements = {
        f"{attention}/qkv": _matrix(config, mesh, (model_dim, qkv_dim), 0, qkv),
        f"{attention}/out": _matrix(config, mesh, (shape.query_dim, model_dim), 1, out),
        f"{name}/ffn/up": _matrix(config, mesh, (model_dim, up_dim), 0, up),
        f"{name}/ffn/down": _matrix(config, mesh, (shape.ffn_dim, model_dim), 1, down),
        **_norm(config, f"{name}/attention_norm", model_dim),
        **_norm(config, f"{name}/ffn_norm", model_dim),
    }
    if config.normalize_qk_projections:
        for norm in ("query_norm", "key_norm"):
            partial = kind != "whole"
            placements |= _norm(config, f"{attention}/{norm}", config.head_dim, partial=partial)
    return placements


def _matrix(
    config: ModelConfig,
    mesh: MeshShape,
    shape: tuple[int, int],
    dim: int,
    columns: Columns | None = None,
) -> Placement:
    """Divide a matrix by as many devices as model_dim allows, the outermost axes first."""
    assert shape[dim] == config.model_dim
    axes: list[str] = []
    shards = 1
    for axis in STORED_OVER:
        size = getattr(mesh, axis)
        if size > 1 and config.model_dim % (shards * size) == 0:
            axes.append(axis)
            shards *= size
    return Placement(
        shape=shape,
        dim=dim,
        axes=tuple(axes),
        columns=columns,
        partial=columns is not None,
    )


def _norm(
    config: ModelConfig, path: str, width: int, *, partial: bool = False
) -> dict[str, Placement]:
    names = ("scale", "bias") if config.normalization == "layer_norm" else ("scale",)
    return {f"{path}/{name}": Placement(shape=(width,), partial=partial) for name in names}


def _attention_kind(shape: LayerShape, tensor: int) -> str:
    if tensor == 1 or shape.num_query_heads % tensor:
        return "whole"
    return "queries" if shape.num_kv_heads % tensor else "heads"


def _local_shape(shape: LayerShape, kind: str, tensor: int) -> LayerShape:
    shape = dataclasses.replace(shape, ffn_dim=-(-shape.ffn_dim // tensor))
    if kind == "whole":
        return shape
    shape = dataclasses.replace(shape, num_query_heads=shape.num_query_heads // tensor)
    if kind == "queries":
        return shape
    return dataclasses.replace(shape, num_kv_heads=shape.num_kv_heads // tensor)


def _attention_columns(
    shape: LayerShape, kind: str, tensor: int
) -> tuple[Columns | None, Columns | None]:
    """Return the columns of q|k|v and the rows of the output projection."""
    if kind == "whole":
        return None, None
    key, value = shape.query_dim, shape.query_dim + shape.kv_dim
    qkv, out = [], []
    for device in range(tensor):
        query = _share(0, shape.query_dim, device, tensor)
        kv = (device, tensor) if kind == "heads" else (0, 1)
        qkv += [query, _share(key, shape.kv_dim, *kv), _share(value, shape.kv_dim, *kv)]
        out.append(query)
    return Columns(tuple(qkv), value + shape.kv_dim), Columns(tuple(out), shape.query_dim)


def _ffn_columns(
    config: ModelConfig, shape: LayerShape, tensor: int
) -> tuple[Columns | None, Columns | None]:
    """Return the columns of gate|up and the rows of the projection down."""
    if tensor == 1:
        return None, None
    starts = (0, shape.ffn_dim) if config.ffn_with_glu else (0,)
    up = [
        _share(start, shape.ffn_dim, device, tensor) for device in range(tensor) for start in starts
    ]
    down = [_share(0, shape.ffn_dim, device, tensor) for device in range(tensor)]
    return Columns(tuple(up), len(starts) * shape.ffn_dim), Columns(tuple(down), shape.ffn_dim)


def _share(start: int, size: int, device: int, devices: int) -> Piece:
    """Return a device's share of `size` columns from `start` on."""
    width = -(-size // devices)
    first, last = (min(part * width, size) for part in (device, device + 1))
    return Piece(start + first, start + last, width)

"""Triton's `optimization.cuda.graph_spec`, the shapes to capture graphs for, as sizes of buckets.

Triton lets a graph serve the shapes between `graph_lower_bound` and its own, on uninitialised padding; without a bound
its own alone. Here a bucket serves whatever is smaller, where padding is proven to change nothing, so that the bound is
checked but not needed. Buckets are every combination of the sizes, not the given ones alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .errors import ConfigError, nearest
from .signature import Shape, Signature

_KEY = "optimization.cuda.graph_spec"


@dataclass(frozen=True)
class GraphSpec:
    """The shape of one graph: rows (0 for a model that Triton does not batch), and input shapes without them."""

    batch_size: int
    inputs: Mapping[str, Shape]
    has_lower_bound: bool = False


def parse_graph_specs(written: Iterable[Mapping[str, Any]], max_batch_size: int) -> tuple[GraphSpec, ...]:
    """The entries of `graph_spec` in Triton's JSON.

    Raises:
        ConfigError: a batch size is not one of the model's, a dim is below 1, or a lower bound is above its graph.
    """
    return tuple(_parse(entry, max_batch_size) for entry in written)


def _parse(entry: Mapping[str, Any], max_batch_size: int) -> GraphSpec:
    spec = _parse_shapes(entry, max_batch_size)
    if bound := entry.get("graph_lower_bound"):
        lower = _parse_shapes(bound, max_batch_size)
        above = [
            name
            for name, shape in lower.inputs.items()
            if len(shape) != len(spec.inputs.get(name, ())) or any(map(int.__gt__, shape, spec.inputs[name]))
        ]
        if above or lower.batch_size > spec.batch_size:
            what = f"input '{above[0]}'" if above else "batch_size"
            raise ConfigError(f"{_KEY}: {what} of graph_lower_bound must not be above that of its graph_spec")
        return replace(spec, has_lower_bound=True)
    return spec


def _parse_shapes(entry: Mapping[str, Any], max_batch_size: int) -> GraphSpec:
    batch_size = int(entry.get("batch_size") or 0)
    if not min(max_batch_size, 1) <= batch_size <= max_batch_size:
        rule = f"from 1 to max_batch_size ({max_batch_size})" if max_batch_size else "0, as max_batch_size is"
        raise ConfigError(f"{_KEY}: batch_size must be {rule}, got {batch_size}")
    inputs = {name: tuple(map(int, shape.get("dim", ()))) for name, shape in (entry.get("input") or {}).items()}
    for name, shape in inputs.items():
        if min(shape, default=1) < 1:
            raise ConfigError(f"{_KEY}: input '{name}' must have dims from 1, got {list(shape)}")
    return GraphSpec(batch_size, inputs)


def difference(specs: Iterable[GraphSpec], *, is_padded: bool) -> str:
    """What Triton would do with these graphs and is otherwise here, or an empty string."""
    if is_padded:
        return f"{_KEY}: its graphs also serve smaller shapes, below a graph_lower_bound too, where padding is proven"
    if any(spec.has_lower_bound for spec in specs):
        return f"{_KEY}: graph_lower_bound is not used, since the parameter padding is off"
    return ""


def bucket_sizes(
    specs: Iterable[GraphSpec], signature: Signature, fixed: Mapping[int, int]
) -> dict[str, tuple[int, ...]]:
    """The sizes of each dimension in these graphs, ascending, as the parameter `buckets` would give them.

    Args:
        fixed: the dimensions, by place, that the config gives one size.

    Raises:
        ConfigError: an input is not one of the model's, or its dims do not fit it.
    """
    found: dict[str, set[int]] = {}
    for spec in specs:
        shapes = {name: _model_shape(name, shape, spec.batch_size, signature) for name, shape in spec.inputs.items()}
        sizes, conflict = signature.sizes(shapes)
        if conflict:
            raise ConfigError(f"{_KEY}: {conflict}; give one size")
        for place, (dim, size) in enumerate(zip(signature.dims, sizes, strict=True)):
            if signature.is_batched and place == 0:
                size = spec.batch_size
            if place in fixed and size not in (-1, fixed[place]):
                raise ConfigError(f"{_KEY}: '{dim.name}' is {size}, but config.pbtxt's dims say {fixed[place]}")
            if size > 0:
                found.setdefault(dim.name, set()).add(size)
    return {name: tuple(sorted(sizes)) for name, sizes in found.items()}


def _model_shape(name: str, dims: Shape, batch_size: int, signature: Signature) -> Shape:
    """An input's shape with its rows."""
    known = signature.input(name)
    if known is None:
        raise ConfigError(f"{_KEY}: the model has no input '{name}'{nearest(name, (s.name for s in signature.inputs))}")
    has_rows = signature.is_batched and (name, 0) in signature.dims[0].axes
    wanted = known.shape
    if dims == (1,) and len(wanted) == int(has_rows):  # Triton has no scalars
        dims = ()
    shape = (batch_size, *dims) if has_rows else dims
    if len(shape) != len(wanted) or any(
        isinstance(size, int) and size != given for size, given in zip(wanted, shape, strict=True)
    ):
        model_dims = [size if isinstance(size, int) else -1 for size in wanted[1 if has_rows else 0 :]]
        raise ConfigError(f"{_KEY}: input '{name}' has dims {list(dims)}, but the model {model_dims}")
    return shape

"""What an ONNX model takes and gives, and its dynamic dimensions.

A dimension is one size that may differ between requests. Axes that carry the same symbolic name share it, unless the
name cannot be trusted: missing, `?`, an exporter's `unk__7`, or used twice in one tensor. Such an axis is a dimension
of its own, addressed by input and axis: `x[3]`. Any axis can be addressed so; it then leaves its name's dimension.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from .dtypes import DType
from .errors import ConfigError, nearest

Shape = tuple[int, ...]
Sizes = tuple[int, ...]
_UNTRUSTED = re.compile(r"\?|unk__\d+|dynamic_axes_\d+|None")
BATCH = "batch"


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the ONNX model: `shape` holds a size, a symbolic name or None for each axis."""

    name: str
    dtype: DType
    shape: tuple[int | str | None, ...]
    is_required: bool = True


@dataclass(frozen=True)
class Dimension:
    """One dynamic size and the input axes that have it."""

    name: str
    axes: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Signature:
    """A model's tensors and dimensions. With `is_batched`, `dims[0]` is axis 0 of every input."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dims: tuple[Dimension, ...]
    is_batched: bool
    aliases: Mapping[str, str] = field(default_factory=dict)

    def input(self, name: str) -> TensorSpec | None:
        """The input of that name."""
        return next((spec for spec in self.inputs if spec.name == name), None)

    def index(self, dim: str) -> int:
        """The place in `dims` and in every `Sizes` of a dimension, by its name or another name of its axes."""
        name = self.aliases.get(dim, dim)
        return next(i for i, dimension in enumerate(self.dims) if dimension.name == name)

    def sizes(self, shapes: Mapping[str, Shape]) -> tuple[Sizes, str]:
        """The size of each dimension in these input shapes (-1 where no given input has it), and a conflict.

        The conflict is a sentence when two axes of one dimension differ, else empty. ONNX Runtime does not demand
        that they are equal (a size of 1 may broadcast), so such a request is run alone, as it is.
        """
        found, conflict = [], ""
        for dimension in self.dims:
            size = -1
            for name, axis in dimension.axes:
                if name in shapes:
                    this = shapes[name][axis]
                    if size not in (-1, this):
                        conflict = f"dimension '{dimension.name}' is {size} and, in input '{name}', {this}"
                    size = max(size, this)
            found.append(size)
        return tuple(found), conflict

    def shape(self, spec: TensorSpec, sizes: Sizes) -> Shape:
        """The shape of an input when the dimensions have these sizes; -1 where a size is not known."""
        return tuple(sizes[p] if p is not None else size for p, size in self._plans[spec.name])

    @cached_property
    def _plans(self) -> dict[str, tuple[tuple[int | None, int], ...]]:
        """For each axis of an input the place of its dimension, or None and its fixed size."""
        places = {axis: i for i, dim in enumerate(self.dims) for axis in dim.axes}
        return {
            spec.name: tuple(
                (places.get((spec.name, axis)), size if isinstance(size, int) else -1)
                for axis, size in enumerate(spec.shape)
            )
            for spec in self.inputs
        }


def build(
    inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec], *, is_batched: bool, addressed: Iterable[str] = ()
) -> Signature:
    """Find the dimensions of a model's inputs.

    Args:
        is_batched: Triton batches the model, so axis 0 of every input is the dimension `batch`, whatever its name
            (an optional input of a fixed size, which is an initializer that may be overridden, has no rows).
        addressed: names used in `buckets`; those written `input[axis]` become dimensions of their own.

    Raises:
        ConfigError: a name in `addressed` is not one of the model's.
    """
    inputs, outputs, addressed = tuple(inputs), tuple(outputs), tuple(addressed)
    axes: dict[str, list[tuple[str, int]]] = {BATCH: []} if is_batched else {}
    aliases: dict[str, str] = {}
    for spec in inputs:
        repeats = Counter(size for size in spec.shape if isinstance(size, str))
        for axis, size in enumerate(spec.shape):
            by_axis = f"{spec.name}[{axis}]"
            if is_batched and axis == 0 and (spec.is_required or not isinstance(size, int)):
                key = BATCH
                aliases.setdefault(str(size), BATCH)
                aliases[by_axis] = BATCH
            elif isinstance(size, int):
                continue
            else:
                is_named = bool(size) and not _UNTRUSTED.fullmatch(str(size)) and repeats[str(size)] == 1
                is_own = by_axis in addressed or not is_named or (is_batched and size == BATCH)
                key = by_axis if is_own else str(size)
            axes.setdefault(key, []).append((spec.name, axis))
    aliases = {name: key for name, key in aliases.items() if name not in axes}
    for name in addressed:
        if name not in axes and name not in aliases:
            raise ConfigError(f"parameter 'buckets': the model has no dynamic dimension '{name}'{nearest(name, axes)}")
    dims = tuple(Dimension(name, tuple(members)) for name, members in axes.items())
    return Signature(inputs, outputs, dims, is_batched, aliases)

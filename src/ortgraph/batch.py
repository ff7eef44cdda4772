"""A request as the engine sees it, and the checks that refuse a bad one alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .dtypes import DType
from .errors import CancelledRequest, ConfigError, InvalidRequest, nearest
from .providers.base import Array
from .signature import Signature, Sizes, TensorSpec


def _never() -> bool:
    return False


@dataclass
class Request:
    """One request: arrays of storage dtypes by input name, read only until its run is over.

    `outputs` are the names asked for; empty means all. `is_cancelled` asks whoever sent it. `has_device_arrays` says
    that some inputs lie on a GPU.
    """

    inputs: dict[str, Array]
    outputs: Sequence[str] = ()
    is_cancelled: Callable[[], bool] = _never
    has_device_arrays: bool = False


class Checked(NamedTuple):
    """A request that may run: its dimensions' sizes, and why it has to run alone (empty when it need not)."""

    sizes: Sizes
    alone: str


@dataclass(frozen=True)
class Fill:
    """The value that fills padding, and what an absent optional input is filled with (None: it stays absent)."""

    pad: float | bytes
    default: float | None


@dataclass(frozen=True)
class _Rule:
    """What an input's array must be: element type, number of axes, and (axis, size) where the size is fixed."""

    storage: np.dtype[Any]
    type_name: str
    axes: int
    fixed: tuple[tuple[int, int], ...]

    @staticmethod
    def of(spec: TensorSpec) -> _Rule:
        fixed = tuple((axis, size) for axis, size in enumerate(spec.shape) if isinstance(size, int))
        return _Rule(spec.dtype.storage, spec.dtype.short, len(spec.shape), fixed)


class RequestChecker:
    """Checks requests against the model's signature and fills in absent optional inputs."""

    def __init__(
        self,
        signature: Signature,
        *,
        pad_values: Mapping[str, float],
        default_values: Mapping[str, float],
        value_ranges: Mapping[str, tuple[float, float]],
        max_batch_size: int,
    ) -> None:
        """Raises ConfigError where a value names no input or does not fit its type."""
        self._signature = signature
        self._max_batch_size = max_batch_size
        self._value_ranges = value_ranges
        self.unproven: frozenset[str] = frozenset()
        self._whole = [s.name for s in signature.inputs if s.dtype.storage.kind in "iub" and not s.dtype.is_raw]
        self._known = {spec.name: spec for spec in signature.inputs}
        self._rules = {spec.name: _Rule.of(spec) for spec in signature.inputs}
        self._outputs = frozenset(spec.name for spec in signature.outputs)
        self._without_rows = frozenset(
            s.name for s in signature.inputs if signature.is_batched and (s.name, 0) not in signature.dims[0].axes
        )
        self._required = frozenset(spec.name for spec in signature.inputs if spec.is_required)
        lows, highs = ({name: pair[i] for name, pair in value_ranges.items()} for i in (0, 1))
        named = (("pad_values", pad_values), ("default_values", default_values))
        for key, values in (*named, ("value_ranges", lows), ("value_ranges", highs)):
            for name, value in values.items():
                if name not in self._known:
                    raise ConfigError(f"parameter '{key}': the model has no input '{name}'{nearest(name, self._known)}")
                _checked_value(key, name, self._known[name].dtype, value)
        self.fills = {
            s.name: Fill(b"" if s.dtype.is_string else pad_values.get(s.name, 0.0), default_values.get(s.name))
            for s in signature.inputs
        }

    def check(self, request: Request, *, is_cancelled: bool = False) -> Checked:
        """Check one request; absent optional inputs that have a default are added to it.

        Raises:
            InvalidRequest: the first rule that it breaks.
            CancelledRequest: its client has gone.
        """
        if is_cancelled:
            raise CancelledRequest("the request was cancelled before it ran")
        if not self._outputs.issuperset(request.outputs):
            name = next(name for name in request.outputs if name not in self._outputs)
            raise InvalidRequest(f"unknown output '{name}'{nearest(name, self._outputs)}")
        inputs, shapes = request.inputs, {}
        for name, array in inputs.items():
            rule = self._rules.get(name)
            if rule is None:
                raise InvalidRequest(f"unknown input '{name}'{nearest(name, self._known)}")
            shape = array.shape
            if shape == (1,) and rule.axes == 0:  # Triton has no scalars: they come as one element
                inputs[name], shape = array.reshape(()), ()
            if array.dtype != rule.storage:
                raise InvalidRequest(f"input '{name}' expects {rule.type_name}, got {array.dtype}")
            if len(shape) != rule.axes:
                raise InvalidRequest(f"input '{name}' expects {rule.axes} axes, got shape {list(shape)}")
            for axis, size in rule.fixed:
                if shape[axis] != size:
                    raise InvalidRequest(f"input '{name}' expects {size} on axis {axis}, got shape {list(shape)}")
            shapes[name] = shape
        sizes, conflict = self._signature.sizes(shapes)
        for name in () if inputs.keys() >= self._required else self._required - inputs.keys():
            inputs[name] = self._default(name, sizes)
            if -1 in sizes:
                shapes[name] = inputs[name].shape
                sizes, conflict = self._signature.sizes(shapes)
        if self._max_batch_size and sizes[0] > self._max_batch_size:
            raise InvalidRequest(f"{sizes[0]} rows are more than max_batch_size {self._max_batch_size}")
        for name in self._without_rows & inputs.keys():
            conflict = f"input '{name}' has no batch axis"
        return Checked(sizes, conflict or (self._unproven_value(inputs) if self.unproven else ""))

    def _unproven_value(self, inputs: Mapping[str, Array]) -> str:
        """Why the request must run alone: values for which joining and padding were not proven (preflight.py)."""
        for name in self._whole:
            array = inputs.get(name)
            if array is None or not array.size:
                continue
            if "negative" in self.unproven and array.dtype.kind == "i" and np.minimum.reduce(array, axis=None) < 0:
                return f"input '{name}' has negative values"
            if "zero" in self.unproven and array.ndim and not array.reshape(array.shape[0], -1).any(axis=1).all():
                return f"input '{name}' has a row of zeros"
        return ""

    def check_values(self, inputs: Mapping[str, Array]) -> None:
        """Raise InvalidRequest where a value lies outside `value_ranges`: as an index it would read foreign memory.

        NaN is in no range. Works on one request's inputs and on a whole staged group alike.
        """
        for name, (low, high) in self._value_ranges.items():
            array = inputs.get(name)
            if array is None or not array.size:
                continue
            if not (np.minimum.reduce(array, axis=None) >= low and np.maximum.reduce(array, axis=None) <= high):
                shown = f"{_shown(low)}..{_shown(high)}"
                raise InvalidRequest(f"input '{name}' has values outside {shown}, its range in value_ranges")

    def _default(self, name: str, sizes: Sizes) -> Array:
        spec, value = self._known[name], self.fills[name].default
        if value is None:
            raise InvalidRequest(f"input '{name}' is missing and has no value in default_values")
        shape = self._signature.shape(spec, sizes)
        if -1 in shape:
            raise InvalidRequest(f"input '{name}' is missing and no other input gives its size")
        return np.full(shape, value, spec.dtype.storage)


def _checked_value(key: str, name: str, dtype: DType, value: float) -> None:
    """A fill value must be a whole number in an integer type's range; for raw words only 0 is known."""
    if dtype.is_string or (dtype.is_raw and value != 0):
        raise ConfigError(f"parameter '{key}': input '{name}' is {dtype.short}, for which only 0 can be filled in")
    if dtype.storage.kind in "iub":
        limits = (0, 1) if dtype.storage.kind == "b" else (np.iinfo(dtype.storage).min, np.iinfo(dtype.storage).max)
        if not float(value).is_integer() or not limits[0] <= value <= limits[1]:
            raise ConfigError(f"parameter '{key}': {_shown(value)} does not fit input '{name}' of type {dtype.short}")
    elif dtype.storage.kind == "f" and math.isfinite(value) and abs(value) > np.finfo(dtype.storage).max:
        raise ConfigError(f"parameter '{key}': {_shown(value)} does not fit input '{name}' of type {dtype.short}")


def _shown(value: float) -> str:
    """A whole number exactly, another one short."""
    return str(int(value)) if isinstance(value, int) or (abs(value) < 2**53 and value == int(value)) else f"{value:g}"

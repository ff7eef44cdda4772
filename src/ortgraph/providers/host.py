"""Host tensors between numpy and ONNX Runtime, for every provider."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from ..dtypes import DType
from ..errors import InvalidRequest, RunError, first_line
from ..signature import Shape
from .base import Array, HostArrays


class HostBuffers:
    """Host memory for one run's inputs, by name: each buffer grows to the largest input it has held."""

    def __init__(self) -> None:
        self._buffers: dict[str, Array] = {}

    def view(self, name: str, dtype: DType, shape: Shape) -> Array:
        """A C-contiguous array of this shape, its contents undefined."""
        if dtype.is_string:
            return np.empty(shape, np.object_)
        size_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.storage.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < size_bytes:
            buffer = self._buffers[name] = np.empty(max(size_bytes, 64), np.uint8)
        return buffer[:size_bytes].view(dtype.storage).reshape(shape)


class DoneRun:
    """A run that is over, or failed, at launch."""

    def __init__(self, result: Callable[[], HostArrays]) -> None:
        self.wait = result

    @classmethod
    def failed(cls, failure: RunError) -> DoneRun:
        """One whose `wait` raises."""

        def fail() -> HostArrays:
            raise failure

        return cls(fail)

    def is_done(self) -> bool:
        """Always."""
        return True

    def block(self) -> None:
        """Nothing to wait for."""


def memory_view(address: int, storage: np.dtype[Any], shape: Shape, owner: Any = None) -> Array:
    """A writable array on memory at an address; `owner` lives as long as any view of it."""
    size_bytes = int(np.prod(shape, dtype=np.int64)) * storage.itemsize
    if size_bytes == 0:
        return np.empty(shape, storage)
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]  # the view keeps the buffer, the buffer keeps its owner
    return np.frombuffer(memoryview(memory), storage).reshape(shape)


def run_on_host(
    session: ort.InferenceSession,
    dtypes: Mapping[str, DType],
    values: Mapping[str, Array],
    outputs: Sequence[str],
    options: ort.RunOptions | None = None,
) -> HostArrays:
    """One run from host arrays to host arrays; ONNX Runtime lends its outputs without a copy.

    Raises:
        InvalidRequest: a string is not UTF-8.
        RunError: ONNX Runtime failed.
    """
    has_strings = any(dtype.is_string for dtype in dtypes.values())
    feeds = {
        name: to_text(name, array)
        if has_strings
        else ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, dtypes[name].onnx_id)
        for name, array in values.items()
    }
    try:
        if has_strings:
            found = session.run(list(outputs), feeds, options)
            arrays = {name: np.asarray(result) for name, result in zip(outputs, found, strict=True)}
        else:
            found = session.run_with_ort_values(list(outputs), feeds, options)
            arrays = {name: _host_array(value, dtypes[name]) for name, value in zip(outputs, found, strict=True)}
    except Exception as error:
        raise RunError(first_line(error)) from error
    # An input that is also an output comes back as the caller's own memory, which the next run may overwrite.
    return {name: array.copy() if name in values else array for name, array in arrays.items()}


def to_text(name: str, array: Array) -> Array:
    """Bytes as the str that ONNX Runtime's Python API wants; other arrays as they are."""
    if array.dtype != np.object_:
        return array
    try:
        texts = [item.decode() if isinstance(item, bytes) else str(item) for item in array.ravel()]
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"input '{name}': ONNX Runtime takes UTF-8 strings only ({error.reason})") from error
    result = np.empty(len(texts), np.object_)
    result[:] = texts
    return result.reshape(array.shape)


def _host_array(value: ort.OrtValue, dtype: DType) -> Array:
    """A numpy view on an OrtValue; types that numpy lacks as raw words."""
    if not dtype.is_raw:
        array: Array = value.numpy()
        return array
    return memory_view(value.data_ptr(), dtype.storage, tuple(value.shape()), value)

"""The few CUDA calls that serving needs, each through one error gate (`check`).

Stands on cuda-bindings' runtime API, which shares the primary context with ONNX Runtime. Sizes in bytes, addresses as
int. Whatever is allocated here is owned by the object returned and freed by its `close`, which is safe to call twice.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from cuda.bindings import runtime as rt

from ..errors import ModelError, OrtgraphError
from .base import Array
from .host import memory_view

# After these the context is lost: every later call of this process fails too (CUDA Runtime API, cudaError_t).
_STICKY = frozenset({700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 900, 901, 906, 999})
_DEFAULT = rt.cudaMemcpyKind.cudaMemcpyDefault
TO_DEVICE, TO_HOST = rt.cudaMemcpyKind.cudaMemcpyHostToDevice, rt.cudaMemcpyKind.cudaMemcpyDeviceToHost
_OK = rt.cudaError_t.cudaSuccess


class CudaError(OrtgraphError):
    """A CUDA call failed with `number`."""

    def __init__(self, call: str, code: Any) -> None:
        """`code` is the cudaError_t that `call` returned."""
        number, name = int(code), getattr(code, "name", str(code))
        super().__init__(f"CUDA: {call} failed with {name} ({number})")
        self.number = number


def is_sticky(error: Exception) -> bool:
    """Whether the context is lost: by the number of our own calls, by ONNX Runtime's message of its own."""
    if isinstance(error, CudaError):
        return error.number in _STICKY
    found = re.search(r"CUDA (?:failure|error)[^0-9]{0,3}(\d+)", str(error))
    return found is not None and int(found[1]) in _STICKY


def check(call: str, result: tuple[Any, ...]) -> Any:
    """The value of a cuda-bindings result; raises CudaError when it is not success."""
    if result[0] != _OK:
        raise CudaError(call, result[0])
    return result[1] if len(result) == 2 else result[1:]


def use_device(device_id: int) -> None:
    """Make a device current on this thread.

    Raises:
        ModelError: there is no such device for this process.
    """
    try:
        count = int(check("cudaGetDeviceCount", rt.cudaGetDeviceCount()))
        if not 0 <= device_id < count:
            raise ModelError(f"device {device_id} is not visible: this process sees {count} (CUDA_VISIBLE_DEVICES)")
        check("cudaSetDevice", rt.cudaSetDevice(device_id))
        check("cudaFree", rt.cudaFree(0))  # makes the primary context now, so that its cost is not in a first request
    except CudaError as error:
        raise ModelError(f"no usable NVIDIA GPU: {error}") from error


def synchronize() -> None:
    """Wait for everything on the current device; a lost context, or a stream left in capture, shows here."""
    check("cudaDeviceSynchronize", rt.cudaDeviceSynchronize())


def device_name(device_id: int) -> str:
    """The GPU's name, as nvidia-smi shows it."""
    found = check("cudaGetDeviceProperties", rt.cudaGetDeviceProperties(device_id)).name
    return bytes(found).split(b"\0")[0].decode(errors="replace")


def free_bytes() -> int:
    """Memory of the current device that nobody uses."""
    return int(check("cudaMemGetInfo", rt.cudaMemGetInfo())[0])


class Stream:
    """A stream that does not wait for the legacy default stream."""

    def __init__(self) -> None:
        self.handle = int(check("cudaStreamCreate", rt.cudaStreamCreateWithFlags(rt.cudaStreamNonBlocking)))

    def synchronize(self) -> None:
        """Wait until everything on the stream is done."""
        check("cudaStreamSynchronize", rt.cudaStreamSynchronize(self.handle))

    def close(self) -> None:
        """Destroy the stream after its work."""
        if self.handle:
            rt.cudaStreamDestroy(self.handle)
            self.handle = 0


class Event:
    """Marks a place on a stream; the host waits for it by spinning or by sleeping."""

    def __init__(self, *, is_busy_wait: bool) -> None:
        flags = rt.cudaEventDisableTiming | (0 if is_busy_wait else rt.cudaEventBlockingSync)
        self._event = check("cudaEventCreate", rt.cudaEventCreateWithFlags(flags))

    def record(self, stream: Stream) -> None:
        """Mark the stream's present end."""
        check("cudaEventRecord", rt.cudaEventRecord(self._event, stream.handle))

    def synchronize(self) -> None:
        """Wait for the mark."""
        check("cudaEventSynchronize", rt.cudaEventSynchronize(self._event))

    def is_done(self) -> bool:
        """Whether the mark was passed."""
        code = rt.cudaEventQuery(self._event)[0]
        if code not in (_OK, rt.cudaError_t.cudaErrorNotReady):
            raise CudaError("cudaEventQuery", code)
        return bool(code == _OK)

    def close(self) -> None:
        """Destroy the event."""
        if self._event is not None:
            rt.cudaEventDestroy(self._event)
            self._event = None


class DeviceBuffer:
    """Device memory at a fixed address."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.address = int(check(f"cudaMalloc of {size_bytes} bytes", rt.cudaMalloc(max(size_bytes, 256))))

    def close(self) -> None:
        """Free it."""
        if self.address:
            rt.cudaFree(self.address)
            self.address = 0


class PinnedBuffer:
    """Page-locked host memory: the device copies from and to it without staging."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.address = int(check(f"cudaMallocHost of {size_bytes} bytes", rt.cudaMallocHost(max(size_bytes, 256))))

    def view(self, offset_bytes: int, dtype: np.dtype[Any], shape: tuple[int, ...], owner: Any = None) -> Array:
        """A writable view; with an owner, that object lives as long as any view."""
        return memory_view(self.address + offset_bytes, dtype, shape, owner)

    def close(self) -> None:
        """Free it."""
        if self.address:
            rt.cudaFreeHost(self.address)
            self.address = 0


def copy(destination: int, source: int, size_bytes: int, kind: Any, stream: Stream) -> None:
    """Start a copy on the stream; host memory must be pinned for it to be asynchronous."""
    check("cudaMemcpyAsync", rt.cudaMemcpyAsync(destination, source, size_bytes, kind, stream.handle))


def copy_box(
    destination: int, room: tuple[int, ...], source: int, shape: tuple[int, ...], item_bytes: int, stream: Stream
) -> None:
    """Start copying a C-contiguous tensor into the corner of a larger one, both on GPUs.

    Args:
        room: the destination's shape; each size from axis 1 on is at least the source's.
    """
    shape, room = shape or (1,), room or (1,)
    smaller = [axis for axis in range(1, len(shape)) if shape[axis] != room[axis]]
    if not smaller:
        copy(destination, source, math.prod(shape) * item_bytes, _DEFAULT, stream)
        return
    # What follows the last smaller axis is contiguous on both sides; the axes between the last two are one pitch apart.
    last, first = smaller[-1], smaller[-2] if len(smaller) > 1 else 0
    pitch_bytes = math.prod(room[last:]) * item_bytes
    width_bytes, height = math.prod(shape[last:]) * item_bytes, math.prod(shape[first:last])
    for number in range(math.prod(shape[:first])):
        place, rest = 0, number
        for axis in reversed(range(first)):
            rest, index = divmod(rest, shape[axis])
            place += index * math.prod(room[axis + 1 :])
        result = rt.cudaMemcpy2DAsync(
            destination + place * item_bytes, pitch_bytes, source + number * height * width_bytes, width_bytes,
            width_bytes, height, _DEFAULT, stream.handle,
        )  # fmt: skip
        check("cudaMemcpy2DAsync", result)


def copy_to_host(destination: int, source: int, size_bytes: int) -> None:
    """Copy from a GPU to the host; complete when this returns. Does not wait for streams of ours."""
    check("cudaMemcpy", rt.cudaMemcpy(destination, source, size_bytes, TO_HOST))


def clear(buffer: DeviceBuffer, stream: Stream) -> None:
    """Fill with zeros, in the order of the stream."""
    check("cudaMemsetAsync", rt.cudaMemsetAsync(buffer.address, 0, buffer.size_bytes, stream.handle))

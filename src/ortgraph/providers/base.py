"""The seam to the device: everything the engine asks of an execution provider.

A provider opens sessions and hands out slots. A slot holds what one run needs: host staging for the inputs (where the
device has its own memory also device buffers at fixed addresses), and it starts runs. A run is in flight until it is
waited for; between `launch` and `wait` the host is free, which is how a provider with a stream overlaps.

    slot = provider.slot(bucket)               memory for one run, its addresses fixed for the slot's life
    view = slot.stage("x", dtype, (8, 64))     the host array to write
    slot.borrow("mask", dtype, array)          or: read the caller's own memory, which must live until wait() returns
    run = slot.launch(("y",))                  copy up, replay or run, copy down; nothing waits
    outputs = run.wait()                       host arrays of storage dtypes, valid while they are referenced
    provider.give_back(slot)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..dtypes import DType
from ..signature import Shape, Sizes, TensorSpec

Array = np.ndarray[Any, Any]
HostArrays = dict[str, Array]


@dataclass(frozen=True)
class DeviceArray:
    """A C-contiguous tensor in a GPU's memory that a request brought; `owner` keeps it alive.

    `shape`, `dtype` and `size` are as numpy has them, so that checks and grouping need not tell them apart.
    """

    address: int
    shape: Shape
    dtype: np.dtype[Any]
    owner: Any

    @property
    def size(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * self.dtype.itemsize

    def reshape(self, shape: Shape) -> DeviceArray:
        """The same memory in another shape."""
        return replace(self, shape=shape)


AnyArray = Array | DeviceArray


class Run(Protocol):
    """One started run."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""

    def block(self) -> None:
        """Wait without taking the outputs; never raises."""

    def wait(self) -> HostArrays:
        """Block until the run is over and give its outputs. Raises RunError with ONNX Runtime's reason."""


class Slot(Protocol):
    """Memory for one run at a time."""

    def stage(self, name: str, dtype: DType, shape: Shape) -> Array:
        """A writable C-contiguous host array for input `name`, its contents undefined."""

    def borrow(self, name: str, dtype: DType, array: Array) -> None:
        """Use `array` itself as input `name` of the next run."""

    def launch(self, outputs: Sequence[str], rows: int | None = None) -> Run:
        """Start a run of the staged and borrowed inputs that computes `outputs` only.

        With `rows`, only the first rows of each output are needed.
        """


@runtime_checkable
class DeviceSlot(Slot, Protocol):
    """A slot that reads GPU tensors."""

    def place(self, name: str, array: DeviceArray, row: int, *, is_whole: bool) -> None:
        """Copy a GPU tensor into input `name` from this row on, without a way over the host where the run is a replay.

        The input was staged, or the tensor `is_whole` and nothing else of the input counts.
        """


class Provider(Protocol):
    """An execution provider with a loaded model.

    `why_eager` is the reason, one word, why no bucket can ever be captured; empty where one may be. `capture_note` says
    more of it, where there is more.
    `rounding` is how far a replay may lie from an eager run, relative to the largest value, beyond the element type's
    own tolerance (kernels picked anew, TF32). `checks_indices`: an index outside its table is an error, not a look at
    foreign memory. `is_healthy` turns False when the device context is lost. `tells_when_done`: a run's `is_done` turns
    True when the device has done it.
    """

    name: str
    can_capture: bool
    is_healthy: bool
    checks_indices: bool
    tells_when_done: bool
    rounding: float
    why_eager: str
    capture_note: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    not_tensors: tuple[str, ...]
    output_names: tuple[str, ...]

    @property
    def remark(self) -> str:
        """What the line of a loaded model should say of it: a clause, or nothing."""

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether there are captured graphs, so that a group runs at its bucket's sizes."""

    def capture(self, buckets: Mapping[Sizes, Mapping[str, Shape]]) -> dict[Sizes, str]:
        """Capture a graph for each bucket (its input shapes by name); the reason for each that could not be.

        Called before the model is ready, and after that only for what `captures_on_demand` asks. Each capture is
        counted and timed in the metrics.
        """

    def retire(self, buckets: Collection[Sizes]) -> None:
        """Never replay these buckets again; when their last run is read, their memory goes to the pool together."""

    def eager_reason(self, bucket: Sizes | None) -> str:
        """Why a run in this bucket is eager, one word for the metrics; empty when it is a replay."""

    def slot(self, bucket: Sizes | None) -> Slot:
        """A free slot for a bucket, made if need be; None is for an exact run."""

    def give_back(self, slot: Slot) -> None:
        """The slot's run is over and its inputs are no longer read."""

    def run_values(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> list[Any]:
        """Run values that are no tensors (sequences, maps, optionals) just as ONNX Runtime takes and gives them."""

    def close(self) -> None:
        """Release session and memory; calling it twice is safe."""


@runtime_checkable
class DeviceProvider(Provider, Protocol):
    """A provider that reads GPU tensors: its slots are DeviceSlots."""

    def to_host(self, array: DeviceArray) -> Array:
        """A copy on the host, complete when this returns."""

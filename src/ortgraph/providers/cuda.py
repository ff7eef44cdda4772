"""NVIDIA GPUs: one stream, a captured graph for each bucket, everything asynchronous.

Memory. The buckets of a session share one device block for inputs and one for outputs: on one stream the next copy up
cannot overtake the replay before it, so the addresses may be the same, and many buckets cost little more than the
largest. A bucket captured later that is too large for them opens larger ones; the old ones go to the pool with the last
bucket that was captured on them. What differs between runs in flight is the host side: a slot is a pinned block for
inputs, one for outputs and an event. A bucket's inputs lie behind each other, so that one copy takes them up.

Graphs. Each bucket has its own `gpu_graph_id`, never used again (ONNX Runtime cannot release a captured graph on CUDA,
and would replay the old one). So the captures of a session are counted, and beyond `max_captures` buckets run eager.
Capture and replay are on the thread that made the provider. Before the first one a trial is made in a process of its
own (trial.py), unless `graph_capture` is required: such a model is not to be served anyway where it cannot be captured.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort

from ..config import ModelConfig
from ..dtypes import DType
from ..errors import CaptureError, ModelError, RunError
from ..metrics import Metrics
from ..pool import BufferPool
from ..session import gpu_reason, open_session, session_options, specs
from ..signature import Shape, Sizes
from ..tactics import with_profiled_m
from ..trial import Job, danger
from . import driver
from .base import Array, DeviceArray, HostArrays, Run, Slot
from .host import DoneRun, run_on_host

ALIGN_BYTES = 256
FIRST_SLOTS = 4
_TRIAL_LIMIT_S = 120.0


@dataclass
class _Place:
    """Where a tensor of a bucket lies: its offset in the block, shape and size."""

    dtype: DType
    shape: Shape
    offset_bytes: int
    size_bytes: int


@dataclass(eq=False)
class _Blocks:
    """Device memory that buckets share, and how many of them."""

    inputs: driver.DeviceBuffer
    outputs: driver.DeviceBuffer
    users: int = 0

    def fit(self, plan: _Graph) -> bool:
        """Whether a bucket's tensors fit in."""
        return plan.up_bytes <= self.inputs.size_bytes and _end(plan.outputs) <= self.outputs.size_bytes


@dataclass(eq=False)
class _Graph:
    """A captured bucket."""

    inputs: dict[str, _Place]
    outputs: dict[str, _Place]
    up_bytes: int
    blocks: _Blocks | None = None
    graph_id: int = 0
    binding: Any = None
    options: Any = None


class CudaProvider:
    """A model on ONNX Runtime's CUDA provider."""

    name = "cuda"
    can_capture = True
    is_healthy = True
    checks_indices = False
    tells_when_done = True
    capture_note = ""

    def __init__(self, config: ModelConfig, metrics: Metrics | None = None) -> None:
        """Raises ModelError where there is no GPU, ConfigError or ModelError where ONNX Runtime refuses the model."""
        driver.use_device(config.device_id)
        self._device_id = config.device_id
        self._metrics = metrics or Metrics()
        self._max_captures = config.max_captures
        self._reason = partial(gpu_reason, config=config)
        self._is_debug = config.is_debug
        # TF32 is ONNX Runtime's default, and eager and captured runs may pick different kernels.
        self.rounding = 1e-4 if config.provider_options.get("use_tf32") == "0" else 2e-2
        self.is_busy_wait = config.busy_wait_events
        self.stream = driver.Stream()
        self.why_eager = "graph_capture_off" if config.graph_capture == "off" else ""
        start, free_bytes = time.perf_counter(), driver.free_bytes()
        self._session = self._open(config)
        self._open_s = time.perf_counter() - start
        self._session_bytes, self._graph_bytes = free_bytes - driver.free_bytes(), 0
        self._untried: ModelConfig | None = None if config.graph_capture == "required" else config
        self.inputs, self.outputs, self.not_tensors = specs(self._session)
        self.output_names = tuple(node.name for node in self._session.get_outputs())
        self._dtypes = {spec.name: spec.dtype for spec in self.inputs + self.outputs}
        if any(dtype.is_string for dtype in self._dtypes.values()):
            self.why_eager = "string_tensors"
        self._eager = _run_options("-1")
        self._next_graph_id = 1
        self._session_lock = threading.Lock()  # a failed group is run again by whichever thread finishes it
        self._graphs: dict[Sizes, _Graph] = {}
        self._blocks: _Blocks | None = None
        self._pool: BufferPool[driver.DeviceBuffer] = BufferPool(
            config.buffer_pool_generations, self._metrics, lambda buffer: buffer.close()
        )
        self._free: list[CudaSlot] = []
        self._slots: list[CudaSlot] = []

    def _open(self, config: ModelConfig) -> ort.InferenceSession:
        """With graph capture where the model allows it; else without, and the reason is kept."""
        config = with_profiled_m(config)
        options = {
            "device_id": str(config.device_id),
            "user_compute_stream": str(self.stream.handle),
            "cudnn_conv_algo_search": "HEURISTIC",
            **config.provider_options,
        }
        if not self.why_eager:
            try:
                return self._open_with(config, {**options, "enable_cuda_graph": "1"})
            except ModelError as error:
                if config.graph_capture == "required":
                    raise
                self.why_eager = "not_capturable"
                self.capture_note = str(error)
        return self._open_with(config, options)

    def _open_with(self, config: ModelConfig, options: Mapping[str, str]) -> ort.InferenceSession:
        try:
            providers = [("CUDAExecutionProvider", options), "CPUExecutionProvider"]
            return open_session(config, session_options(config), providers)
        except ModelError as error:
            raise ModelError(self._reason(error)) from error

    def capture(self, buckets: Mapping[Sizes, Mapping[str, Shape]]) -> dict[Sizes, str]:
        """Capture every bucket, largest first; the reason for each that could not be.

        Args:
            buckets: the input shapes of each bucket.
        """
        if self.why_eager or not buckets:
            return dict.fromkeys(buckets, self.capture_note or self.why_eager)
        failed: dict[Sizes, str] = {}
        if self._untried is not None and (reason := self._danger(self._untried, buckets)):
            self.why_eager, self.capture_note = "trial_failed", reason
            return dict.fromkeys(buckets, reason)
        # Capture mode is global: nothing may be in flight.
        self.stream.synchronize()
        free_bytes = driver.free_bytes()
        order = sorted(buckets, key=_volume, reverse=True)
        plans: dict[Sizes, _Graph] = {}
        for bucket in order:
            try:
                plans[bucket] = self._plan(buckets[bucket])
            except CaptureError as error:
                failed[bucket] = str(error)
        if plans and not all(self._blocks is not None and self._blocks.fit(plan) for plan in plans.values()):
            try:
                self._open_blocks(plans.values())
            except driver.CudaError as error:
                return failed | dict.fromkeys(plans, str(error))
        for bucket, plan in plans.items():
            start = time.perf_counter()
            try:
                with self._session_lock:
                    self._capture_one(plan)
                self._graphs[bucket] = plan
            except CaptureError as error:
                failed[bucket] = str(error)
                continue
            self._metrics.add("ortgraph_captures_total")
            self._metrics.observe("ortgraph_capture_seconds", time.perf_counter() - start)
        self._metrics.set("ortgraph_live_buckets", len(self._graphs))
        ready = sum(all(slot.fits(graph) for graph in self._graphs.values()) for slot in self._slots)
        for _ in range(FIRST_SLOTS - ready if self._graphs else 0):
            self._free.append(self._new_slot())
        with contextlib.suppress(driver.CudaError):  # a lost context shows in the next run
            self._graph_bytes += free_bytes - driver.free_bytes()
        return failed

    @property
    def remark(self) -> str:
        """GPU memory by what the device had left before and after: other processes blur it."""
        session, graphs = (max(size, 0) / 2**20 for size in (self._session_bytes, self._graph_bytes))
        return (
            f"GPU memory: {session:.0f} MiB weights and libraries, {graphs:.0f} MiB arena, graphs and buffers of "
            f"{len(self._graphs)} buckets"
        )

    def _danger(self, config: ModelConfig, buckets: Mapping[Sizes, Mapping[str, Shape]]) -> str:
        """Why nothing should be captured in this process, by a trial of the smallest bucket; asked once."""
        self._untried = None
        smallest = min(buckets, key=_volume)
        job = Job(config, smallest, dict(buckets[smallest]))
        return danger(job, driver.device_name(self._device_id), max(_TRIAL_LIMIT_S, 10 * self._open_s))

    def _open_blocks(self, plans: Collection[_Graph]) -> None:
        """Blocks that hold the largest of these buckets become those of the buckets to come; they never shrink."""
        old = self._blocks
        sizes = [max(plan.up_bytes for plan in plans), max(_end(plan.outputs) for plan in plans)]
        if old is not None:
            # Powers of two, so that they are not opened anew for every slightly larger bucket.
            sizes = [
                1 << (size - 1).bit_length()
                for size in map(max, sizes, (old.inputs.size_bytes, old.outputs.size_bytes))
            ]
        inputs, outputs = (self._pool.take(size, partial(driver.DeviceBuffer, size)) for size in sizes)
        self._blocks = _Blocks(inputs, outputs)
        if old is not None and not old.users:
            self._give_back([old])

    def _give_back(self, blocks: Collection[_Blocks]) -> None:
        self._pool.give_back(
            (buffer.size_bytes, buffer) for block in blocks for buffer in (block.inputs, block.outputs)
        )

    def _plan(self, shapes: Mapping[str, Shape]) -> _Graph:
        """Place a bucket's tensors; output shapes come from one eager run on zeros."""
        inputs, end = self._lay_out(shapes)
        feeds = {
            name: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
                np.zeros(place.shape, place.dtype.storage), place.dtype.onnx_id
            )
            for name, place in inputs.items()
        }
        try:
            with self._session_lock:
                found = self._session.run_with_ort_values(list(self.output_names), feeds, self._eager)
        except Exception as error:
            raise CaptureError(self._reason(error)) from error
        outputs, _ = self._lay_out({n: tuple(v.shape()) for n, v in zip(self.output_names, found, strict=True)})
        return _Graph(inputs, outputs, end)

    def _lay_out(self, shapes: Mapping[str, Shape]) -> tuple[dict[str, _Place], int]:
        places, end = {}, 0
        for name, shape in shapes.items():
            dtype = self._dtypes[name]
            size_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.storage.itemsize
            places[name] = _Place(dtype, shape, end, size_bytes)
            end += -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return places, max(end, ALIGN_BYTES)

    def _capture_one(self, plan: _Graph) -> None:
        blocks = self._blocks
        assert blocks
        if self._next_graph_id > self._max_captures:
            raise CaptureError(f"the session has made max_captures ({self._max_captures}) captures")
        plan.binding = self._session.io_binding()
        for places, base, bind in (
            (plan.inputs, blocks.inputs.address, plan.binding.bind_input),
            (plan.outputs, blocks.outputs.address, plan.binding.bind_output),
        ):
            for name, place in places.items():
                address = base + place.offset_bytes
                bind(name, "cuda", self._device_id, place.dtype.onnx_id, list(place.shape), address)
        plan.graph_id = self._next_graph_id
        plan.options = _run_options(str(plan.graph_id))
        self._next_graph_id += 1
        try:
            driver.clear(blocks.inputs, self.stream)
            self._session.run_with_iobinding(plan.binding, plan.options)
            self.stream.synchronize()
        except Exception as error:  # ONNX Runtime's own errors have no base of their own
            raise CaptureError(self._reason(error)) from error
        plan.blocks = blocks
        blocks.users += 1

    @property
    def has_fixed_shapes(self) -> bool:
        """Only captured graphs fix the shapes."""
        return bool(self._graphs)

    def slot(self, bucket: Sizes | None) -> Slot:
        """A free slot, or one more when all are in flight."""
        graph = self._graphs.get(bucket) if bucket is not None else None
        slot = self._free.pop() if self._free else self._new_slot()
        while graph is not None and not slot.fits(graph):  # made before the blocks grew
            self._slots.remove(slot)
            slot.close()
            slot = self._free.pop() if self._free else self._new_slot()
        slot.graph = graph
        slot.placed.clear()
        slot.whole.clear()
        slot.lease = _Lease(slot)
        return slot

    def retire(self, buckets: Collection[Sizes]) -> None:
        """The graphs stay in ONNX Runtime, which cannot release them; their ids are never used again.

        Blocks that no bucket uses any more go to the pool: the stream is idle by then.
        """
        with contextlib.suppress(driver.CudaError):  # a lost context shows in the next run
            self.stream.synchronize()
        unused = []
        for graph in [self._graphs.pop(bucket) for bucket in buckets if bucket in self._graphs]:
            for slot in self._slots:
                slot.forget(graph)
            assert graph.blocks
            graph.blocks.users -= 1
            if not graph.blocks.users and graph.blocks is not self._blocks:
                unused.append(graph.blocks)
        self._give_back(unused)
        self._metrics.set("ortgraph_live_buckets", len(self._graphs))

    def eager_reason(self, bucket: Sizes | None) -> str:
        """Empty for a captured bucket."""
        if bucket in self._graphs:
            return ""
        return self.why_eager or ("no_bucket" if bucket is None else "not_captured")

    def _new_slot(self) -> CudaSlot:
        blocks = self._blocks
        slot = CudaSlot(self, blocks.inputs.size_bytes if blocks else 0, blocks.outputs.size_bytes if blocks else 0)
        self._slots.append(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        """The slot is free for the next run as soon as nobody reads its outputs any more."""
        assert isinstance(slot, CudaSlot)
        slot.values = {}
        slot.lease = None

    def freed(self, slot: CudaSlot) -> None:
        """Called by the slot's lease."""
        self._free.append(slot)

    def replay(self, graph: _Graph, slot: CudaSlot) -> None:
        """Start the copies of the inputs and the graph."""
        assert graph.blocks
        if self._is_debug:
            _check_captured(graph)
        pinned, device = slot.pinned_address, graph.blocks.inputs.address
        if not slot.placed:
            driver.copy(device, pinned, graph.up_bytes, driver.TO_DEVICE, self.stream)
        else:
            for place in (place for name, place in graph.inputs.items() if name not in slot.whole):
                start = place.offset_bytes
                driver.copy(device + start, pinned + start, place.size_bytes, driver.TO_DEVICE, self.stream)
            for name, array, row in slot.placed:
                place = graph.inputs[name]
                item_bytes = place.dtype.storage.itemsize
                target = device + place.offset_bytes + row * item_bytes * int(np.prod(place.shape[1:]))
                driver.copy_box(target, place.shape, array.address, array.shape, item_bytes, self.stream)
        with self._session_lock:
            self._session.run_with_iobinding(graph.binding, graph.options)

    def copy_down(self, graph: _Graph, place: _Place, pinned_out: int, rows: int | None) -> None:
        """Start the copy of an output, only its first rows where they are what counts, into a slot's pinned block."""
        assert graph.blocks
        size_bytes = place.size_bytes
        if rows is not None and place.shape and place.shape[0] > rows:
            size_bytes = size_bytes // place.shape[0] * rows
        source = graph.blocks.outputs.address + place.offset_bytes
        driver.copy(pinned_out + place.offset_bytes, source, size_bytes, driver.TO_HOST, self.stream)

    def to_host(self, array: DeviceArray) -> Array:
        """A copy on the host, complete when this returns.

        Raises:
            RunError: the driver refused.
        """
        found = np.empty(array.shape, array.dtype)
        try:
            driver.copy_to_host(found.ctypes.data, array.address, array.nbytes)
        except driver.CudaError as error:
            raise self.failure(error) from error
        return found

    def run_eager(self, values: Mapping[str, Array], outputs: Sequence[str]) -> HostArrays:
        """A run without a graph, of any shape."""
        try:
            with self._session_lock:
                return run_on_host(self._session, self._dtypes, values, outputs, self._eager)
        except RunError as error:
            raise self.failure(error) from error

    def failure(self, error: Exception) -> RunError:
        """The error of a run; after one that lost the CUDA context the provider is not healthy any more."""
        self.is_healthy = self.is_healthy and not driver.is_sticky(error)
        return RunError(self._reason(error))

    def run_values(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> list[Any]:
        """ONNX Runtime's own `session.run`."""
        try:
            return list(self._session.run(list(outputs), dict(inputs), self._eager))
        except Exception as error:
            raise self.failure(error) from error

    def close(self) -> None:
        """Wait for the device, then free in reverse order of making."""
        if self.stream.handle:
            self.stream.synchronize()
            blocks = {id(graph.blocks): graph.blocks for graph in self._graphs.values()}
            blocks[id(self._blocks)] = self._blocks
            self._graphs.clear()
            del self._session
            for slot in self._slots:
                slot.close()
            for block in filter(None, blocks.values()):
                block.outputs.close()
                block.inputs.close()
            self._pool.close()
            self.stream.close()


class _Lease:
    """Held by every view on a slot's outputs; when the last is gone, the slot is free again."""

    def __init__(self, slot: CudaSlot) -> None:
        self._slot = slot

    def __del__(self) -> None:
        self._slot.free()


class CudaSlot:
    """The host side of one run: pinned inputs and outputs, and the event that says it is over."""

    def __init__(self, provider: CudaProvider, in_bytes: int, out_bytes: int) -> None:
        """The blocks hold the largest bucket."""
        self._provider = provider
        self._sizes = in_bytes, out_bytes
        self._pinned_in = driver.PinnedBuffer(in_bytes)
        self._pinned_out = driver.PinnedBuffer(out_bytes)
        self.event = driver.Event(is_busy_wait=provider.is_busy_wait)
        self.graph: _Graph | None = None
        self.lease: _Lease | None = None
        self.values: dict[str, Array] = {}
        self.placed: list[tuple[str, DeviceArray, int]] = []
        self.whole: set[str] = set()
        self._views: dict[tuple[int, str], Array] = {}

    def fits(self, graph: _Graph) -> bool:
        """Whether the pinned blocks hold this bucket."""
        return graph.up_bytes <= self._sizes[0] and _end(graph.outputs) <= self._sizes[1]

    def forget(self, graph: _Graph) -> None:
        """The bucket is retired."""
        for name in graph.inputs:
            self._views.pop((graph.graph_id, name), None)

    def stage(self, name: str, dtype: DType, shape: Shape) -> Array:
        """A view on the bucket's place in pinned memory; plain memory for an exact run."""
        if self.graph is None:
            view = self.values[name] = np.empty(shape, dtype.storage)
            return view
        key = (self.graph.graph_id, name)
        known = self._views.get(key)
        if known is None:
            place = self.graph.inputs[name]
            known = self._views[key] = self._pinned_in.view(place.offset_bytes, dtype.storage, place.shape)
        return known

    def borrow(self, name: str, dtype: DType, array: Array) -> None:
        """An exact run reads the caller's memory; a bucket's inputs go through pinned memory once."""
        if self.graph is None:
            self.values[name] = array
        else:
            self.stage(name, dtype, array.shape)[...] = array

    def place(self, name: str, array: DeviceArray, row: int, *, is_whole: bool) -> None:
        """A replay copies it on the device; an exact run, which reads host memory, has it copied down."""
        if self.graph is not None:
            self.placed.append((name, array, row))
            if is_whole:
                self.whole.add(name)
            return
        index = (slice(row, row + array.shape[0]), *map(slice, array.shape[1:])) if array.shape else ()
        self.values[name][index] = self._provider.to_host(array)

    @property
    def pinned_address(self) -> int:
        """Where the inputs are staged."""
        return self._pinned_in.address

    def launch(self, outputs: Sequence[str], rows: int | None = None) -> Run:
        """Start copy up, replay, copy down (of the real rows) and the event; an exact run is over when this returns."""
        provider, graph = self._provider, self.graph
        if graph is None:
            return DoneRun(lambda: provider.run_eager(self.values, outputs))
        try:
            provider.replay(graph, self)
            places = {}
            for name in outputs:
                place = graph.outputs[name]
                provider.copy_down(graph, place, self._pinned_out.address, rows)
                places[name] = place
            self.event.record(provider.stream)
        except Exception as error:
            failure = provider.failure(error)
            return DoneRun.failed(failure)
        return CudaRun(self, places)

    def outputs(self, places: Mapping[str, _Place]) -> HostArrays:
        """Views on pinned memory that keep the slot taken while any of them lives."""
        lease = self.lease
        return {
            name: self._pinned_out.view(place.offset_bytes, place.dtype.storage, place.shape, lease)
            for name, place in places.items()
        }

    def failure(self, error: Exception) -> RunError:
        """What a failed run raises."""
        return self._provider.failure(error)

    def free(self) -> None:
        """Back to the provider's free slots."""
        self._provider.freed(self)

    def close(self) -> None:
        """Free the memory; the device is idle."""
        self.event.close()
        self._pinned_out.close()
        self._pinned_in.close()


class CudaRun:
    """A replay in flight."""

    def __init__(self, slot: CudaSlot, places: Mapping[str, _Place]) -> None:
        self._slot = slot
        self._places = places

    def is_done(self) -> bool:
        """Whether the event has passed, or never will: the failure shows in `wait`."""
        try:
            return self._slot.event.is_done()
        except driver.CudaError:
            return True

    def block(self) -> None:
        """Wait for the event; a failure shows in `wait`."""
        with contextlib.suppress(driver.CudaError):
            self._slot.event.synchronize()

    def wait(self) -> HostArrays:
        """Wait for the event."""
        try:
            self._slot.event.synchronize()
        except driver.CudaError as error:
            raise self._slot.failure(error) from error
        return self._slot.outputs(self._places)


def _run_options(graph_id: str) -> ort.RunOptions:
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", graph_id)
    if graph_id != "-1":
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


def _check_captured(graph: _Graph) -> None:
    """Debug mode: the blocks are still those of the capture.

    Raises:
        RunError: they were freed.
    """
    assert graph.blocks
    if not graph.blocks.inputs.address or not graph.blocks.outputs.address:
        raise RunError(f"debug: the device memory of graph {graph.graph_id} was freed")


def _volume(bucket: Sizes) -> float:
    return float(np.prod(np.asarray(bucket, np.float64)))


def _end(places: Mapping[str, _Place]) -> int:
    return max((place.offset_bytes + place.size_bytes for place in places.values()), default=0)

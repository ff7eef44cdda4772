"""Any vendor's GPU through ONNX Runtime's WebGPU plugin: a captured graph for each bucket, replayed asynchronously.

Memory. A captured graph reads and writes the device tensors that were bound when it was captured, so a bucket owns one
set of them. Two runs of one bucket in flight share it: before the second is started, the first one's outputs are read.
A retired bucket's graph is released and its tensors go to the pool; ONNX Runtime's own pool does the same for what
lies between inputs and outputs (`sessionBufferPoolGenerations`).

Specialised sessions. The plugin captures only what runs on the device as a whole. Where shape arithmetic on the CPU is
what forbids it, that arithmetic is constant inside a bucket: a session of its own, with the bucket's sizes in place of
the free dimensions, folds it away. Each such session holds the weights once more.

Every call into ONNX Runtime is made under one lock: a batch may be finished by another thread than the one that starts
the next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort

from ..config import ModelConfig
from ..dtypes import DType
from ..errors import CaptureError, ConfigError, ModelError, RunError, first_line, nearest
from ..metrics import Metrics
from ..pool import BufferPool
from ..session import open_session, session_options, specs
from ..signature import Shape, Sizes
from .base import Array, HostArrays, Run, Slot
from .host import DoneRun, HostBuffers, run_on_host

EP_NAME = "WebGpuExecutionProvider"
# What the plugin reads; it ignores anything else without a word. Raw pointers and debugging captures are left out.
OPTIONS = frozenset(
    {
        "enableGraphCapture", "sessionBufferPoolGenerations", "preferredLayout", "enableInt64", "forceCpuNodeNames",
        "multiRotaryCacheConcatOffset", "kvCacheQuantizationBits", "deviceId", "dawnBackendType", "powerPreference",
        "validationMode", "enableRobustness", "preserveDevice", "maxStorageBufferBindingSize",
        "maxNumPendingDispatches", "storageBufferCacheMode", "uniformBufferCacheMode", "queryResolveBufferCacheMode",
        "defaultBufferCacheMode",
    }
)  # fmt: skip
_NOT_ON_DEVICE = "have not been partitioned"
_LOST = "device is lost"  # Dawn's words, in every error that follows
_SHOWN_NODES = 3
_registration = threading.Lock()


def find_device() -> Any:
    """The device that the plugin offers, a GPU before a software adapter (ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1).

    Raises:
        ModelError: the package is missing, or there is no adapter.
    """
    with _registration:
        found = _devices()
        if not found:
            try:
                import onnxruntime_ep_webgpu

                ort.register_execution_provider_library("webgpu", onnxruntime_ep_webgpu.get_library_path())
            except ImportError as error:
                raise ModelError("execution_provider webgpu needs the package onnxruntime-ep-webgpu") from error
            except Exception as error:
                raise ModelError(f"the WebGPU plugin cannot be registered: {first_line(error)}") from error
            found = _devices()
    if not found:
        raise ModelError(
            "WebGPU finds no GPU; install its Vulkan driver, or set ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1 and "
            "VK_DRIVER_FILES for a driver on the CPU"
        )
    return min(found, key=lambda device: device.device.type != ort.OrtHardwareDeviceType.GPU)


def _devices() -> list[Any]:
    return [device for device in ort.get_ep_devices() if device.ep_name == EP_NAME]


@dataclass(eq=False)
class _Graph:
    """A captured bucket: its session and id there, and the device tensors that it reads and writes.

    `addresses` are those at capture; `pending` is the run whose outputs were not read yet.
    """

    session: Any
    graph_id: int
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    binding: Any
    options: Any
    addresses: dict[str, int] = field(default_factory=dict)
    pending: WebGpuRun | None = None

    def tensors(self) -> dict[str, Any]:
        return {
            **{f"input '{n}'": v for n, v in self.inputs.items()},
            **{f"output '{n}'": v for n, v in self.outputs.items()},
        }


class WebGpuProvider:
    """A model on ONNX Runtime's WebGPU plugin."""

    name = "webgpu"
    can_capture = True
    is_healthy = True
    checks_indices = False
    tells_when_done = False
    rounding = 1e-4  # a specialised session may be optimised differently

    def __init__(self, config: ModelConfig, metrics: Metrics | None = None) -> None:
        """Raises ConfigError for an unknown option, ModelError where there is no device or it refuses the model."""
        self._config = config
        self._metrics = metrics or Metrics()
        self._options = _options(config)
        self._device = find_device()
        self.why_eager = "graph_capture_off" if config.graph_capture == "off" else ""
        self.capture_note = ""
        self._is_specialised = False
        self._session = self._open(config)
        self.inputs, self.outputs, self.not_tensors = specs(self._session)
        self.output_names = tuple(node.name for node in self._session.get_outputs())
        self._dtypes = {spec.name: spec.dtype for spec in self.inputs + self.outputs}
        if any(dtype.is_string for dtype in self._dtypes.values()):
            self.why_eager, self.capture_note = "string_tensors", "strings have no place on the device"
        self._eager = _run_options(-1)
        self._next_graph_id = 1
        self.lock = threading.RLock()
        self._graphs: dict[Sizes, _Graph] = {}
        self._free: list[WebGpuSlot] = []
        self._pool: BufferPool[Any] = BufferPool(config.buffer_pool_generations, self._metrics)

    def _open(self, config: ModelConfig) -> ort.InferenceSession:
        """With graph capture where the whole model allows it; else without, and the reason is kept."""
        if not self.why_eager:
            try:
                return self._new_session()
            except ModelError as error:
                self.capture_note = str(error)
                self._is_specialised = _NOT_ON_DEVICE in str(error)
                if not self._is_specialised:
                    if config.graph_capture == "required":
                        raise
                    self.why_eager = "not_capturable"
        session = self._new_session(is_captured=False)
        if self._is_specialised:
            self.capture_note = _blockers(session)
        return session

    def _new_session(self, sizes: Mapping[str, int] | None = None, *, is_captured: bool = True) -> Any:
        options = session_options(self._config)
        options.enable_mem_pattern = False  # memory patterns and capture exclude each other in the plugin
        for name, size in (sizes or {}).items():
            options.add_free_dimension_override_by_name(name, size)
        settings = {**self._options, "enableGraphCapture": "1"}
        if not is_captured:
            # Capture turns 64-bit integers on by itself; so the same nodes are on the device here.
            settings = {"enableInt64": "1", **self._options, "enableGraphCapture": "0"}
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        options.add_provider_for_devices([self._device], settings)
        return open_session(self._config, options, ())

    @property
    def remark(self) -> str:
        """What specialised sessions cost."""
        count = len(self._graphs) if self._is_specialised else 0
        if not count and not (self._is_specialised and self._config.captures_on_demand):
            return ""
        size_mb = self._config.model_path.stat().st_size / 1e6
        return (
            f"every captured bucket has a session of its own with a copy of the weights "
            f"(now {count} x {size_mb:.1f} MB beside the first), because {self.capture_note}"
        )

    @property
    def has_fixed_shapes(self) -> bool:
        """Only captured graphs fix the shapes."""
        return bool(self._graphs)

    def capture(self, buckets: Mapping[Sizes, Mapping[str, Shape]]) -> dict[Sizes, str]:
        """Capture every bucket, largest first; the reason for each that could not be."""
        if self.why_eager:
            return dict.fromkeys(buckets, self.capture_note or self.why_eager)
        failed: dict[Sizes, str] = {}
        for bucket in sorted(buckets, key=lambda bucket: -float(np.prod(np.asarray(bucket, np.float64)))):
            start = time.perf_counter()
            try:
                with self.lock:
                    self._graphs[bucket] = self._capture_one(buckets[bucket])
            except (CaptureError, ModelError) as error:
                failed[bucket] = str(error)
                continue
            self._metrics.add("ortgraph_captures_total")
            self._metrics.observe("ortgraph_capture_seconds", time.perf_counter() - start)
        self._metrics.set("ortgraph_live_buckets", len(self._graphs))
        return failed

    def _capture_one(self, shapes: Mapping[str, Shape]) -> _Graph:
        session = self._specialise(shapes) if self._is_specialised else self._session
        zeros = {name: np.zeros(shape, self._dtypes[name].storage) for name, shape in shapes.items()}
        try:
            found = self.run_eager(zeros, self.output_names)
        except RunError as error:
            raise CaptureError(str(error)) from error
        inputs, outputs = ({n: self._take(n, array.shape) for n, array in arrays.items()} for arrays in (zeros, found))
        graph = _Graph(session, self._next_graph_id, inputs, outputs, session.io_binding(), None)
        graph.options = _run_options(graph.graph_id)
        self._next_graph_id += 1
        try:
            for name, array in zeros.items():
                inputs[name].update_inplace(array)
                graph.binding.bind_ortvalue_input(name, inputs[name])
            for name, value in outputs.items():
                graph.binding.bind_ortvalue_output(name, value)
            session.run_with_iobinding(graph.binding, graph.options)
        except Exception as error:
            self._release([graph])
            raise CaptureError(first_line(error)) from error
        graph.addresses = {name: value.data_ptr() for name, value in graph.tensors().items()}
        return graph

    def _specialise(self, shapes: Mapping[str, Shape]) -> Any:
        try:
            return self._new_session(self._free_sizes(shapes))
        except ModelError as error:
            if _NOT_ON_DEVICE in str(error):
                raise CaptureError(f"{self.capture_note}, and fixed sizes do not change that") from error
            raise

    def _free_sizes(self, shapes: Mapping[str, Shape]) -> dict[str, int]:
        """The bucket's size of every free dimension, by the name that the model gives it."""
        sizes: dict[str, int] = {}
        for spec in self.inputs:
            for axis, (symbol, size) in enumerate(zip(spec.shape, shapes.get(spec.name, ()), strict=False)):
                if symbol is None:
                    raise CaptureError(
                        f"{self.capture_note}; axis {axis} of input '{spec.name}' has no name, so it cannot be fixed"
                    )
                if isinstance(symbol, str) and sizes.setdefault(symbol, size) != size:
                    raise CaptureError(f"dimension '{symbol}' is {sizes[symbol]} and {size} in one bucket")
        return sizes

    def _take(self, name: str, shape: Shape) -> Any:
        """A device tensor from the pool, or a new one; it belongs to the device, not to one session."""
        onnx_id = self._dtypes[name].onnx_id

        def allocate() -> Any:
            try:
                return self._session.create_ortvalue_from_shape_and_type(list(shape), onnx_id, "webgpu")
            except Exception as error:
                raise CaptureError(f"no device memory for '{name}': {first_line(error)}") from error

        return self._pool.take((onnx_id, shape), allocate)

    def retire(self, buckets: Collection[Sizes]) -> None:
        """Read what is still in flight, release the graphs, and give their tensors to the pool as one generation."""
        with self.lock:
            graphs = [self._graphs.pop(bucket) for bucket in buckets if bucket in self._graphs]
            for graph in graphs:
                if graph.pending is not None:
                    graph.pending.read()
            self._release(graphs)
            self._metrics.set("ortgraph_live_buckets", len(self._graphs))

    def _release(self, graphs: Sequence[_Graph]) -> None:
        for graph in graphs:
            graph.session.release_captured_graph(graph.graph_id)
            graph.binding.clear_binding_inputs()
            graph.binding.clear_binding_outputs()
        values = [value for graph in graphs for value in graph.tensors().values()]
        self._pool.give_back(((value.element_type(), tuple(value.shape())), value) for value in values)

    def eager_reason(self, bucket: Sizes | None) -> str:
        """Empty for a captured bucket."""
        if bucket in self._graphs:
            return ""
        return self.why_eager or ("no_bucket" if bucket is None else "not_captured")

    def slot(self, bucket: Sizes | None) -> Slot:
        """Host staging for one run of a bucket."""
        slot = self._free.pop() if self._free else WebGpuSlot(self)
        slot.graph = self._graphs.get(bucket) if bucket is not None else None
        return slot

    def give_back(self, slot: Slot) -> None:
        """Keep the staging buffers for the next run."""
        assert isinstance(slot, WebGpuSlot)
        slot.graph = None
        slot.values = {}
        self._free.append(slot)

    def replay(self, graph: _Graph, values: Mapping[str, Array], outputs: Sequence[str]) -> WebGpuRun:
        """Copy up and start the graph; nothing waits, unless the bucket's last outputs are still to be read."""
        with self.lock:
            if graph.pending is not None:
                graph.pending.read()
            for name, array in values.items():
                graph.inputs[name].update_inplace(array)
            if self._config.is_debug:
                _check_captured(graph)
            graph.session.run_with_iobinding(graph.binding, graph.options)
            graph.pending = WebGpuRun(self, graph, outputs)
            return graph.pending

    def run_eager(self, values: Mapping[str, Array], outputs: Sequence[str]) -> HostArrays:
        """A run without a graph, of any shape."""
        with self.lock:
            return run_on_host(self._session, self._dtypes, values, outputs, self._eager)

    def failure(self, error: Exception) -> RunError:
        """The error of a run; when the device was lost, the provider is not healthy any more."""
        self.is_healthy = self.is_healthy and _LOST not in str(error).lower()
        return error if isinstance(error, RunError) else RunError(first_line(error))

    def run_values(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> list[Any]:
        """ONNX Runtime's own `session.run`."""
        try:
            with self.lock:
                return list(self._session.run(list(outputs), dict(inputs), self._eager))
        except Exception as error:
            raise RunError(first_line(error)) from error

    def close(self) -> None:
        """Release graphs, tensors and sessions; calling it twice is safe."""
        with self.lock:
            self.retire(list(self._graphs))
            self._pool.close()
            self._free.clear()
            self.__dict__.pop("_session", None)


class WebGpuSlot:
    """The host side of one run."""

    def __init__(self, provider: WebGpuProvider) -> None:
        self._provider = provider
        self._buffers = HostBuffers()
        self.graph: _Graph | None = None
        self.values: dict[str, Array] = {}

    def stage(self, name: str, dtype: DType, shape: Shape) -> Array:
        """A view on the input's host buffer."""
        view = self.values[name] = self._buffers.view(name, dtype, shape)
        return view

    def borrow(self, name: str, dtype: DType, array: Array) -> None:
        """Copy up, or run, straight from the caller's memory."""
        self.values[name] = array

    def launch(self, outputs: Sequence[str], rows: int | None = None) -> Run:
        """Copy up and replay; a run without a graph, or with an input that the graph lacks, is over on return."""
        provider, graph, values = self._provider, self.graph, self.values
        try:
            if graph is not None and values.keys() == graph.inputs.keys():
                return provider.replay(graph, values, outputs)
            arrays = provider.run_eager(values, outputs)
            return DoneRun(lambda: arrays)
        except Exception as error:
            failure = provider.failure(error)
            return DoneRun.failed(failure)


class WebGpuRun:
    """A replay in flight. Its outputs are read when they are asked for, or before the bucket's next replay."""

    def __init__(self, provider: WebGpuProvider, graph: _Graph, outputs: Sequence[str]) -> None:
        self._provider = provider
        self._graph = graph
        self._names = tuple(outputs)
        self._arrays: HostArrays | None = None
        self._failure: RunError | None = None

    def is_done(self) -> bool:
        """Whether the outputs were read: the plugin does not tell when the device is done."""
        return self._arrays is not None or self._failure is not None

    def read(self) -> None:
        """Wait for the device and copy the outputs down; a failure shows in `wait`."""
        with self._provider.lock:
            if self.is_done():
                return
            try:
                self._arrays = {name: self._graph.outputs[name].numpy() for name in self._names}
            except Exception as error:
                self._failure = self._provider.failure(error)
            if self._graph.pending is self:
                self._graph.pending = None

    block = read

    def wait(self) -> HostArrays:
        """The outputs, in memory of their own."""
        self.read()
        if self._failure is not None:
            raise self._failure
        assert self._arrays is not None
        return self._arrays


def _run_options(graph_id: int) -> ort.RunOptions:
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    return options


def _blockers(session: ort.InferenceSession) -> str:
    """Which nodes the plugin leaves to the CPU: they are what forbids a capture."""
    nodes = [
        f"{node.op_type} '{node.name}'" if node.name else str(node.op_type)
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name != EP_NAME
        for node in part.get_nodes()
    ]
    shown = ", ".join(nodes[:_SHOWN_NODES]) + (f" and {len(nodes) - _SHOWN_NODES} more" if nodes[_SHOWN_NODES:] else "")
    return f"the plugin leaves {shown} to the CPU"


def _options(config: ModelConfig) -> dict[str, str]:
    """The plugin's options; it would ignore a name it does not know.

    Raises:
        ConfigError: an unknown option, or one that contradicts `graph_capture`.
    """
    for name, value in config.webgpu_options.items():
        if name not in OPTIONS:
            raise ConfigError(f"unknown WebGPU option '{name}'{nearest(name, OPTIONS)}")
        if name == "enableGraphCapture" and (
            value not in ("0", "1") or (value == "1") == (config.graph_capture == "off")
        ):
            raise ConfigError(
                f"WebGPU option 'enableGraphCapture' is {value}, but 'graph_capture' is {config.graph_capture}; "
                "remove the option, 'graph_capture' decides"
            )
    return {"sessionBufferPoolGenerations": str(config.buffer_pool_generations), **config.webgpu_options}


def _check_captured(graph: _Graph) -> None:
    """Debug mode: the graph will read and write the addresses of its capture.

    Raises:
        RunError: which tensor has moved.
    """
    for bound, values in ((graph.binding._bound_inputs, graph.inputs), (graph.binding._bound_outputs, graph.outputs)):
        for name, value in values.items():
            if bound.get(name) is not value:
                raise RunError(f"debug: '{name}' is not bound to the tensor of its capture")
    for name, value in graph.tensors().items():
        if value.data_ptr() != graph.addresses[name]:
            raise RunError(f"debug: {name} was captured at {graph.addresses[name]:#x}, is at {value.data_ptr():#x}")

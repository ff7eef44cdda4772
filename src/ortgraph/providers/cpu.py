"""The CPU: ONNX Runtime on host memory, nothing is captured, shapes are tight.

Its streams are worker threads: with `cpu_streams` above 1 the groups of a batch run beside each other, each on the
session's own intra-op threads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..config import ModelConfig
from ..dtypes import DType
from ..errors import RunError, first_line
from ..metrics import Metrics
from ..session import open_session, session_options, specs
from ..signature import Shape, Sizes
from .base import Array, HostArrays, Run, Slot
from .host import HostBuffers, run_on_host


class CpuProvider:
    """A model on ONNX Runtime's CPU provider."""

    name = "cpu"
    has_fixed_shapes = False
    can_capture = False
    is_healthy = True
    checks_indices = True
    tells_when_done = False
    rounding = 0.0
    why_eager = "provider_cpu"
    capture_note = "the CPU captures no graphs"
    remark = ""

    def __init__(self, config: ModelConfig, metrics: Metrics | None = None) -> None:
        self._session = open_session(config, session_options(config), ["CPUExecutionProvider"])
        self.inputs, self.outputs, self.not_tensors = specs(self._session)
        self.output_names = tuple(node.name for node in self._session.get_outputs())
        self._dtypes = {spec.name: spec.dtype for spec in self.inputs + self.outputs}
        streams = config.cpu_streams or 1
        self._workers = ThreadPoolExecutor(streams, "ortgraph-cpu") if streams > 1 else None
        self._free: list[CpuSlot] = []

    def capture(self, buckets: Mapping[Sizes, Mapping[str, Shape]]) -> dict[Sizes, str]:
        """Nothing is captured on the CPU."""
        return dict.fromkeys(buckets, self.capture_note)

    def retire(self, buckets: Collection[Sizes]) -> None:
        """There is nothing to retire."""

    def eager_reason(self, bucket: Sizes | None) -> str:
        """Every run is eager."""
        return self.why_eager

    def slot(self, bucket: Sizes | None) -> Slot:
        """Any slot fits any bucket: host buffers grow to the largest run they have seen."""
        return self._free.pop() if self._free else CpuSlot(self)

    def give_back(self, slot: Slot) -> None:
        """Keep the slot's buffers for the next run: last in, first out, while they are warm in the cache."""
        assert isinstance(slot, CpuSlot)
        slot.values.clear()
        self._free.append(slot)

    def start(self, values: dict[str, Array], outputs: Sequence[str]) -> Run:
        """Run now on this thread, or on a free worker."""
        if self._workers is None:
            return CpuRun(lambda: self._run(values, outputs))
        return CpuRun(self._workers.submit(self._run, values, outputs).result)

    def _run(self, values: dict[str, Array], outputs: Sequence[str]) -> HostArrays:
        return run_on_host(self._session, self._dtypes, values, outputs)

    def run_values(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> list[Any]:
        """ONNX Runtime's own `session.run`."""
        try:
            return list(self._session.run(list(outputs), dict(inputs)))
        except Exception as error:
            raise RunError(first_line(error)) from error

    def close(self) -> None:
        """Wait for runs in flight, then let go of everything."""
        if self._workers is not None:
            self._workers.shutdown()
            self._workers = None
        self._free.clear()


class CpuSlot:
    """Host buffers of one run, by input; the memory of staging is the memory of the run."""

    def __init__(self, provider: CpuProvider) -> None:
        self._provider = provider
        self._buffers = HostBuffers()
        self.values: dict[str, Array] = {}

    def stage(self, name: str, dtype: DType, shape: Shape) -> Array:
        """A view on the input's buffer, which grows when it is too small."""
        view = self._buffers.view(name, dtype, shape)
        self.values[name] = view
        return view

    def borrow(self, name: str, dtype: DType, array: Array) -> None:
        """Run on the caller's memory."""
        self.values[name] = array

    def launch(self, outputs: Sequence[str], rows: int | None = None) -> Run:
        """Start the run; its rows are all real."""
        return self._provider.start(dict(self.values), outputs)


class CpuRun:
    """A run on this thread (when it is waited for) or on a worker (already going)."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def is_done(self) -> bool:
        """Unknown before it is waited for."""
        return False

    def block(self) -> None:
        """Nothing to wait for: the run is made by `wait`, or waited for there."""

    def wait(self) -> HostArrays:
        """The outputs, lent by ONNX Runtime without a copy."""
        outputs: HostArrays = self._result()
        return outputs

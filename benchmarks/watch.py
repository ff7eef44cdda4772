"""The served model with a watch on it, for figures.py: what Python costs a request, and when the device is busy.

Imported by a model.py that figures.py writes. Each instance leaves a JSON file in its version folder when it ends.
All times are of the monotonic clock, which the processes of a machine share.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine
from ortgraph import Engine, ModelConfig, child, engine_process
from ortgraph.backend import TritonPythonModel
from ortgraph.engine_process import Host
from ortgraph.remote import RemoteEngine

Interval = tuple[int, int]
_PENDING = 256


def _leave(args: dict[str, str]) -> Path:
    return Path(args["model_repository"]) / args["model_version"] / f"watch-{os.getpid()}.json"


class TimedModel(TritonPythonModel):
    """Keeps for each batch its requests and the seconds of `execute`, of its parts, and of waiting for the device."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load, then put a clock around each part."""
        super().initialize(args)
        self._file = _leave(args)
        self._batches: list[dict[str, float]] = []
        self._spent_s = dict.fromkeys(("read", "begin", "wait", "respond"), 0.0)
        assert self._engine
        for owner, name, part in (
            (self, "_read", "read"),
            (self, "_respond", "respond"),
            (self._engine, "_send" if isinstance(self._engine, RemoteEngine) else "begin", "begin"),
            (*_wait_of(self._engine), "wait"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), part))

    def _timed(self, work: Callable[..., Any], part: str) -> Callable[..., Any]:
        spent_s, clock = self._spent_s, time.perf_counter

        def timed(*arguments: Any, **named: Any) -> Any:
            start_s = clock()
            try:
                return work(*arguments, **named)
            finally:
                spent_s[part] += clock() - start_s

        return timed

    def execute(self, requests: Any) -> Any:
        """The batch, timed."""
        for part in self._spent_s:
            self._spent_s[part] = 0.0
        start_s = time.perf_counter()
        answers = super().execute(requests)
        total_s = time.perf_counter() - start_s
        self._batches.append({"at_ns": time.monotonic_ns(), "requests": len(requests), "all": total_s, **self._spent_s})
        return answers

    def finalize(self) -> None:
        """Leave the file."""
        self._file.write_text(json.dumps({"batches": self._batches}))
        super().finalize()


class TracedModel(TritonPythonModel):
    """Keeps when the device ran: on CUDA by two events around each replay and, with cupti-python, by CUPTI's record.

    On the CPU it is the time inside ONNX Runtime.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Watch the engine in this process, or have its own process watch it."""
        start, root = child.python_command("benchmarks.watch"), str(Path(__file__).resolve().parents[1])
        code = f"import sys; sys.path.insert(0, {root!r}); from benchmarks.watch import main; main()"
        child.python_command = lambda module: [start[0], "-c", code]
        self._trace = _Trace(_leave(args))
        super().initialize(args)
        self._trace.attach(self._engine)

    def finalize(self) -> None:
        """Leave the file."""
        self._trace.leave()
        super().finalize()


def main() -> None:
    """An engine process that leaves the file when its last instance has gone."""
    load, run = Engine.load, Host.run
    traces = []

    def watched_load(config: ModelConfig) -> Engine:
        traces.append(_Trace(config.model_path.parent / f"watch-{os.getpid()}.json"))
        engine = load(config)
        traces[0].attach(engine)
        return engine

    def watched_run(host: Host) -> None:
        run(host)
        traces[0].leave()

    Engine.load, Host.run = watched_load, watched_run  # type: ignore[method-assign,assignment]
    engine_process.main()


class _Trace:
    """Of one engine. CUPTI must be there before the graphs are, the rest when they are."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._note = ""
        self._sources: list[_GraphTrace | _EventTrace | _HostTrace] = []
        if machine.gpus():
            try:
                self._sources.append(_GraphTrace())
            except Exception as error:  # of CUPTI's own types, which are not there without it; the events are
                self._note = f"no CUPTI: {error}"

    def attach(self, engine: Any) -> None:
        """Watch the engine, where it is in this process."""
        if isinstance(engine, RemoteEngine):
            self._sources = []
        else:
            is_cuda = engine.provider_name == "cuda"
            self._sources.append(_EventTrace(engine._provider) if is_cuda else _HostTrace())

    def leave(self) -> None:
        """Write the file."""
        if found := {source.name: source.intervals() for source in self._sources}:
            self._file.write_text(json.dumps({"intervals": found, "note": self._note}))


def _wait_of(engine: Any) -> tuple[Any, str]:
    """Where serving waits for the device: for the event; on the CPU the run itself; for the engine's process."""
    if isinstance(engine, RemoteEngine):
        return engine, "_receive"
    if engine.provider_name == "cuda":
        from ortgraph.providers import driver

        return driver.Event, "synchronize"
    from ortgraph.providers.cpu import CpuRun

    return CpuRun, "wait"


class _GraphTrace:
    """CUPTI's record of the first kernel's start and the last one's end of every graph."""

    name = "CUPTI"

    def __init__(self) -> None:
        from cupti import cupti

        self._cupti = cupti
        self._found: list[Interval] = []
        cupti.activity_register_callbacks(lambda: (8 * 1024 * 1024, 0), self._complete)
        cupti.activity_enable(cupti.ActivityKind.GRAPH_TRACE)

    def _complete(self, activities: list[Any]) -> None:
        kind = int(self._cupti.ActivityKind.GRAPH_TRACE)
        self._found += [(each.start, each.end) for each in activities if int(each.kind) == kind and each.end]

    def intervals(self) -> list[Interval]:
        """All so far."""
        self._cupti.activity_flush_all(1)
        offset_ns = time.monotonic_ns() - self._cupti.get_timestamp()
        return [(start + offset_ns, end + offset_ns) for start, end in self._found]


class _EventTrace:
    """Two timing events around every replay, behind the copy up and before the copy down."""

    name = "events"

    def __init__(self, provider: Any) -> None:
        from cuda.bindings import runtime

        from ortgraph.providers.driver import check

        self._check, self._runtime, self._stream = check, runtime, provider.stream.handle
        self._found: list[Interval] = []
        self._pending: deque[tuple[Any, Any]] = deque()
        self._base = self._marked(self._event())
        check("cudaEventSynchronize", runtime.cudaEventSynchronize(self._base))
        self._base_ns = time.monotonic_ns()
        replay = provider._session.run_with_iobinding

        def timed(*arguments: Any) -> None:
            pair = self._pair()
            self._marked(pair[0])
            replay(*arguments)
            self._marked(pair[1])
            self._pending.append(pair)

        provider._session.run_with_iobinding = timed

    def _event(self) -> Any:
        return self._check("cudaEventCreate", self._runtime.cudaEventCreateWithFlags(0))

    def _marked(self, event: Any) -> Any:
        self._check("cudaEventRecord", self._runtime.cudaEventRecord(event, self._stream))
        return event

    def _pair(self) -> tuple[Any, Any]:
        return (self._event(), self._event()) if len(self._pending) < _PENDING else self._read_oldest()

    def _read_oldest(self) -> tuple[Any, Any]:
        pair = self._pending.popleft()
        ends = [self._check("cudaEventElapsedTime", self._runtime.cudaEventElapsedTime(self._base, e)) for e in pair]
        self._found.append((self._base_ns + int(ends[0] * 1e6), self._base_ns + int(ends[1] * 1e6)))
        return pair

    def intervals(self) -> list[Interval]:
        """All so far; nothing is in flight."""
        while self._pending:
            self._read_oldest()
        return self._found


class _HostTrace:
    """The time inside ONNX Runtime on the CPU."""

    name = "host"

    def __init__(self) -> None:
        from ortgraph.providers.cpu import CpuRun as owner

        name = "wait"
        wait, found = getattr(owner, name), []

        def timed(run: Any) -> Any:
            start_ns = time.monotonic_ns()
            try:
                return wait(run)
            finally:
                found.append((start_ns, time.monotonic_ns()))

        setattr(owner, name, timed)
        self._found: list[Interval] = found

    def intervals(self) -> list[Interval]:
        """All so far."""
        return self._found

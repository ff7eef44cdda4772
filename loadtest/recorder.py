"""Keeps every request of a test: raw samples, so that percentiles of several processes are those of all of them.

Locust's own statistics round response times; a worker therefore sends its samples to the master in its reports.
"""

from __future__ import annotations

import argparse
import itertools
import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import gevent
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from loadtest.arrivals import due_times
from loadtest.stages import Stage, endless

NEVER_SENT = "never sent: all users waited for answers until the test ended"
_START, _SAMPLES, _READY = "loadtest_start", "loadtest_samples", "loadtest_ready"
_DRAINED, _FINISH = "loadtest_drained", "loadtest_finish"
_READY_TIMEOUT_S = 120.0
_GRACE_S = 5.0  # for messages
STOP_TIMEOUT_S = 5.0  # for answers that are on their way when a test ends
_KINDS = 50  # more different messages than this are counted together


def _doubles() -> array[float]:
    return array("d")


@dataclass
class Samples:
    """Requests in the order of their answers.

    `due_s` is when each was due (closed loop: sent), from the test's start; latency is from then until its answer,
    service from when it was really sent. Failures are by message, with the same moment.
    """

    due_s: array[float] = field(default_factory=_doubles)
    latency_ms: array[float] = field(default_factory=_doubles)
    service_ms: array[float] = field(default_factory=_doubles)
    failed_s: dict[str, array[float]] = field(default_factory=dict)

    def fail(self, kind: str, due_s: float) -> None:
        """Count a failure."""
        if kind not in self.failed_s and len(self.failed_s) >= _KINDS:
            kind = "other failures"
        self.failed_s.setdefault(kind, _doubles()).append(due_s)

    def pack(self) -> dict[str, Any]:
        """For a message between Locust's processes."""
        columns = {name: getattr(self, name).tobytes() for name in ("due_s", "latency_ms", "service_ms")}
        return {**columns, "failed_s": {kind: times.tobytes() for kind, times in self.failed_s.items()}}

    def add_packed(self, packed: Mapping[str, Any]) -> None:
        """Add what another process has packed."""
        for name in ("due_s", "latency_ms", "service_ms"):
            getattr(self, name).frombytes(packed[name])
        for kind, times in packed["failed_s"].items():
            self.failed_s.setdefault(kind, _doubles()).frombytes(times)


class Recorder:
    """Listens to one Locust environment, in every kind of process: alone, master or worker."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.samples = Samples()
        self.plan: list[Stage] = []
        self.cpu_s: dict[str, float] = {}  # of each process that makes load, since the start
        self.start_s = 0.0
        self.stop_s = 0.0  # 0 while the test runs
        self._arrivals: Iterator[float] | None = None
        self._held: set[float] = set()  # taken, not yet sent
        self._share = (0, 1)
        self._ready: set[str] = set()  # workers that have made their requests
        self._drained: set[str] = set()  # those that have sent all that was due
        self._finished: set[str] = set()  # those that have stopped, and told their last samples
        self._cpu_start_s = 0.0
        events = environment.events
        events.test_start.add_listener(self._on_start)
        events.test_stop.add_listener(self._on_stop)
        events.request.add_listener(self._on_request)
        events.report_to_master.add_listener(self._on_report)
        events.worker_report.add_listener(self._on_worker_report)

    def listen(self) -> None:
        """Take the messages of the other processes; call it when the environment has its runner."""
        runner = self.environment.runner
        if isinstance(runner, MasterRunner):
            runner.register_message(_SAMPLES, lambda msg, **_: self._on_last_report(msg.node_id, msg.data))
            self.environment.events.test_stopping.add_listener(self._gather)
            runner.register_message(_READY, lambda msg, **_: self._ready.add(msg.node_id))
            runner.register_message(_DRAINED, lambda msg, **_: self._drained.add(msg.node_id))
        elif isinstance(runner, WorkerRunner):
            runner.register_message(_START, lambda msg, **_: self._on_told(msg.data))
            runner.register_message(_FINISH, lambda msg, **_: runner.stop())

    def ready(self) -> None:
        """Tell the master that this worker can start: it waits for all, so that their clocks agree."""
        self.environment.runner.send_message(_READY)

    @property
    def elapsed_s(self) -> float:
        """Since the test's start, until now or its end."""
        return (self.stop_s or time.perf_counter()) - self.start_s

    @property
    def is_drained(self) -> bool:
        """Whether everything that the open loop's stages asked for was sent."""
        return len(self._drained) >= int(self.environment.runner.worker_count)

    def take(self) -> float | None:
        """The perf_counter moment of the next request that is due in this process; None when there is no more.

        Whoever takes it calls `sent` with it when it sends.
        """
        due_s = next(self._arrivals, None) if self._arrivals is not None else None
        if due_s is None:
            self._arrivals = None
            self._note_drained()
            return None
        self._held.add(self.start_s + due_s)
        return self.start_s + due_s

    def sent(self, due_s: float) -> None:
        """What was taken is being sent."""
        self._held.discard(due_s)
        if self._arrivals is None:
            self._note_drained()

    def _note_drained(self) -> None:
        if self._held or self._drained:
            return
        self._drained.add("this process")
        runner = self.environment.runner
        if isinstance(runner, WorkerRunner):
            runner.send_message(_DRAINED)

    def finish(self) -> None:
        """Count what was due until now and could not be sent. Twice is safe."""
        if self.stop_s or not self.start_s:
            return
        self.stop_s = time.perf_counter()
        self._note_cpu()
        held = sorted(due_s - self.start_s for due_s in self._held)
        for due_s in itertools.chain(held, self._arrivals or ()):
            if due_s > self.elapsed_s:
                break
            self.samples.fail(NEVER_SENT, due_s)
        self._arrivals = None
        self._held.clear()

    def _on_start(self, **_: Any) -> None:
        runner, parsed = self.environment.runner, self.environment.parsed_options
        self.samples, self.cpu_s, self.stop_s = Samples(), {}, 0.0
        self._held.clear()
        self._drained.clear()
        self._finished.clear()
        if not isinstance(runner, WorkerRunner):
            shape = self.environment.shape_class
            level = parsed.rate if parsed.rate > 0 else runner.target_user_count
            self.plan = shape.plan() if shape is not None else endless(level, parsed.warmup_s)
        if isinstance(runner, MasterRunner):
            clients = [*runner.clients.ready, *runner.clients.running, *runner.clients.spawning]
            with gevent.Timeout(_READY_TIMEOUT_S, False):
                while not self._ready.issuperset(client.id for client in clients):
                    gevent.sleep(0.02)
            stages = [(s.name, s.level, s.start_s, s.measure_s, s.end_s) for s in self.plan]
            for index, client in enumerate(clients):
                share = {"stages": stages, "index": index, "count": len(clients)}
                runner.send_message(_START, share, client_id=client.id)
        self.start_s, self._cpu_start_s = time.perf_counter(), time.process_time()
        self._arrivals = self._make_arrivals(parsed)

    def _make_arrivals(self, parsed: argparse.Namespace) -> Iterator[float] | None:
        if parsed.rate <= 0 or isinstance(self.environment.runner, MasterRunner):
            return None
        index, count = self._share
        is_poisson = parsed.arrivals == "poisson"
        return due_times(self.plan, is_poisson=is_poisson, index=index, count=count, seed=parsed.seed)

    def _on_told(self, data: Mapping[str, Any]) -> None:
        """The master tells a worker its plan and share, before it tells it to spawn users."""
        self.plan = [Stage(*stage) for stage in data["stages"]]
        self._share = data["index"], data["count"]

    def _on_request(
        self, response_time: float, exception: Exception | None, context: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        context = context or {}
        service_ms = context.get("service_ms", response_time)
        due_s = context.get("due_s", time.perf_counter() - response_time / 1e3) - self.start_s
        if exception is not None:
            self.samples.fail(f"{type(exception).__name__}: {exception}", due_s)
        else:
            self.samples.due_s.append(due_s)
            self.samples.latency_ms.append(response_time)
            self.samples.service_ms.append(service_ms)

    def _on_stop(self, **_: Any) -> None:
        self.finish()
        runner = self.environment.runner
        if isinstance(runner, WorkerRunner):  # the next report may come too late
            data: dict[str, Any] = {}
            self._on_report(runner.client_id, data)
            runner.send_message(_SAMPLES, data)

    def _gather(self, **_: Any) -> None:
        """Stop the workers' users and wait for their last samples: Locust, when it quits, waits half a second only."""
        runner = self.environment.runner
        clients = [client.id for client in runner.clients.all]
        for client in clients:
            runner.send_message(_FINISH, client_id=client)
        with gevent.Timeout(self.environment.stop_timeout + _GRACE_S, False):
            while not self._finished.issuperset(clients):
                gevent.sleep(0.02)

    def _on_last_report(self, client_id: str, data: Mapping[str, Any]) -> None:
        self._on_worker_report(client_id, data)
        self._finished.add(client_id)

    def _note_cpu(self) -> None:
        if not isinstance(self.environment.runner, MasterRunner):
            self.cpu_s["this process"] = time.process_time() - self._cpu_start_s

    def _on_report(self, client_id: str, data: dict[str, Any]) -> None:
        if not self.stop_s:
            self._note_cpu()
        data[_SAMPLES] = {**self.samples.pack(), "cpu_s": sum(self.cpu_s.values())}
        self.samples = Samples()

    def _on_worker_report(self, client_id: str, data: Mapping[str, Any]) -> None:
        if packed := data.get(_SAMPLES):
            self.samples.add_packed(packed)
            self.cpu_s[client_id] = packed["cpu_s"]


def recorder(environment: Environment) -> Recorder:
    """The environment's recorder, made at the first call."""
    found = getattr(environment, "loadtest_recorder", None)
    if found is None:
        found = environment.loadtest_recorder = Recorder(environment)
    return found

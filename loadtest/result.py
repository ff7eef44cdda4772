"""From samples and counters to what a report shows."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from benchmarks import machine
from loadtest import gate, server_metrics
from loadtest.gate import Check
from loadtest.knee import knee
from loadtest.monitor import GpuReading, Monitor
from loadtest.options import Requests
from loadtest.percentiles import Latency, percentile
from loadtest.recorder import Recorder, Samples
from loadtest.server_metrics import Series
from loadtest.stages import Stage

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ServerTimes:
    """Mean times of a request in milliseconds, in perf_analyzer's columns, and how many ran together."""

    queue_ms: float
    compute_input_ms: float
    compute_infer_ms: float
    compute_output_ms: float
    network_and_client_ms: float
    requests: int
    executions: int


@dataclass(frozen=True)
class StageResult:
    """One stage: latency counts from when a request was due, service from when it was sent."""

    name: str
    offered: float
    start_s: float
    measured_s: float
    throughput_rps: float
    latency: Latency
    service: Latency
    failures: dict[str, int]
    server: ServerTimes | None


@dataclass(frozen=True)
class Second:
    """What became due in one second of the test."""

    time_s: float
    answers: int
    failures: int
    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True)
class Point:
    """One percentile of latency and of service time."""

    percent: float
    latency_ms: float
    service_ms: float


@dataclass(frozen=True)
class Ceiling:
    """What this generator reaches against a model that does nothing, with the same requests and users.

    `cores_at_1000_rps` is its processor time a second in an open loop of that rate; None where it does not reach it.
    """

    throughput_rps: float
    p50_ms: float
    p99_ms: float
    cores_at_1000_rps: float | None


@dataclass(frozen=True)
class Generator:
    """What the load generator itself did: its processor time, and how late it sent what was due."""

    processes: int
    cpu_cores: float
    cpu_us_per_request: float
    late_p50_ms: float
    late_p99_ms: float
    ceiling: Ceiling | None


@dataclass(frozen=True)
class Result:
    """What a run gave. Percentiles are of right answers: a quick refusal would flatter them.

    `bucket_hits`, `padding_share` and `gpus` have the warm-up too; None or empty where the server does not tell.
    """

    command: str
    date: str
    hardware: dict[str, object]
    versions: dict[str, str]
    protocol: str
    model: str
    lengths: str
    loop: str
    shape: str
    users: int
    measured_s: float
    throughput_rps: float
    latency: Latency
    service: Latency
    failures: dict[str, int]
    stages: list[StageResult]
    knee: float | None
    bucket_hits: dict[str, float] | None
    padding_share: float | None
    gpus: list[GpuReading]
    generator: Generator
    timeline: list[Second]
    spectrum: list[Point]
    gate: list[Check]

    @property
    def passed(self) -> bool:
        """Whether every check of the gate holds, and there was an answer at all."""
        return self.latency.count > 0 and all(check.passed for check in self.gate)


@dataclass(frozen=True)
class Columns:
    """Samples as arrays, sorted by when they were due."""

    due_s: Array
    latency_ms: Array
    service_ms: Array

    @classmethod
    def of(cls, samples: Samples) -> Columns:
        """Copies, so that the recorder may go on."""
        due_s = np.array(samples.due_s)
        order = np.argsort(due_s, kind="stable")
        return cls(due_s[order], np.array(samples.latency_ms)[order], np.array(samples.service_ms)[order])

    def within(self, start_s: float, end_s: float) -> Columns:
        """Those due from `start_s` to before `end_s`."""
        part = slice(*np.searchsorted(self.due_s, (start_s, end_s)))
        return Columns(self.due_s[part], self.latency_ms[part], self.service_ms[part])


def summarise(
    recorder: Recorder, monitor: Monitor, parsed: argparse.Namespace, *, protocol: str, users: int, command: str,
    processes: int = 1, ceiling: Ceiling | None = None,
) -> Result:  # fmt: skip
    """The result of a recorder's test until now."""
    samples, elapsed_s = recorder.samples, recorder.elapsed_s
    columns = Columns.of(samples)
    stages = [_stage(stage, columns, samples, monitor, parsed.model, elapsed_s) for stage in recorder.plan]
    stages = [stage for stage in stages if stage.measured_s > 0]
    measured = [columns.within(stage.measure_s, stage.end_s) for stage in recorder.plan]
    latency_ms, service_ms = (
        np.concatenate([getattr(part, name) for part in measured] or [np.empty(0)])
        for name in ("latency_ms", "service_ms")
    )
    measured_s = sum(stage.measured_s for stage in stages)
    throughput_rps = sum(s.throughput_rps * s.measured_s for s in stages) / measured_s if measured_s else 0.0
    failures = {kind: len(times) for kind, times in samples.failed_s.items()}
    failures = dict(sorted(failures.items(), key=lambda item: -item[1]))
    latency = Latency.of(latency_ms)
    late_ms = np.sort(latency_ms - service_ms)
    cpu_s, finished = sum(recorder.cpu_s.values()), len(columns.due_s) + sum(failures.values())
    described = machine.describe([])
    return Result(
        command=command,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        hardware=described["hardware"],  # type: ignore[arg-type]
        versions=described["versions"],  # type: ignore[arg-type]
        protocol=protocol,
        model=parsed.model,
        lengths=str(Requests.of(parsed).lengths),
        loop=f"open, {parsed.arrivals}" if parsed.rate > 0 else "closed",
        shape=parsed.shape,
        users=users,
        measured_s=measured_s,
        throughput_rps=throughput_rps,
        latency=latency,
        service=Latency.of(service_ms),
        failures=failures,
        stages=stages,
        knee=knee([(stage.offered, stage.throughput_rps, stage.latency.p99_ms) for stage in stages])
        if parsed.shape == "steps"
        else None,
        bucket_hits=_bucket_hits(monitor, parsed.model),
        padding_share=_padding_share(monitor, parsed.model),
        gpus=monitor.gpus,
        generator=Generator(
            processes=processes,
            cpu_cores=cpu_s / elapsed_s if elapsed_s else 0.0,
            cpu_us_per_request=cpu_s / finished * 1e6 if finished else math.nan,
            late_p50_ms=percentile(late_ms, 50),
            late_p99_ms=percentile(late_ms, 99),
            ceiling=ceiling,
        ),
        timeline=_timeline(columns, samples, elapsed_s),
        spectrum=_spectrum(latency_ms, service_ms),
        gate=gate.check(parsed, latency, throughput_rps, sum(failures.values())),
    )


def _stage(
    stage: Stage, columns: Columns, samples: Samples, monitor: Monitor, model: str, elapsed_s: float
) -> StageResult:
    part = columns.within(stage.measure_s, stage.end_s)
    end_s = min(stage.end_s, elapsed_s)
    measured_s = max(end_s - stage.measure_s, 0.0)
    answered_s = columns.due_s + columns.latency_ms / 1e3
    answers = int(np.count_nonzero((answered_s >= stage.measure_s) & (answered_s < end_s)))
    failures = {
        kind: int(np.count_nonzero((np.array(times) >= stage.measure_s) & (np.array(times) < stage.end_s)))
        for kind, times in samples.failed_s.items()
    }
    service = Latency.of(part.service_ms)
    edges = monitor.edges.get(stage.name)
    return StageResult(
        name=stage.name,
        offered=stage.level,
        start_s=stage.measure_s,
        measured_s=measured_s,
        throughput_rps=answers / measured_s if measured_s else 0.0,
        latency=Latency.of(part.latency_ms),
        service=service,
        failures={kind: count for kind, count in failures.items() if count},
        server=_server_times(*edges, model, service.mean_ms) if edges else None,
    )


def _server_times(before: Series, after: Series, model: str, client_ms: float) -> ServerTimes | None:
    """None when the server counted no request in between."""

    def grown(name: str) -> float:
        return server_metrics.grown(before, after, f"nv_inference_{name}", model=model)

    requests = grown("request_success")
    if requests <= 0:
        return None
    queue_ms, input_ms, infer_ms, output_ms = (
        grown(f"{name}_duration_us") / requests / 1e3
        for name in ("queue", "compute_input", "compute_infer", "compute_output")
    )
    # Requests that were in the server at an edge make this inexact; it is never below 0.
    outside_ms = max(0.0, client_ms - queue_ms - input_ms - infer_ms - output_ms)
    executions = int(grown("exec_count"))
    return ServerTimes(queue_ms, input_ms, infer_ms, output_ms, outside_ms, int(requests), executions)


def _bucket_hits(monitor: Monitor, model: str) -> dict[str, float] | None:
    if not monitor.last:
        return None
    found = server_metrics.growth(monitor.first, monitor.last, server_metrics.BUCKET_HITS, "bucket", model=model)
    return dict(found)


def _padding_share(monitor: Monitor, model: str) -> float | None:
    """Padded elements by all; None where the server does not count them."""
    real, padded = (
        server_metrics.grown(monitor.first, monitor.last, f"ortgraph_{kind}_elements_total", model=model)
        for kind in ("real", "padded")
    )
    return padded / (real + padded) if real + padded > 0 else None


def _timeline(columns: Columns, samples: Samples, elapsed_s: float) -> list[Second]:
    failed = np.concatenate([np.array(times) for times in samples.failed_s.values()] or [np.empty(0)])
    seconds = []
    for second in range(math.ceil(elapsed_s)):
        ordered = np.sort(columns.within(second, second + 1).latency_ms)
        percentiles = (percentile(ordered, percent) for percent in (50, 99, 100))
        failures = int(np.count_nonzero((failed >= second) & (failed < second + 1)))
        seconds.append(Second(second, len(ordered), failures, *percentiles))
    return seconds


def _spectrum(latency_ms: Array, service_ms: Array) -> list[Point]:
    """From P0 up to the percentile that one sample is above, evenly on a scale of how few are slower."""
    if not len(latency_ms):
        return []
    latency, service = np.sort(latency_ms), np.sort(service_ms)
    shares = np.geomspace(1.0, 1 / len(latency), 60)
    percents = [100 * (1 - share) for share in shares]
    return [Point(percent, percentile(latency, percent), percentile(service, percent)) for percent in percents]

"""Takes turns: every target under every load in every round, the order reversed from round to round.

All targets are served at once, each by a server of its own, and only one of them gets load at a time. So a change of
the machine's speed meets all targets alike, and no round measures a server's start. What the idle servers use
meanwhile is measured and reported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from benchmarks.loader import Job, LoadProcesses, Measurement
from benchmarks.targets import BenchmarkError, Target, with_backends
from loadtest import server_metrics
from loadtest.lengths import Lengths
from loadtest.wire import Shot
from ortgraph.server import TritonServer


@dataclass(frozen=True)
class Load:
    """So many clients, each with one request on its way, of these lengths and this many rows."""

    clients: int
    lengths: Lengths
    rows: int = 1

    @classmethod
    def parse(cls, text: str) -> Load:
        """`16:8..128`, or with 4 rows a request `16:8..128x4`. Raises ValueError."""
        match = re.fullmatch(r"([1-9]\d{0,3}):(.+?)(?:x([1-9]\d{0,3}))?", text)
        if match is None:
            raise ValueError(f"a load must be clients:lengths[xrows], such as 16:8..128, got '{text}'")
        return cls(int(match[1]), Lengths.parse(match[2]), int(match[3] or 1))

    def __str__(self) -> str:
        return f"{self.clients}:{self.lengths}" + (f"x{self.rows}" if self.rows > 1 else "")


@dataclass(frozen=True)
class Plan:
    """How much to measure. `warmup_s` comes before each slice, `first_warmup_s` before a target's first."""

    loads: Sequence[Load]
    rounds: int
    slice_s: float
    warmup_s: float
    first_warmup_s: float
    tolerance: float | None = None


@dataclass
class Slice:
    """One measurement and where it belongs.

    Processor time meanwhile: of the server, of the idle servers, and of all that is not part of this benchmark
    (time that a hypervisor took away included).
    """

    target: str
    load: str
    round: int
    measured: Measurement
    server_cpu_s: float = 0.0
    idle_cpu_s: float = 0.0
    other_cpu_s: float = 0.0
    bucket_hits: Mapping[str, float] = field(default_factory=dict)


def serve_and_measure(
    targets: Sequence[Target],
    plan: Plan,
    pools: Mapping[str, Sequence[Shot]],
    *,
    logs: Path,
    backends: Path | None = None,
    report: Callable[[str], None],
    advance: Callable[[float], None],
    keep: Callable[[Sequence[Slice]], object] = lambda slices: None,
) -> list[Slice]:
    """All slices in the order they were measured; after Ctrl-C those of the rounds that were finished.

    Args:
        backends: a folder with further Triton backends, for targets that are served by one of them.
        report: told what goes on now. advance: told how many seconds of measuring are done.
        keep: given all slices so far after each round.

    Raises:
        BenchmarkError: a server or its model did not start, or stopped answering.
        KeyboardInterrupt: Ctrl-C came before the first round was finished.
    """
    slices: list[Slice] = []
    extra = (f"--backend-directory={with_backends(backends, logs)}",) if backends else ()
    with ExitStack() as stack:
        servers: dict[str, TritonServer] = {}
        for target in targets:
            report(f"starting the server for {target.label}")
            server = TritonServer(target.repository, log_path=logs / f"{target.label}.log", extra_args=extra)
            servers[target.label] = stack.enter_context(server)
            _check_models(target, servers[target.label])
        loader = stack.enter_context(LoadProcesses(pools))
        for load in plan.loads:
            for target in targets:
                report(f"warming up {target.label}, {load}")
                job = _job(servers[target.label], target, load, plan, plan.first_warmup_s, 0.0, seed=0)
                _run(loader, job, target)
                advance(plan.first_warmup_s)
        for number in range(plan.rounds):
            try:
                slices += _round(number, targets, plan, servers, loader, report, advance)
            except KeyboardInterrupt:
                if not slices:
                    raise
                break
            keep(slices)
    return slices


def _round(
    number: int,
    targets: Sequence[Target],
    plan: Plan,
    servers: Mapping[str, TritonServer],
    loader: LoadProcesses,
    report: Callable[[str], None],
    advance: Callable[[float], None],
) -> list[Slice]:
    """Every load on every target once."""
    slices = []
    for load in plan.loads:
        for target in targets if number % 2 == 0 else reversed(targets):
            report(f"round {number + 1} of {plan.rounds}, load {load}, {target.label}")
            server = servers[target.label]
            job = _job(server, target, load, plan, plan.warmup_s, plan.slice_s, seed=number + 1)
            slices.append(_measure(loader, job, target, servers, number))
            advance(plan.warmup_s + plan.slice_s)
    return slices


def _check_models(target: Target, server: TritonServer) -> None:
    for model in server.models():
        if model.state != "READY":
            raise BenchmarkError(f"{target.label}: model {model.name} is {model.state}: {model.reason}")


def _job(
    server: TritonServer, target: Target, load: Load, plan: Plan, warmup_s: float, duration_s: float, seed: int
) -> Job:
    url = urlsplit(f"//{server.http_url}")
    return Job(
        load=str(load),
        host=url.hostname or "127.0.0.1",
        port=url.port or 8000,
        clients=load.clients,
        warmup_s=warmup_s,
        duration_s=duration_s,
        seed=seed,
        is_checked=target.is_checked,
        tolerance=plan.tolerance,
    )


def _measure(
    loader: LoadProcesses, job: Job, target: Target, servers: Mapping[str, TritonServer], number: int
) -> Slice:
    server = servers[target.label]
    before = server_metrics.read(server.metrics_url)
    outside_before_s = _outside_seconds()
    cpu_before_s = {label: cpu_seconds(other.pid) for label, other in servers.items()}
    measured = _run(loader, job, target)
    cpu_s = {label: cpu_seconds(other.pid) - cpu_before_s[label] for label, other in servers.items()}
    outside_s = _outside_seconds() - outside_before_s
    after = server_metrics.read_settled(server.metrics_url)
    own = cpu_s.pop(target.label)
    if not measured.latencies_ms:
        why = next(iter(measured.failures), f"give --slice-s more than {job.duration_s:g}")
        raise BenchmarkError(f"{target.label}: no right answer came under load {job.load}: {why}")
    hits = server_metrics.growth(before, after, server_metrics.BUCKET_HITS, "bucket")
    return Slice(target.label, job.load, number, measured, own, sum(cpu_s.values()), max(outside_s, 0.0), hits)


def _run(loader: LoadProcesses, job: Job, target: Target) -> Measurement:
    try:
        return loader.run(job)
    except OSError as error:
        raise BenchmarkError(f"{target.label} stopped answering under load {job.load}: {error}") from error


def cpu_seconds(pid: int | None) -> float:
    """Processor time of a process and all below it, in seconds since their start."""
    if pid is None:
        return 0.0
    parent = psutil.Process(pid)
    times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
    return float(sum(t.user + t.system for t in times))


def _outside_seconds() -> float:
    """Processor time that the machine has spent, less that of this process and all below it."""
    times = psutil.cpu_times()
    busy = sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
    return float(busy) - cpu_seconds(os.getpid())

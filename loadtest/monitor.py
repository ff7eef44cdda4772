"""Watches the server while a test runs: Triton's counters where stages begin and end, and the GPUs once a second."""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
from dataclasses import dataclass, field

import gevent

from loadtest import server_metrics
from loadtest.recorder import Recorder
from loadtest.server_metrics import Series

INTERVAL_S = 1.0
_SMI = ("nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits")


def metrics_url(parsed: argparse.Namespace, address: str) -> str | None:
    """The page that the options name, else port 8002 of the server's host, where that answers."""
    if parsed.metrics_url is not None:
        return parsed.metrics_url or None
    host = address.removeprefix("http://").removeprefix("grpc://").rstrip("/").rpartition(":")[0]
    url = f"http://{host}:8002/metrics"
    try:
        server_metrics.read(url, timeout_s=2.0)
    except OSError:
        return None
    return url


def is_local(address: str) -> bool:
    """Whether a server's GPUs are those of this machine."""
    host = address.removeprefix("http://").removeprefix("grpc://").rstrip("/").rpartition(":")[0]
    return host in ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one moment, seconds from the test's start; utilization 0 to 1, -1 where it is not known."""

    time_s: float
    gpu: str
    utilization: float
    memory_mib: float


@dataclass
class Monitor:
    """What was seen. `edges` are the counters at the edges of each stage's measured part, by its name.

    Without a metrics page nothing is seen of the server, but the GPUs of this machine are.
    """

    metrics_url: str | None
    is_local: bool
    edges: dict[str, tuple[Series, Series]] = field(default_factory=dict)
    gpus: list[GpuReading] = field(default_factory=list)
    first: Series = field(default_factory=dict)
    last: Series = field(default_factory=dict)
    _opened: dict[str, Series] = field(default_factory=dict)

    def watch(self, recorder: Recorder) -> None:
        """Until it is killed. Call it in a greenlet when the test has started."""
        self.first = self.last = self._read()
        starts = [(stage.measure_s, True, stage.name) for stage in recorder.plan]
        ends = [(stage.end_s, False, stage.name) for stage in recorder.plan if stage.end_s < math.inf]
        moments = sorted(starts + ends)
        next_gpu_s = 0.0
        while True:
            now_s = recorder.elapsed_s
            reached = [moment for moment in moments if moment[0] <= now_s]
            if reached:
                counters = self._read()
                for _, is_start, name in reached:
                    if is_start:
                        self._opened[name] = counters
                    else:
                        self.edges[name] = self._opened[name], counters
                moments = moments[len(reached) :]
            if now_s >= next_gpu_s:
                next_gpu_s = now_s + INTERVAL_S
                self._look_at_gpus(now_s)
            wait_until_s = min([next_gpu_s, *(moment[0] for moment in moments[:1])])
            gevent.sleep(max(wait_until_s - recorder.elapsed_s, 0.001))

    def finish(self) -> None:
        """After the test: the last counts, and those of stages that its end cut off."""
        if self.metrics_url:
            gevent.sleep(server_metrics.PUBLISH_INTERVAL_S + 0.3)
        self.last = self._read()
        for name, counters in self._opened.items():
            self.edges.setdefault(name, (counters, self.last))

    def _read(self) -> Series:
        if not self.metrics_url:
            return {}
        try:
            return server_metrics.read(self.metrics_url)
        except OSError:  # a server that is stuck or gone: the requests' failures say so
            return self.last

    def _look_at_gpus(self, now_s: float) -> None:
        series = self._read()
        found = [
            GpuReading(
                now_s,
                dict(labels).get("gpu_uuid", "GPU"),
                value,
                series.get(("nv_gpu_memory_used_bytes", labels), math.nan) / 2**20,
            )
            for (name, labels), value in series.items()
            if name == "nv_gpu_utilization"
        ]
        self.gpus += found or (self._ask_smi(now_s) if self.is_local else [])

    def _ask_smi(self, now_s: float) -> list[GpuReading]:
        if shutil.which(_SMI[0]) is None:
            return []
        done = subprocess.run(_SMI, capture_output=True, text=True, timeout=10, check=False)
        readings = []
        for line in done.stdout.splitlines():
            cells = [cell.strip() for cell in line.split(",")]
            if len(cells) == 3 and cells[1].isdecimal() and cells[2].isdecimal():
                readings.append(GpuReading(now_s, f"GPU {cells[0]}", int(cells[1]) / 100, float(cells[2])))
        return readings

"""Counts what serving does and hands it on to Triton's metrics endpoint once a second.

A call of Triton's custom metrics crosses to the server's process (about 50 us), so nothing on the way of a request
makes one: counts are kept here and a thread passes on what has changed. Names and base units follow Prometheus, the
labels `model` and `version` are Triton's. Histograms are published as the counters a histogram consists of
(`_bucket` with `le`, `_sum`, `_count`): Triton's own histogram takes one crossing for each observation.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .buckets import Cost, Ladder

Labels = tuple[tuple[str, str], ...]
Key = tuple[str, Labels]
Sink = Callable[[str, Labels, float], None]

DESCRIPTIONS: Mapping[str, str] = {
    "ortgraph_requests_total": "Requests answered, by outcome",
    "ortgraph_bucket_hits_total": "Groups run, by the bucket that held them",
    "ortgraph_eager_runs_total": "Groups run without a captured graph, by reason",
    "ortgraph_real_elements_total": "Input elements that came from requests",
    "ortgraph_padded_elements_total": "Input elements added as padding",
    "ortgraph_device_seconds_total": "Replays' estimated time, by each bucket's measured when the model was loaded",
    "ortgraph_padding_seconds_total": "Part of ortgraph_device_seconds_total, by cause: beyond the time interpolated "
    "at the rows and longest sizes sent (bucket), and from there to their mean sizes (joining)",
    "ortgraph_group_rows": "Rows of a group",
    "ortgraph_group_requests": "Requests of a group",
    "ortgraph_staging_seconds": "Time to copy a group's inputs in",
    "ortgraph_run_seconds": "Time from the start of a group's run to its outputs",
    "ortgraph_captures_total": "Graphs captured, before and after the model was ready",
    "ortgraph_capture_seconds": "Time to capture one bucket's graph, its first run included",
    "ortgraph_live_buckets": "Buckets that can be replayed now",
    "ortgraph_pool_hits_total": "Device buffers of a new bucket that a retired one had given back",
    "ortgraph_pool_misses_total": "Device buffers of a new bucket that were allocated",
}
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_COUNTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_BOUNDS: Mapping[str, tuple[float, ...]] = {
    "ortgraph_group_rows": _COUNTS,
    "ortgraph_group_requests": _COUNTS,
    "ortgraph_staging_seconds": _SECONDS,
    "ortgraph_run_seconds": _SECONDS,
    "ortgraph_capture_seconds": _SECONDS,
}
GAUGES = frozenset({"ortgraph_live_buckets"})


@dataclass
class _Histogram:
    counts: list[int]
    total: float = 0.0


class Metrics:
    """The counts of one model instance. Any thread may add; one lock guards all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[Key, float] = {}
        self._histograms: dict[str, _Histogram] = {
            name: _Histogram([0] * (len(bounds) + 1)) for name, bounds in _BOUNDS.items()
        }
        self._passed_on: dict[Key, float] = {}

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        self.record((((name, tuple(labels.items())), value),), ())

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        with self._lock:
            self._counters[name, ()] = value

    def observe(self, name: str, value: float) -> None:
        """Count one observation of a histogram."""
        self.record((), ((name, value),))

    def record(self, counts: Iterable[tuple[Key, float]], observations: Iterable[tuple[str, float]]) -> None:
        """What one group counts, under one lock."""
        with self._lock:
            for key, value in counts:
                self._counters[key] = self._counters.get(key, 0.0) + value
            for name, value in observations:
                histogram = self._histograms[name]
                histogram.counts[bisect.bisect_left(_BOUNDS[name], value)] += 1
                histogram.total += value

    def values(self) -> dict[Key, float]:
        """Every series and its value since the start; histograms cumulative, as Prometheus wants them."""
        with self._lock:
            found = dict(self._counters)
            for name, histogram in self._histograms.items():
                running = 0
                bounds = [*map(_bound, _BOUNDS[name]), "+Inf"]
                for bound, count in zip(bounds, histogram.counts, strict=True):
                    running += count
                    found[f"{name}_bucket", (("le", bound),)] = running
                found[f"{name}_sum", ()] = histogram.total
                found[f"{name}_count", ()] = running
        return found

    def pass_on(self, sink: Sink) -> None:
        """Give `sink` what each series has changed by since the last call; only gauges shrink."""
        for (name, labels), value in self.values().items():
            grown = value - self._passed_on.get((name, labels), 0.0)
            if grown:
                self._passed_on[name, labels] = value
                sink(name, labels, grown)


def interpolated(cost: Cost, ladders: Sequence[Ladder], sizes: Sequence[float]) -> float:
    """The time of a run at sizes between those of the buckets: linear in each dimension, never negative.

    Below a ladder's first size the line through its first two goes on; a single one is a line through 0.
    """
    corners: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    for size, ladder in zip(sizes, ladders, strict=True):
        place = bisect.bisect_left(ladder, size)
        if place < len(ladder) and ladder[place] == size:
            corners = [(weight, (*corner, ladder[place])) for weight, corner in corners]
            continue
        if len(ladder) == 1:
            corners = [(weight * size / ladder[0], (*corner, ladder[0])) for weight, corner in corners]
            continue
        place = min(max(place, 1), len(ladder) - 1)
        low, high = ladder[place - 1], ladder[place]
        share = (size - low) / (high - low)
        corners = [
            (weight * part, (*corner, end))
            for weight, corner in corners
            for part, end in ((1.0 - share, low), (share, high))
        ]
    return max(sum(weight * cost(corner) for weight, corner in corners), 0.0)


def _bound(bound: float) -> str:
    return f"{bound:g}"


def describe(series: str) -> str:
    """The help text of a series."""
    name = series
    for suffix in ("_bucket", "_sum", "_count"):
        name = name.removesuffix(suffix) if name not in DESCRIPTIONS else name
    return DESCRIPTIONS[name]


class Source(Protocol):
    """Where counts are kept."""

    def pass_on(self, sink: Sink) -> None:
        """Give `sink` what each series has changed by since the last call."""


class MetricsThread:
    """Passes a model's counts on every `interval_s` seconds until it is closed, and once more then."""

    def __init__(self, metrics: Source, sink: Sink, interval_s: float = 1.0) -> None:
        self._metrics = metrics
        self._sink = sink
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="ortgraph-metrics", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._metrics.pass_on(self._sink)

    def close(self) -> None:
        """Stop after passing on what is left; calling it twice is safe."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self._metrics.pass_on(self._sink)

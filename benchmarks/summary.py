"""From slices to ratios: each target against the first one, round by round, so that both saw the same machine."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.rounds import Slice
from loadtest.percentiles import Latency


@dataclass(frozen=True)
class Spread:
    """The median of the rounds' ratios, and the lowest and the highest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """From one value a round."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """One target under one load. Percentiles are of the samples of all rounds; ratios are target / first target."""

    target: str
    load: str
    latency: Latency
    throughput_rps: float
    failures: dict[str, int]
    throughput_ratio: Spread
    p50_ratio: Spread
    p99_ratio: Spread
    server_cpu_cores: float
    loader_cpu_cores: float
    idle_cpu_cores: float
    other_cpu_cores: float
    bucket_hits: dict[str, float]


def summarise(slices: Sequence[Slice]) -> list[Row]:
    """A row for each load and target, in the order in which they were first measured."""
    loads = list(dict.fromkeys(s.load for s in slices))
    targets = list(dict.fromkeys(s.target for s in slices))
    rows = []
    for load in loads:
        base = _of(slices, load, targets[0])
        rows += [_row(_of(slices, load, target), base) for target in targets]
    return rows


def _of(slices: Sequence[Slice], load: str, target: str) -> list[Slice]:
    return sorted((s for s in slices if s.load == load and s.target == target), key=lambda s: s.round)


def _row(own: Sequence[Slice], base: Sequence[Slice]) -> Row:
    measured_s = sum(s.measured.measured_s for s in own)
    latencies = [Latency.of(s.measured.latencies_ms) for s in own]
    base_latencies = [Latency.of(s.measured.latencies_ms) for s in base]
    pairs = list(zip(own, base, latencies, base_latencies, strict=True))
    failures: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    for part in own:
        failures.update(part.measured.failures)
        hits.update(part.bucket_hits)
    return Row(
        target=own[0].target,
        load=own[0].load,
        latency=Latency.of([sample for s in own for sample in s.measured.latencies_ms]),
        throughput_rps=statistics.median(_rps(s) for s in own),
        failures=dict(failures),
        throughput_ratio=Spread.of([_divide(_rps(mine), _rps(other)) for mine, other, _, _ in pairs]),
        p50_ratio=Spread.of([_divide(mine.p50_ms, other.p50_ms) for _, _, mine, other in pairs]),
        p99_ratio=Spread.of([_divide(mine.p99_ms, other.p99_ms) for _, _, mine, other in pairs]),
        server_cpu_cores=sum(s.server_cpu_s for s in own) / sum(s.measured.elapsed_s for s in own),
        loader_cpu_cores=sum(s.measured.loader_cpu_s for s in own) / measured_s,
        idle_cpu_cores=sum(s.idle_cpu_s for s in own) / sum(s.measured.elapsed_s for s in own),
        other_cpu_cores=sum(s.other_cpu_s for s in own) / sum(s.measured.elapsed_s for s in own),
        bucket_hits=dict(hits.most_common()),
    )


def _rps(part: Slice) -> float:
    return len(part.measured.latencies_ms) / part.measured.measured_s


def _divide(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")

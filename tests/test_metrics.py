"""Counters and histograms as Prometheus wants them, each growth handed on once."""

from __future__ import annotations

import threading

import pytest

from ortgraph.metrics import DESCRIPTIONS, Labels, Metrics, MetricsThread, describe, interpolated


class Sink:
    """Adds up what it is given, as Triton's counters do."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Labels, float]] = []

    def __call__(self, name: str, labels: Labels, value: float) -> None:
        self.calls.append((name, labels, value))

    def total(self, name: str, **labels: str) -> float:
        return sum(value for n, found, value in self.calls if (n, dict(found)) == (name, labels))


def test_counters_by_label() -> None:
    metrics = Metrics()
    metrics.add("ortgraph_bucket_hits_total", bucket="batch=1")
    metrics.add("ortgraph_bucket_hits_total", 2, bucket="batch=2")
    metrics.add("ortgraph_bucket_hits_total", bucket="batch=1")
    metrics.add("ortgraph_real_elements_total", 5)
    values = metrics.values()
    assert values["ortgraph_bucket_hits_total", (("bucket", "batch=1"),)] == 2
    assert values["ortgraph_bucket_hits_total", (("bucket", "batch=2"),)] == 2
    assert values["ortgraph_real_elements_total", ()] == 5


def test_a_histogram_is_cumulative_and_its_bounds_are_inclusive() -> None:
    metrics = Metrics()
    for rows in (1, 2, 2, 3, 128, 500):
        metrics.observe("ortgraph_group_rows", rows)
    values = metrics.values()
    bounds = ["1", "2", "4", "8", "16", "32", "64", "128", "+Inf"]
    counts = [values["ortgraph_group_rows_bucket", (("le", bound),)] for bound in bounds]
    assert counts == [1, 3, 4, 4, 4, 4, 4, 5, 6]
    assert values["ortgraph_group_rows_sum", ()] == 636
    assert values["ortgraph_group_rows_count", ()] == 6


def test_small_bounds_are_written_without_an_exponent() -> None:
    metrics = Metrics()
    metrics.observe("ortgraph_run_seconds", 0.0002)
    values = metrics.values()
    assert values["ortgraph_run_seconds_bucket", (("le", "0.0001"),)] == 0
    assert values["ortgraph_run_seconds_bucket", (("le", "0.00025"),)] == 1
    assert values["ortgraph_run_seconds_sum", ()] == 0.0002


def test_growth_is_passed_on_once() -> None:
    metrics, sink = Metrics(), Sink()
    metrics.pass_on(sink)
    assert sink.calls == []
    metrics.add("ortgraph_requests_total", 3, outcome="answered")
    metrics.observe("ortgraph_group_rows", 40)
    metrics.pass_on(sink)
    assert sorted(sink.calls) == [
        ("ortgraph_group_rows_bucket", (("le", "+Inf"),), 1),
        ("ortgraph_group_rows_bucket", (("le", "128"),), 1),
        ("ortgraph_group_rows_bucket", (("le", "64"),), 1),
        ("ortgraph_group_rows_count", (), 1),
        ("ortgraph_group_rows_sum", (), 40),
        ("ortgraph_requests_total", (("outcome", "answered"),), 3),
    ]
    sink.calls.clear()
    metrics.pass_on(sink)
    assert sink.calls == []
    metrics.add("ortgraph_requests_total", outcome="answered")
    metrics.pass_on(sink)
    assert sink.calls == [("ortgraph_requests_total", (("outcome", "answered"),), 1)]


def test_every_series_has_a_description_and_a_conventional_name() -> None:
    metrics = Metrics()
    metrics.add("ortgraph_requests_total", outcome="answered")
    for name, _ in metrics.values():
        assert describe(name) in DESCRIPTIONS.values()
    for name in DESCRIPTIONS:
        assert name.startswith("ortgraph_") and name.endswith(("_total", "_seconds", "_rows", "_requests", "_buckets"))
    assert describe("ortgraph_run_seconds_bucket") == DESCRIPTIONS["ortgraph_run_seconds"]
    assert describe("ortgraph_real_elements_total") == DESCRIPTIONS["ortgraph_real_elements_total"]
    with pytest.raises(KeyError):
        describe("ortgraph_unknown_total")


def test_threads_lose_no_count() -> None:
    metrics = Metrics()

    def work() -> None:
        for _ in range(2000):
            metrics.add("ortgraph_requests_total", outcome="answered")
            metrics.observe("ortgraph_group_rows", 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.values()["ortgraph_requests_total", (("outcome", "answered"),)] == 8000
    assert metrics.values()["ortgraph_group_rows_count", ()] == 8000


def test_the_thread_passes_everything_on_and_closes_twice() -> None:
    metrics, sink = Metrics(), Sink()
    thread = MetricsThread(metrics, sink, interval_s=0.001)
    for _ in range(100):
        metrics.add("ortgraph_requests_total", outcome="answered")
    thread.close()
    thread.close()
    assert sink.total("ortgraph_requests_total", outcome="answered") == 100


def test_closing_passes_on_what_no_interval_did() -> None:
    metrics, sink = Metrics(), Sink()
    thread = MetricsThread(metrics, sink, interval_s=3600)
    metrics.add("ortgraph_requests_total", 7, outcome="answered")
    thread.close()
    assert sink.calls == [("ortgraph_requests_total", (("outcome", "answered"),), 7)]


def test_a_time_between_buckets_is_linear_in_each_size() -> None:
    ladders = ((1, 2, 8), (16, 64))

    def cost(sizes: tuple[int, ...]) -> float:
        return 5.0 + 2.0 * sizes[0] + 0.5 * sizes[0] * sizes[1]

    for rows, length in ((1, 16), (2, 40.5), (3, 64), (7, 17.25), (8, 8)):
        assert interpolated(cost, ladders, (rows, length)) == pytest.approx(5 + 2 * rows + 0.5 * rows * length)
    assert interpolated(lambda sizes: 3.0, ((8,),), (2,)) == 0.75
    assert interpolated(lambda sizes: sizes[0] - 16.0, ((16, 32),), (8,)) == 0.0

"""Runs Locust inside this process for a set time, and keeps every sample."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gevent
from locust.env import Environment

from loadtest import server_metrics
from loadtest.base_user import InferUser, sample_pool
from loadtest.percentiles import Latency


@dataclass
class Recorder:
    """Listens to Locust's `request` event. Percentiles are of right answers: a quick refusal would flatter them."""

    latencies_ms: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    is_on: bool = False

    def on_request(self, response_time: float, exception: Exception | None, **_: Any) -> None:
        """Failures count from the first request on, latencies only while `is_on`."""
        if exception is not None:
            self.failures[f"{type(exception).__name__}: {exception}"] += 1
        elif self.is_on:
            self.latencies_ms.append(response_time)


@dataclass(frozen=True)
class Result:
    """What a run gave. `bucket_hits` has those of the warm-up too; None where the server's metrics were not asked."""

    protocol: str
    model: str
    users: int
    duration_s: float
    latency: Latency
    throughput_rps: float
    failures: dict[str, int]
    bucket_hits: dict[str, float] | None


def run(
    user_class: type[InferUser],
    parsed: argparse.Namespace,
    *,
    address: str,
    users: int,
    duration_s: float,
    warmup_s: float,
    metrics_url: str | None,
    step: Callable[[str, float, float], None] = lambda text, done_s, total_s: None,
) -> Result:
    """Closed loop: each of `users` sends its next request as soon as the answer to its last one is there.

    Args:
        parsed: options of `options.add_arguments`.
        metrics_url: Triton's metrics endpoint, or None to do without bucket hits.
        step: told what goes on now, for how many seconds already, and of how many (0 where that is not known).

    Raises:
        LoadTestError: the right answers cannot be computed.
        OSError: the metrics endpoint does not answer.
    """
    environment = Environment(user_classes=[user_class], host=address, parsed_options=parsed, stop_timeout=10.0)
    recorder = Recorder()
    environment.events.request.add_listener(recorder.on_request)
    step("computing the right answers", 0.0, 0.0)
    sample_pool(environment)
    before = server_metrics.read(metrics_url) if metrics_url else {}
    runner = environment.create_local_runner()
    try:
        runner.start(users, spawn_rate=users)
        _wait("warming up", warmup_s, step)
        recorder.is_on = True
        start_s = time.perf_counter()
        _wait("measuring", duration_s, step)
        recorder.is_on = False
        measured_s = time.perf_counter() - start_s
        step("stopping", 0.0, 0.0)
        runner.stop()
    finally:
        runner.quit()
    hits = None
    if metrics_url:
        after = server_metrics.read_settled(metrics_url)
        hits = dict(server_metrics.growth(before, after, server_metrics.BUCKET_HITS, "bucket", model=parsed.model))
    return Result(
        protocol=user_class.protocol,
        model=parsed.model,
        users=users,
        duration_s=measured_s,
        latency=Latency.of(recorder.latencies_ms),
        throughput_rps=len(recorder.latencies_ms) / measured_s,
        failures=dict(recorder.failures),
        bucket_hits=hits,
    )


def _wait(text: str, seconds: float, step: Callable[[str, float, float], None]) -> None:
    """Let the users work for so long."""
    start_s = time.perf_counter()
    while (done_s := time.perf_counter() - start_s) < seconds:
        step(text, done_s, seconds)
        gevent.sleep(min(0.25, seconds - done_s))

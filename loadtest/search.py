"""The highest rate that holds a P99, by bisection."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from loadtest.bench import Bench
from loadtest.result import Result
from loadtest.runner import Step

# A closed loop that saturates the server says where to look: no open loop holds much more.
ABOVE_SATURATION = 1.1
# An open loop whose answers come this much more slowly than it asks has a queue that grows.
KEEPS_UP = 0.95


@dataclass(frozen=True)
class Trial:
    """One rate that was tried, requests a second, and the highest that held until then (0: none)."""

    rate: float
    throughput_rps: float
    p99_ms: float
    answers: int
    failures: int
    held: bool
    highest: float


def search(bench: Bench, parsed: argparse.Namespace, step: Step) -> tuple[Result | None, list[Trial]]:
    """Bisect between 0 and what a closed loop reaches.

    Args:
        parsed: `p99_ms` is what must hold, `precision` how near the ends must come, relative to the upper one.

    Returns:
        The run at the highest rate that held (None: no rate did), and all trials in order.
    """
    low, high = 0.0, ABOVE_SATURATION * bench.saturate()
    best: Result | None = None
    trials: list[Trial] = []
    # Each trial halves what is left; the first ones may move the upper end, so this is an upper bound.
    count = math.ceil(math.log2(1 / parsed.precision)) + 1
    each_s = parsed.warmup_s + parsed.duration_s
    while high - low > parsed.precision * high and len(trials) < 2 * count:
        rate, done = (low + high) / 2, len(trials)
        total_s = max(count, done + 1) * each_s

        def tell(
            text: str, done_s: float, _: float, rate: float = rate, done: int = done, total_s: float = total_s
        ) -> None:
            step(f"trial {done + 1} of about {count}, {rate:.1f} requests/s", done * each_s + done_s, total_s)

        bench.step = tell
        result = bench.run(rate=rate, shape="flat")
        failures = sum(result.failures.values())
        enough = min(KEEPS_UP, 1 - 3 / math.sqrt(max(rate * result.measured_s, 10)))  # Poisson's own scatter
        held = (
            result.latency.p99_ms <= parsed.p99_ms
            and failures <= parsed.max_failures
            and result.throughput_rps >= enough * rate
        )
        if held:
            low, best = rate, result
        else:
            high = rate
        latency = result.latency
        trials.append(Trial(rate, result.throughput_rps, latency.p99_ms, latency.count, failures, held, low))
    return best, trials

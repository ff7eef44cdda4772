"""Does a result keep a promise? For CI: what does not hold makes the exit code 1."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from loadtest.percentiles import Latency


@dataclass(frozen=True)
class Check:
    """A value and its limit; `text` says both."""

    text: str
    passed: bool


def check(parsed: argparse.Namespace, latency: Latency, throughput_rps: float, failures: int) -> list[Check]:
    """The checks that the options ask for; that of failures always."""
    most = parsed.max_failures
    checks = [Check(f"failures {failures}, allowed {most}", failures <= most)]
    if parsed.p99_ms is not None:
        # NaN, no answer at all, does not pass.
        checks.append(
            Check(f"P99 {latency.p99_ms:.2f} ms, allowed {parsed.p99_ms:g} ms", latency.p99_ms <= parsed.p99_ms)
        )
    if parsed.min_rps is not None:
        is_enough = throughput_rps >= parsed.min_rps
        checks.append(Check(f"{throughput_rps:.1f} requests/s, wanted {parsed.min_rps:g}", is_enough))
    return checks

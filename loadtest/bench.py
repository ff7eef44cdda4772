"""One kind of user against one server: a run, the rate at which it saturates, the generator's own ceiling."""

from __future__ import annotations

import argparse
from typing import Any

from loadtest.base_user import InferUser
from loadtest.options import Requests
from loadtest.result import Ceiling, Result, summarise
from loadtest.runner import Step, load
from loadtest.samples import LoadTestError
from loadtest.servers import noop_server
from loadtest.shapes import OPEN_LOOP_USERS

SATURATE_S = 5.0


class Bench:
    """Set `address` (`host:port`) and `metrics_url` (None: do without) before anything but `measure_ceiling`."""

    def __init__(self, user_class: type[InferUser], parsed: argparse.Namespace, *, command: str, step: Step) -> None:
        self.user_class = user_class
        self.parsed = parsed
        self.command = command
        self.step = step
        self.address = ""
        self.metrics_url: str | None = None
        self.ceiling: Ceiling | None = None

    def run(self, **changed: Any) -> Result:
        """Measure with the options, some of them changed.

        Raises:
            LoadTestError: the right answers cannot be computed, or a worker does not start.
        """
        parsed = argparse.Namespace(**{**vars(self.parsed), **changed})
        recorder, monitor = load(
            self.user_class,
            parsed,
            address=self.address,
            metrics_url=self.metrics_url,
            processes=parsed.processes,
            step=self.step,
        )
        return summarise(
            recorder,
            monitor,
            parsed,
            protocol=self.user_class.protocol,
            users=parsed.num_users,
            command=self.command,
            processes=parsed.processes,
            ceiling=self.ceiling,
        )

    def saturate(self) -> float:
        """Requests a second of a closed loop with all users.

        Raises:
            LoadTestError: there was no right answer.
        """
        result = self.run(rate=0.0, shape="flat", duration_s=SATURATE_S)
        if not result.throughput_rps:
            why = next(iter(result.failures), f"none came in {SATURATE_S:g} s")
            raise LoadTestError(f"no right answer came: {why}")
        return result.throughput_rps

    def measure_ceiling(self, duration_s: float) -> None:
        """A closed loop against a model that does nothing, served here for it."""
        self.step("starting a server that does nothing", 0.0, 0.0)
        with noop_server(Requests.of(self.parsed)) as server:
            self.address = server.grpc_url if self.user_class.protocol == "gRPC" else server.http_url
            common: dict[str, Any] = {"shape": "flat", "duration_s": duration_s, "warmup_s": 0.5, "is_noop": True}
            result = self.run(rate=0.0, **common)
            if result.failures:
                raise LoadTestError(f"the generator's ceiling cannot be measured: {next(iter(result.failures))}")
            cores: float | None = None
            if result.throughput_rps > 1000:
                users = max(self.parsed.num_users, OPEN_LOOP_USERS)
                cores = self.run(rate=1000.0, num_users=users, **common).generator.cpu_cores
        self.ceiling = Ceiling(result.throughput_rps, result.latency.p50_ms, result.latency.p99_ms, cores)

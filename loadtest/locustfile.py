"""For Locust's own command line and web UI: `locust -f loadtest/locustfile.py InferHttpUser`."""

from __future__ import annotations

import sys
from typing import Any

import gevent
from locust import events
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from loadtest import report
from loadtest.base_user import sample_pool
from loadtest.grpc_user import InferGrpcUser
from loadtest.http_user import InferHttpUser
from loadtest.monitor import Monitor, is_local, metrics_url
from loadtest.options import add_arguments
from loadtest.recorder import STOP_TIMEOUT_S, recorder
from loadtest.result import summarise
from loadtest.samples import LoadTestError
from loadtest.shared_memory_user import InferCudaSharedMemoryUser, InferSystemSharedMemoryUser

__all__ = ["InferCudaSharedMemoryUser", "InferGrpcUser", "InferHttpUser", "InferSystemSharedMemoryUser"]


def prepare(environment: Environment, **_: Any) -> None:
    """Compute the right answers before Locust's clock starts, and keep every sample from then on."""
    is_worker, is_master = (isinstance(environment.runner, kind) for kind in (WorkerRunner, MasterRunner))
    if not is_master:  # in the web UI the options may change; before the recorder, whose clock then starts
        environment.events.test_start.add_listener(lambda **_: sample_pool(environment))
    found = recorder(environment)
    found.listen()
    environment.stop_timeout = max(environment.stop_timeout, STOP_TIMEOUT_S)
    if not is_master:
        try:
            sample_pool(environment)
        except LoadTestError as error:
            sys.exit(f"error: {error}")
    if is_worker:
        found.ready()
    else:
        Reporter(environment)


class Reporter:
    """Watches the server during each test, and writes the report: when Locust ends, and with its web UI each time."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.monitor: Monitor | None = None
        self.watching: Any = None
        environment.events.test_start.add_listener(self.start)
        environment.events.test_stop.add_listener(self.stop)
        environment.events.quitting.add_listener(self.quit)

    def start(self, **_: Any) -> None:
        """Begin to watch; the recorder, which listens too, has been told first."""
        user_class = self.environment.user_classes[0]
        address = self.environment.host or user_class.host
        self.monitor = Monitor(metrics_url(self.environment.parsed_options, address), is_local(address))
        self.watching = gevent.spawn(self.monitor.watch, recorder(self.environment))

    def stop(self, **_: Any) -> None:
        """Locust's web UI may start another test."""
        if self.environment.web_ui is not None:
            self.write()

    def quit(self, **_: Any) -> None:
        """Write what there is, and let the gate decide Locust's exit code."""
        if self.environment.web_ui is None and self.monitor is not None:
            recorder(self.environment).finish()
            self.write()

    def write(self) -> None:
        """The report, where `--report` asks for one."""
        assert self.monitor is not None
        environment, parsed = self.environment, self.environment.parsed_options
        self.watching.kill()
        self.monitor.finish()
        result = summarise(
            recorder(environment),
            self.monitor,
            parsed,
            protocol=" and ".join(sorted({user_class.protocol for user_class in environment.user_classes})),
            users=environment.runner.target_user_count,
            command=f"locust {' '.join(sys.argv[1:])}",
            processes=len(recorder(environment).cpu_s),
        )
        if parsed.report:
            print(f"report: {report.write(parsed.report, result)}", file=sys.stderr)
        for check in result.gate:
            if not check.passed:
                print(f"gate: {check.text}", file=sys.stderr)
        if not result.passed:
            environment.process_exit_code = 1


events.init_command_line_parser.add_listener(add_arguments)
events.init.add_listener(prepare)

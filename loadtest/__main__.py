"""`python -m loadtest`: a load test without Locust's web UI. Exit code 1 when any answer was wrong or missing."""

from __future__ import annotations

# First of all: Locust makes the standard library cooperative, and what is imported before it would not be.
# isort: off
import locust  # noqa: F401

# isort: on

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from loadtest import report
from loadtest.base_user import InferUser
from loadtest.options import add_arguments, positive_float
from loadtest.runner import run
from loadtest.samples import LoadTestError

PORTS = {"http": 8000, "grpc": 8001}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="python -m loadtest", description=__doc__)
    parser.add_argument("--protocol", choices=PORTS, default="http", help="default: http")
    parser.add_argument("--url", help="host:port of that protocol (default: 127.0.0.1 and Triton's own port)")
    parser.add_argument("--users", type=int, default=8, help="each has one request on its way (default: 8)")
    parser.add_argument("--duration-s", type=positive_float, default=10.0, help="measured (default: 10)")
    parser.add_argument("--warmup-s", type=positive_float, default=1.0, help="before that, not counted (default: 1)")
    parser.add_argument(
        "--metrics-url", default="http://127.0.0.1:8002/metrics", help="for bucket hits; '' to do without"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_arguments(parser)
    parsed = parser.parse_args(arguments)
    if parsed.users < 1:
        parser.error(f"--users must be a whole number from 1, got {parsed.users}")
    progress_console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=progress_console, transient=True) as progress:
            task = progress.add_task("load test", total=None)
            result = run(
                _user_class(parsed.protocol),
                parsed,
                address=parsed.url or f"127.0.0.1:{PORTS[parsed.protocol]}",
                users=parsed.users,
                duration_s=parsed.duration_s,
                warmup_s=parsed.warmup_s,
                metrics_url=parsed.metrics_url or None,
                step=lambda text, done_s, total_s: progress.update(
                    task, description=text, completed=done_s, total=total_s or None
                ),
            )
    except (LoadTestError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if parsed.json:
        print(report.to_json(result))
    else:
        report.show(Console(highlight=False), result)
    if not result.latency.count:
        print("error: no right answer came in the measured time", file=sys.stderr)
    return 1 if result.failures or not result.latency.count else 0


def _user_class(protocol: str) -> type[InferUser]:
    """gRPC is imported only where it is used: it changes how the process waits."""
    if protocol == "grpc":
        from loadtest.grpc_user import InferGrpcUser

        return InferGrpcUser
    from loadtest.http_user import InferHttpUser

    return InferHttpUser


if __name__ == "__main__":
    sys.exit(main())

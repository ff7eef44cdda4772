"""`python -m loadtest`: a load test without Locust's web UI, with a report and a gate for CI.

Exit code 1 when an answer was wrong or missing, or a promise (--p99-ms, --min-rps) was not kept.
"""

from __future__ import annotations

# First of all: Locust makes the standard library cooperative, and what is imported before it would not be.
# isort: off
import locust  # noqa: F401

# isort: on

import argparse
import contextlib
import importlib
import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from loadtest import report
from loadtest.bench import Bench
from loadtest.monitor import metrics_url
from loadtest.options import Requests, add_arguments, non_negative_float, positive_float, positive_int
from loadtest.result import Result
from loadtest.samples import LoadTestError
from loadtest.search import Trial, search
from loadtest.servers import model_server
from loadtest.shapes import OPEN_LOOP_USERS
from ortgraph.errors import OrtgraphError

# The user's module and class, and the port that Triton has for it. gRPC is imported only where it is used: it changes
# how the process waits.
PROTOCOLS = {
    "http": ("http_user", "InferHttpUser", 8000),
    "grpc": ("grpc_user", "InferGrpcUser", 8001),
    "system-shm": ("shared_memory_user", "InferSystemSharedMemoryUser", 8000),
    "cuda-shm": ("shared_memory_user", "InferCudaSharedMemoryUser", 8000),
}
EXAMPLES = """examples:
  python -m loadtest                                    serve the sample model, 8 users for ten seconds
  python -m loadtest --rate 50 --report loadtest-report --url 127.0.0.1:8000
  python -m loadtest --auto-rate --shape steps --report loadtest-report
  python -m loadtest --search --p99-ms 100              the highest rate that holds a P99 of 100 ms
"""


def parser() -> argparse.ArgumentParser:
    """All options."""
    found = argparse.ArgumentParser(
        prog="python -m loadtest",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--protocol", choices=PROTOCOLS, default="http", help="default: http")
    add("--url", help="host:port of that protocol (shared memory: of HTTP); without it the model is served here")
    add("--users", dest="num_users", type=positive_int, help="each has one request on its way (default: 8; open: 64)")
    add("--processes", type=positive_int, default=1, help="that make the load, as Locust workers (default: 1)")
    add("--auto-rate", action="store_true", help="open loop up to 1.2 times what a closed loop reaches first")
    add("--search", action="store_true", help="find the highest rate that holds --p99-ms")
    add("--precision", type=positive_float, default=0.05, help="of the search, relative (default: 0.05)")
    add(
        "--ceiling-s",
        type=non_negative_float,
        help="measure the generator against a model that does nothing; 0: do not (default: 3 with --report, else 0)",
    )
    add("--json", action="store_true", help="print JSON instead of tables")
    add_arguments(found)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, print."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser()
    parsed = options.parse_args(words)
    if parsed.search and parsed.p99_ms is None:
        options.error("--search needs --p99-ms, the P99 to hold")
    if parsed.rate > 0 and (parsed.search or parsed.auto_rate):
        options.error("--rate cannot be given together with --search or --auto-rate, which find one")
    if parsed.num_users is None:
        is_open = parsed.rate > 0 or parsed.auto_rate or parsed.search
        parsed.num_users = OPEN_LOOP_USERS if is_open else 8
    parsed.headless = parsed.enable_rebalancing = False  # Locust's own, which its runners ask for
    logging.getLogger("locust").setLevel(logging.ERROR)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    try:
        if parsed.report:
            Path(parsed.report).mkdir(parents=True, exist_ok=True)  # before the load, not after it
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            result, trials = _run(parsed, words, progress)
    except (LoadTestError, OrtgraphError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: stopped by Ctrl-C; nothing was written", file=sys.stderr)
        return 130
    return _report(parsed, result, trials)


def _run(parsed: argparse.Namespace, words: Sequence[str], progress: Progress) -> tuple[Result | None, list[Trial]]:
    module, name, port = PROTOCOLS[parsed.protocol]
    user_class = getattr(importlib.import_module(f"loadtest.{module}"), name)
    task = progress.add_task("starting", total=None)

    def step(text: str, done_s: float, total_s: float) -> None:
        progress.update(task, description=text, completed=done_s, total=total_s or None)

    bench = Bench(user_class, parsed, command=shlex.join(["python", "-m", "loadtest", *words]), step=step)
    with contextlib.ExitStack() as stack:
        if parsed.ceiling_s or (parsed.ceiling_s is None and parsed.report):
            bench.measure_ceiling(parsed.ceiling_s or 3.0)
        if parsed.url is None:
            step("starting the server", 0.0, 0.0)
            server = stack.enter_context(model_server(Requests.of(parsed)))
            bench.address = server.grpc_url if parsed.protocol == "grpc" else server.http_url
            bench.metrics_url = server.metrics_url
        else:
            bench.address = parsed.url if ":" in parsed.url else f"{parsed.url}:{port}"
            bench.metrics_url = metrics_url(parsed, bench.address)
        if parsed.auto_rate:
            parsed.rate = 1.2 * bench.saturate()
        if parsed.search:
            return search(bench, parsed, step)
        return bench.run(), []


def _report(parsed: argparse.Namespace, result: Result | None, trials: Sequence[Trial]) -> int:
    more: dict[str, Any] = {"search": [asdict(trial) for trial in trials]} if trials else {}
    if result is None:
        rates = ", ".join(f"{trial.rate:.1f}" for trial in trials)
        print(f"error: no rate holds a P99 of {parsed.p99_ms:g} ms; tried {rates} requests/s", file=sys.stderr)
        return 1
    if parsed.report:
        print(f"report: {report.write(parsed.report, result, **more)}", file=sys.stderr)
    if parsed.json:
        print(report.to_json(result, **more))
    else:
        console = Console(highlight=False)
        report.show(console, result)
        if trials:
            console.print(
                f"highest rate with a P99 of at most {parsed.p99_ms:g} ms: {trials[-1].highest:.1f} requests/s"
            )
    if not result.latency.count:
        print("error: no right answer came in the measured time", file=sys.stderr)
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())

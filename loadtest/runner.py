"""Runs Locust inside this process for a set time, alone or as the master of worker processes."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import gevent
from locust.env import Environment

from loadtest.base_user import InferUser, sample_pool
from loadtest.monitor import Monitor, is_local
from loadtest.recorder import STOP_TIMEOUT_S, Recorder, recorder
from loadtest.samples import LoadTestError
from loadtest.shapes import StagedLoad

Step = Callable[[str, float, float], None]
LOCUSTFILE = Path(__file__).resolve().parent / "locustfile.py"
_CONNECT_S = 120.0


def load(
    user_class: type[InferUser],
    parsed: argparse.Namespace,
    *,
    address: str,
    metrics_url: str | None,
    processes: int = 1,
    step: Step = lambda text, done_s, total_s: None,
) -> tuple[Recorder, Monitor]:
    """Make the load that the options describe, and give what was recorded.

    Args:
        parsed: options of `options.add_arguments`, and `num_users`.
        metrics_url: Triton's metrics page, or None to do without.
        processes: more than 1 are Locust workers, each with its share of the users and of the rate.
        step: told what goes on now, for how many seconds already, and of how many (0 where that is not known).

    Raises:
        LoadTestError: the right answers cannot be computed, or a worker does not start.
    """
    environment = Environment(
        user_classes=[user_class],
        host=address,
        parsed_options=parsed,
        stop_timeout=STOP_TIMEOUT_S,
        shape_class=StagedLoad(),
    )
    found = recorder(environment)
    step("computing the right answers", 0.0, 0.0)
    if processes == 1:
        sample_pool(environment)
    monitor = Monitor(metrics_url, is_local(address))
    with contextlib.ExitStack() as stack:
        if processes == 1:
            runner = environment.create_local_runner()
        else:
            runner = environment.create_master_runner("127.0.0.1", _free_port())
        found.listen()
        stack.callback(runner.quit)
        if processes > 1:
            _start_workers(runner, user_class, processes, step, stack)
        end_s = environment.shape_class.plan()[-1].end_s
        runner.start_shape()
        watching: Any = None
        while (shape := runner.shape_greenlet) is not None and not shape.ready():
            if found.start_s and watching is None:
                watching = gevent.spawn(monitor.watch, found)
            step("under load", min(found.elapsed_s if found.start_s else 0.0, end_s), end_s)
            shape.join(timeout=0.25)
        step("reading the server's counters", 0.0, 0.0)
        if watching is not None:
            watching.kill()
        monitor.finish()
    return found, monitor


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def _start_workers(
    runner: Any, user_class: type[InferUser], count: int, step: Step, stack: contextlib.ExitStack
) -> None:
    """Wait until so many processes of this machine have connected to a master; they end with the stack.

    Raises:
        LoadTestError: one ended, or they did not connect in time.
    """
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), user_class.__name__, "--worker"]
    command += ["--master-host", "127.0.0.1", "--master-port", str(runner.master_bind_port)]
    command += _worker_options(runner.environment.parsed_options)
    log = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115  # closed by the stack
    workers = [stack.enter_context(_process(command, log)) for _ in range(count)]
    deadline_s = time.monotonic() + _CONNECT_S
    while len(runner.clients.ready) < count:
        step(f"starting {count} workers", 0.0, 0.0)
        if time.monotonic() > deadline_s or any(worker.poll() is not None for worker in workers):
            log.seek(0)
            last = next((line for line in reversed(log.read().splitlines()) if line.strip()), "it said nothing")
            raise LoadTestError(f"a load generator process did not start: {last.strip()}")
        gevent.sleep(0.1)


def _worker_options(parsed: argparse.Namespace) -> list[str]:
    """What a worker needs to make its requests before the test; the rest comes from the master."""
    options = {
        "--model": parsed.model,
        "--model-repository": parsed.model_repository,
        "--lengths": parsed.lengths,
        "--rows": parsed.rows,
        "--texts": parsed.texts,
        "--images": parsed.images,
        "--requests": parsed.requests,
        "--seed": parsed.seed,
    }
    return [str(word) for option in options.items() for word in option] + ["--is-noop"] * parsed.is_noop


@contextlib.contextmanager
def _process(command: list[str], log: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the context."""
    root = LOCUSTFILE.parent.parent
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path}, text=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)  # the master has told it to quit
        if process.poll() is None:
            process.terminate()
        process.wait()

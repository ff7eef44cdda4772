"""Servers of this machine for a load test that names none, and for the generator's own ceiling."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.targets import BenchmarkError, prepare
from loadtest.options import Requests
from loadtest.samples import LoadTestError
from ortgraph.server import TritonServer


@contextlib.contextmanager
def model_server(options: Requests) -> Iterator[TritonServer]:
    """Serves only the model under test, from its repository.

    Raises:
        LoadTestError: the model is not there or does not load. ServerError: the server does not start.
    """
    with _served("server", f"model={options.repository}", options) as server:
        yield server


@contextlib.contextmanager
def noop_server(options: Requests) -> Iterator[TritonServer]:
    """Serves a model of the same name and tensors that answers zeros and computes nothing. Raises as above."""
    with _served("noop", "noop", options) as server:
        yield server


@contextlib.contextmanager
def _served(name: str, target: str, options: Requests) -> Iterator[TritonServer]:
    with tempfile.TemporaryDirectory(prefix="ortgraph-loadtest-") as folder:
        try:
            repository = prepare(
                target, model=options.model, source=options.repository, folder=Path(folder) / "targets"
            ).repository
        except BenchmarkError as error:
            raise LoadTestError(str(error)) from error
        with TritonServer(repository, log_path=Path(folder) / f"{name}.log") as server:
            for model in server.models():
                if model.state != "READY":
                    raise LoadTestError(f"model {model.name} is {model.state}: {model.reason}")
            yield server
